"""Safetensors files, read with distrust: a header is checked against the file's size before memory is taken."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spearfish.errors import FormatError

# The names of the safetensors specification; the widths follow from the torch dtypes.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: `offset` and `nbytes` count bytes of the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: Path) -> dict[str, Entry]:
    """Every tensor of a safetensors file. Raises FormatError if the header is damaged, lies about the file's size, or
    leaves gaps or overlaps."""
    require_inside(file)
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(MAX_HEADER, size - 8):
                raise FormatError(
                    f"{file}: not a whole safetensors file: it has {size} bytes and its header claims {length}."
                    f" Fetch it again"
                )
            text = stream.read(length)
    except OSError as error:
        raise FormatError(f"{file}: cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(text, object_pairs_hook=_no_doubles)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file}: the safetensors header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise FormatError(f"{file}: the safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    begin = 8 + length
    entries = {name: _entry(file, name, about, begin) for name, about in header.items()}
    end = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            what = "overlaps the tensor before it" if entry.offset < end else "leaves a gap before it"
            raise FormatError(f"{file}: tensor {name} {what} (begins at byte {entry.offset}, wanted {end})")
        end += entry.nbytes
    if end != size:
        raise FormatError(
            f"{file}: the header describes {end} bytes, the file has {size}:"
            f" {'it was cut off; fetch it again' if size < end else 'something was appended'}"
        )
    return entries


def is_inside(file: Path) -> bool:
    """Whether a file of a checkpoint folder is a plain file that lies there, or where the hub's cache keeps its files.

    A folder from a stranger may hold links, and through one that leads out of it a private file would be read, or
    carried into the output and published with it. In the hub's cache every file of `snapshots/x` is a link to `blobs`.
    """
    try:
        real, folder = file.resolve(strict=True), file.parent.resolve(strict=True)
        plain = real.is_file()
    except (OSError, RuntimeError, ValueError):  # a link in a circle; a name that no file can have
        return False
    blobs = folder.parent.parent / "blobs"
    in_cache = folder.parent.name == "snapshots" and real.parent == blobs
    return plain and (in_cache or real.is_relative_to(folder))


def require_inside(file: Path) -> None:
    """Raise FormatError unless the file is there and `is_inside` its folder."""
    if is_inside(file):
        return
    if not file.exists():
        raise FormatError(f"{file}: no such file")
    if file.is_symlink():
        raise FormatError(
            f"{file}: this link leads out of its folder, to {file.resolve()}, and is not followed; put the file itself"
            f" there"
        )
    raise FormatError(f"{file}: not a plain file")


def read_tensor(entry: Entry, name: str) -> torch.Tensor:
    """The tensor's own copy in memory."""
    check_memory(entry.nbytes, name)
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)
    data = bytearray(entry.nbytes)
    try:
        with entry.file.open("rb") as stream:
            stream.seek(entry.offset)
            got = stream.readinto(data)
    except OSError as error:
        raise FormatError(f"{entry.file}: cannot be read: {error.strerror or error}") from error
    if got != entry.nbytes:
        raise FormatError(f"{entry.file}: tensor {name}: {got} of {entry.nbytes} bytes could be read")
    return torch.frombuffer(data, dtype=entry.dtype).reshape(entry.shape)


def check_memory(nbytes: int, what: str) -> None:
    """Raise FormatError if `nbytes` exceed this machine's whole memory, before the allocator is asked."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not every system says
        return
    if nbytes > total:
        raise FormatError(
            f"{what} needs {nbytes / 2**30:.1f} GiB and this machine has {total / 2**30:.1f}."
            f" Is the size in the file right?"
        )


def _entry(file: Path, name: str, about: Any, begin: int) -> Entry:
    def wrong(why: str) -> FormatError:
        return FormatError(f"{file}: tensor {name}: {why} in the safetensors header")

    if not isinstance(about, dict):
        raise wrong("no description")
    said = about.get("dtype")
    dtype = DTYPES.get(said) if isinstance(said, str) else None
    if dtype is None:
        raise wrong(f"dtype {said!r} is not one of {', '.join(DTYPES)}")
    shape, offsets = _naturals(about.get("shape")), _naturals(about.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise wrong(f"malformed shape {about.get('shape')!r} or data_offsets {about.get('data_offsets')!r}")
    count = 1
    for extent in shape:
        count *= extent
    nbytes = count * dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise wrong(
            f"shape {shape} of {about['dtype']} needs {nbytes} bytes, data_offsets {offsets} give another number"
        )
    return Entry(file, dtype, tuple(shape), begin + offsets[0], nbytes)


def _naturals(value: Any) -> list[int] | None:
    """The value if it is a list of non-negative numbers of file size, else None."""
    good = isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)
    return value if good else None


def _no_doubles(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} occurs twice")
        result[key] = value
    return result


def find_tensors(folder: Path) -> dict[str, Entry]:
    """Every tensor of a checkpoint folder, through its index if it has one.

    Raises FormatError for a missing shard, an index that disagrees with the shards, or one name in two files.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _through_index(folder, index)
    files = sorted(file for file in folder.glob("*.safetensors") if not file.is_dir())
    if not files:
        others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = (
            f"; it has {', '.join(others[:3])}, which is not read: convert them to safetensors first" if others else ""
        )
        raise FormatError(f"{folder}: no .safetensors file in this folder{found}")
    entries: dict[str, Entry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                raise FormatError(
                    f"{folder}: tensor {name} is in both {entries[name].file.name} and {file.name}, and there is no"
                    f" {index.name} to say which counts"
                )
            entries[name] = entry
    return entries


def _through_index(folder: Path, index: Path) -> dict[str, Entry]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise FormatError(f"{index}: no weight_map of tensor names to file names")
    headers: dict[str, dict[str, Entry]] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or not file.endswith(".safetensors") or len(file) > 250 or "\0" in file:
            raise FormatError(f"{index}: {file[:250]!r} is not the name of a safetensors file in this folder")
        if not (folder / file).exists():
            raise FormatError(f"{folder}: shard {file} is named in {index.name} but missing. Fetch it again")
        headers[file] = read_header(folder / file)
    absent = sorted(name for name, file in weight_map.items() if name not in headers[file])
    if absent:
        raise FormatError(
            f"{index}: {absent[0]} is not in {weight_map[absent[0]]} ({len(absent)} tensors named but absent)"
        )
    unlisted = sorted(name for header in headers.values() for name in header if name not in weight_map)
    if unlisted:
        raise FormatError(f"{index}: {unlisted[0]} is in a shard but not in the index ({len(unlisted)} such tensors)")
    return {name: headers[file][name] for name, file in weight_map.items()}


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises FormatError naming the file."""
    require_inside(file)
    try:
        size = file.stat().st_size
        if size > MAX_HEADER:
            raise FormatError(f"{file}: {size} bytes; a JSON file of a checkpoint has at most {MAX_HEADER}")
        value = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_no_doubles)
    except OSError as error:
        raise FormatError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{file}: wanted a JSON object, got {type(value).__name__}")
    return value
