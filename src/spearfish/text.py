"""Plain text for calibration and evaluation: where it comes from, and how it becomes windows of tokens."""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from spearfish.errors import FormatError, SpearfishError, UnsupportedError

# What ships with the package, by name: see compress/data/README.md.
SHIPPED = {"addresses": ("addresses",), "articles": ("articles",), "builtin": ("addresses", "articles")}

MAX_UNPACKED = 256 << 20  # bytes of text out of one compressed file


@dataclass(frozen=True)
class Windows:
    """tokens: int64 [count, length]. source: as asked for. sha256: of the tokens, so that two runs can be compared."""

    tokens: torch.Tensor
    source: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.tokens.to(torch.int64).contiguous().numpy().tobytes()).hexdigest()

    def __str__(self) -> str:
        count, length = self.tokens.shape
        return f"{count} windows of {length} tokens from {self.source}, data {self.sha256[:12]}"


def read_text(source: str) -> list[str]:
    """The documents of a source: "builtin" (ships with the package: "addresses" of presidents and short "articles",
    each also by itself), a text file (`.txt`, `.md`, `.xz`; documents are parted by blank lines), a folder of such
    files, or `hub:NAME` (a hub dataset with a "text" column).

    Raises FormatError if there is nothing to read.
    """
    if source == "self" and not Path(source).exists():
        raise FormatError("text: 'self' is what the dense model writes itself while it is compressed; it lies nowhere")
    if source in SHIPPED:
        return [document for name in SHIPPED[source] for document in _shipped(name)]
    if source.startswith("hub:"):
        return _from_hub(source.removeprefix("hub:"))
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md", ".xz") and file.is_file())
        documents = [document for file in found for document in _read_file(file)]
    elif path.is_file():
        documents = _read_file(path)
    else:
        raise FormatError(f"text: {source} is no file, no folder, no hub:NAME and none of {', '.join(SHIPPED)}")
    if not documents:
        raise FormatError(f"text: {source} holds no text (.txt, .md or .xz)")
    return documents


def _shipped(name: str) -> list[str]:
    file = files("spearfish").joinpath("compress", "data", f"{name}.txt.xz")
    return _split(lzma.decompress(file.read_bytes()).decode())


def _read_file(file: Path) -> list[str]:
    try:
        return _split((_unpack(file) if file.suffix == ".xz" else file.read_bytes()).decode())
    except OSError as error:
        raise FormatError(f"text: {file} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise FormatError(f"text: {file} is not UTF-8 text: {error}") from error


def _unpack(file: Path) -> bytes:
    """The text in an xz file, up to a limit: a few kB can hold gigabytes of one letter."""
    parts: list[bytes] = []
    left, raw = MAX_UNPACKED, file.read_bytes()
    while raw:
        unpacker = lzma.LZMADecompressor(memlimit=MAX_UNPACKED)
        parts.append(unpacker.decompress(raw, left + 1))
        left -= len(parts[-1])
        if left < 0:
            raise FormatError(
                f"text: {file} holds more than {MAX_UNPACKED >> 20} MiB of text; cut it into smaller files"
            )
        if not unpacker.eof:
            raise EOFError("it was cut off")
        raw = unpacker.unused_data.lstrip(b"\0")  # files laid end to end, and the padding between them
    return b"".join(parts)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split("\n\n") if part.strip()]


def _from_hub(name: str) -> list[str]:
    try:
        import datasets  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise UnsupportedError(f"hub:{name} needs the package datasets: pip install datasets") from error
    stream = datasets.load_dataset(name, split="train", streaming=True)
    documents: list[str] = []
    size = 0
    for row in stream:
        if "text" not in row:
            raise FormatError(f"hub:{name} has no column 'text', only {', '.join(row)}")
        documents.append(row["text"])
        size += len(row["text"])
        if size > 20_000_000:
            break
    return documents


def windows(tokenizer: Any, source: str, count: int, length: int, seed: int = 0, limit: int | None = None) -> Windows:
    """`count` windows of `length` tokens, drawn without replacement from the source's text cut into windows end to end.

    Each begins with the tokenizer's own first token if it has one: some families are lost without. Raises
    SpearfishError when the text is too short, or a window longer than `limit`, the model's longest input.
    """
    refuse_long(length, limit)
    cut = cut_windows(tokenizer, read_text(source), length)
    if len(cut) < count:
        raise SpearfishError(
            f"{source} gives {len(cut)} windows of {length} tokens, {count} are wanted: take more text, fewer samples"
            " or shorter windows"
        )
    order = torch.randperm(len(cut), generator=torch.Generator().manual_seed(seed))[:count]
    return Windows(cut[order], source)


def refuse_long(length: int, limit: int | None) -> None:
    """Raises SpearfishError if windows are longer than the model's longest input (None: not known)."""
    if limit is not None and length > limit:
        raise SpearfishError(f"windows of {length} tokens are longer than the model's longest input, {limit}")


def head(tokenizer: Any, source: str, count: int, length: int) -> torch.Tensor:
    """int64 [count, length]: the source's first windows; fewer if the text ends before. Raises SpearfishError if there
    is not one."""
    cut = cut_windows(tokenizer, read_text(source), length)[:count]
    if not len(cut):
        raise SpearfishError(f"{source} is shorter than one window of {length} tokens")
    return cut


def cut_windows(tokenizer: Any, documents: list[str], length: int) -> torch.Tensor:
    """int64 [count, length]: the documents end to end, cut into whole windows."""
    encode: Callable[..., Any] = tokenizer
    prefix = list(encode("").input_ids)
    between = list(encode("\n\n", add_special_tokens=False).input_ids)
    ids: list[int] = []
    for encoded in encode(documents, add_special_tokens=False).input_ids:
        ids.extend(encoded)
        ids.extend(between)
    body = length - len(prefix)
    if body < 1:
        raise SpearfishError(
            f"windows of {length} tokens have no room behind the {len(prefix)} of the tokenizer; take longer ones"
        )
    count = len(ids) // body
    tokens = torch.tensor(ids[: count * body], dtype=torch.int64).reshape(count, body)
    if prefix:
        tokens = torch.cat((torch.tensor(prefix).expand(count, -1), tokens), dim=1)
    return tokens
