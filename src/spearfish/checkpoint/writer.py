"""Write a checkpoint folder layer by layer. The folder appears whole or not at all."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from spearfish import __version__
from spearfish.checkpoint.card import model_card, to_yaml
from spearfish.checkpoint.config import FORMAT_VERSION, OUR_KEY
from spearfish.checkpoint.lock import Lock
from spearfish.checkpoint.reader import is_embedding, layer_format
from spearfish.checkpoint.safefile import is_inside, read_json
from spearfish.errors import FormatError, SpearfishError, UnsupportedError
from spearfish.formats import FORMATS, transforms
from spearfish.formats.base import LayerFacts, main_scheme
from spearfish.scheme import QuantScheme, QuantWeight

SHARD_BYTES = 1 << 30  # saving holds two copies of a shard for a moment
# Files of a model folder that travel with the weights: tokenizer, templates, generation settings, code, licence.
_CARRIED_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken")
_CARRIED_NAMES = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY)", re.IGNORECASE)
_NOT_CARRIED = re.compile(
    r"config\.json|quantize_config\.json|quant_config\.json|quantization_config\.json|.*\.index\.json|recipe\.yaml"
    r"|README\.md|spearfish_.*"
)
_MAX_CARRIED = 200 << 20  # bytes; a larger file beside the weights is no tokenizer


@dataclass(frozen=True)
class Written:
    """One layer as it went into the file."""

    n: int
    k: int
    scheme: QuantScheme
    format: str
    act_order: bool
    nbytes: int
    extensions: tuple[str, ...]
    padded: bool


class CheckpointWriter:
    """Collects layers and tensors into shards under a hidden sibling of `out`, and renames it when all is done.

    source: folder whose tokenizer, generation config and the like are carried over.
    config: the model's config.json; its quantisation keys are replaced. Taken from `source` if not given.
    format: a key of `FORMATS`; dense int layers go into a marlin_24 folder as dense Marlin, into ct-marlin-24 as
        pack-quantized.
    recipe: how the weights were made; written to recipe.yaml and into the config.
    overwrite: replace an existing checkpoint folder at `out`.
    pad: store layers whose size the format cannot hold with zeros added; their true size goes into the config.
    """

    def __init__(
        self,
        out: str | Path,
        source: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
        format: str = "marlin_24",
        recipe: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        pad: bool = False,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if format not in FORMATS:
            raise UnsupportedError(f"no format {format!r}; there are {', '.join(FORMATS)}")
        self.out = Path(out).expanduser().absolute()
        self.source = None if source is None else Path(source).expanduser().absolute()
        self.format = format
        self.recipe = dict(recipe) if recipe is not None else None
        self.overwrite = overwrite
        self.pad = pad
        self.shard_bytes = shard_bytes
        self.config = dict(config) if config is not None else self._source_config()
        self.layers: dict[str, Written] = {}
        self.ignored: list[str] = []
        self.dropped: list[str] = []
        self._temp = self.out.with_name(f".{self.out.name}.partial")
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[dict[str, int]] = []  # tensor name -> bytes, per shard
        self._names: set[str] = set()
        self._files: dict[str, str] = {}
        self._open = False
        busy = f"{self.out} is being written by another process; wait for it, or choose another folder"
        self._lock = Lock(self.out.with_name(f".{self.out.name}.lock"), busy)

    def __enter__(self) -> CheckpointWriter:
        refuse_target(self.out, self.source, self.overwrite)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        try:
            _remove_abandoned(self.out)
            refuse_target(self.out, self.source, self.overwrite)
            self._temp.mkdir()
        except BaseException:
            self._lock.release()
            raise
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._open = False
            self._pending.clear()
            shutil.rmtree(self._temp, ignore_errors=True)
            self._lock.release()

    def add_weight(self, module: str, weight: QuantWeight) -> None:
        """Encode one layer. Raises UnsupportedError with every reason if the format cannot hold it."""
        form = FORMATS[layer_format(self.format, weight.scheme.is_sparse)]
        stored = transforms.pad(weight, form.n_multiple, form.k_multiple) if self.pad else weight
        tensors = form.encode(stored, module)
        extensions = list(form.extensions(stored.n, stored.k, stored.scheme))
        padded = stored is not weight
        if padded:
            extensions.append("layers are padded with zeros")
        if form.name != self.format:
            extensions.append(f"dense layers are stored as {form.name} among {self.format}")
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        self.layers[module] = Written(
            weight.n,
            weight.k,
            stored.scheme,
            form.name,
            weight.group_index is not None,
            nbytes,
            tuple(extensions),
            padded,
        )
        for local, tensor in tensors.items():
            self._add(f"{module}.{local}", tensor)

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor as it is: embedding, norm, bias, or a layer that stays plain.

        A `lm_head.weight` of a model with tied embeddings is left out: the embedding is the head.
        """
        if name == "lm_head.weight" and self._tied():
            self.dropped.append(name)
            return
        if name.endswith(".weight") and tensor.dim() == 2 and not is_embedding(name):
            self.ignored.append(name.removesuffix(".weight"))
        self._add(name, tensor)

    def add_file(self, name: str, text: str) -> None:
        """A small text file that shall lie beside the weights, and appear with them."""
        self._files[name] = text

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        if not self._open:
            raise SpearfishError("CheckpointWriter is used outside its `with` block")
        if name in self._names:
            raise FormatError(f"{name} was added twice")
        nbytes = tensor.numel() * tensor.itemsize
        if self._pending and self._pending_bytes + nbytes > self.shard_bytes:
            self._flush()
        self._names.add(name)
        tensor = tensor.detach().to("cpu").contiguous()
        # A view into a larger tensor would keep that alive, and safetensors refuses shared storage.
        self._pending[name] = tensor.clone() if tensor.untyped_storage().nbytes() != nbytes else tensor
        self._pending_bytes += nbytes

    def _flush(self) -> None:
        file = self._temp / f"shard-{len(self._shards) + 1}.safetensors"
        try:
            save_file(_unshared(self._pending), file, metadata={"format": "pt"})
            _sync(file)
        except SafetensorError as error:
            # A full disk and the like: no matter of formats, and nothing that the next layer could mend.
            raise OSError(f"{self.out}: a shard cannot be written: {error}") from error
        self._shards.append({name: tensor.numel() * tensor.itemsize for name, tensor in self._pending.items()})
        self._pending, self._pending_bytes = {}, 0

    def _finish(self) -> None:
        if self._pending or not self._shards:
            self._flush()
        config = self.final_config()
        self._name_shards()
        self._carry_files()
        block = config.get("quantization_config", {})
        self._write_json("config.json", config)
        if block.get("quant_method") == "gptq":
            self._write_json("quantize_config.json", block)
        if self.recipe is not None:
            (self._temp / "recipe.yaml").write_text(to_yaml(self.recipe), encoding="utf-8")
        total = sum(sum(shard.values()) for shard in self._shards)
        card = model_card(self.out.name, self.format, config, self.layers, self.extended(), self.recipe, total)
        (self._temp / "README.md").write_text(card, encoding="utf-8")
        for name, text in self._files.items():
            (self._temp / name).write_text(text, encoding="utf-8")
        self._publish()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors added so far."""
        return self._pending_bytes + sum(sum(shard.values()) for shard in self._shards)

    def extended(self) -> list[str]:
        """Why only spearfish runs this folder, each reason once with the number of layers."""
        counts = Counter(reason for layer in self.layers.values() for reason in layer.extensions)
        schemes = {(layer.scheme.bits, layer.scheme.group_size) for layer in self.layers.values()}
        reasons = [f"{reason} ({count} layer{'s' if count > 1 else ''})" for reason, count in sorted(counts.items())]
        if len(schemes) > 1 and self.format in ("marlin_24", "marlin", "ct-marlin-24"):
            reasons.append("layers differ in bits or group size")
        return reasons

    def final_config(self) -> dict[str, Any]:
        """config.json as it will be written."""
        config = {
            key: value
            for key, value in self.config.items()
            if key not in ("quantization_config", "compression_config", "sparsity_config")
        }
        if isinstance(config.get("text_config"), dict):
            config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "quantization_config"}
        facts = {name: LayerFacts(layer.scheme, layer.act_order) for name, layer in self.layers.items()}
        block = FORMATS[self.format].config(facts, self.ignored)
        if block:
            main = main_scheme(facts)
            ours: dict[str, Any] = {"format_version": FORMAT_VERSION, "producer": f"spearfish {__version__}"}
            ours["extended"] = self.extended()
            ours["layers"] = {name: about for name, layer in self.layers.items() if (about := _own_facts(layer, main))}
            if self.recipe is not None:
                ours["recipe"] = self.recipe
            config["quantization_config"] = {**block, OUR_KEY: ours}
        return config

    def _tied(self) -> bool:
        text = self.config.get("text_config")
        return bool(
            self.config.get("tie_word_embeddings") or (isinstance(text, dict) and text.get("tie_word_embeddings"))
        )

    def _source_config(self) -> dict[str, Any]:
        if self.source is None:
            raise FormatError("CheckpointWriter needs the model's config, or a source folder that has config.json")
        return read_json(self.source / "config.json")

    def _name_shards(self) -> None:
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(self._shards, 1):
            file = "model.safetensors" if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors"
            (self._temp / f"shard-{i}.safetensors").rename(self._temp / file)
            weight_map |= dict.fromkeys(shard, file)
        if count > 1:
            total = sum(sum(shard.values()) for shard in self._shards)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            self._write_json("model.safetensors.index.json", index)

    def _carry_files(self) -> None:
        if self.source is None:
            return
        for file in sorted(self.source.iterdir()):
            wanted = file.suffix in _CARRIED_SUFFIXES or _CARRIED_NAMES.match(file.name)
            if not wanted or _NOT_CARRIED.fullmatch(file.name) or not is_inside(file):
                continue
            if file.stat().st_size <= _MAX_CARRIED:
                shutil.copyfile(file, self._temp / file.name)

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False)
        (self._temp / name).write_text(text + "\n", encoding="utf-8")

    def _publish(self) -> None:
        refuse_target(self.out, self.source, self.overwrite)  # the work may have taken hours
        if not self.out.exists():
            self._temp.rename(self.out)
            return
        if _exchange(self._temp, self.out):
            return  # the old folder is now the temporary one, which is removed
        # The old folder steps aside first; if the process dies in between, the next writer puts it back.
        previous = _previous(self.out)
        self.out.rename(previous)
        self._temp.rename(self.out)
        shutil.rmtree(previous, ignore_errors=True)


def refuse_target(out: Path, source: Path | None, overwrite: bool) -> None:
    """Raises FormatError if a folder must not be written at `out`, an absolute path. source: what is carried over."""
    if source is not None and (source == out or out in source.parents):
        raise FormatError(f"{out}: the output must not be the source folder or hold it")
    if not out.exists():
        return
    if not out.is_dir():
        raise FormatError(f"{out}: exists and is not a folder")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise FormatError(f"{out}: exists; choose another name or allow it to be replaced (--overwrite)")
    if not (out / "config.json").is_file():
        raise FormatError(f"{out}: holds files but no config.json, so it is not replaced; remove it yourself")


def _own_facts(layer: Written, main: QuantScheme) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if (layer.scheme.bits, layer.scheme.group_size) != (main.bits, main.group_size):
        facts |= {"bits": layer.scheme.bits, "group_size": layer.scheme.group_size or -1}
    if layer.padded:
        facts["shape"] = [layer.n, layer.k]
    return facts


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, copied where two share memory: safetensors writes every name on its own."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        shared = tensor.numel() > 0 and tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        result[name] = tensor.clone() if shared else tensor
    return result


def _sync(file: Path) -> None:
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


def _previous(out: Path) -> Path:
    return out.with_name(f".{out.name}.previous")


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step, so that a name is never without its folder. False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0)


def _remove_abandoned(out: Path) -> None:
    """Clear what a killed writer left beside `out`, and put back a folder that was about to be replaced. Under the
    lock, so nobody is writing there."""
    previous = _previous(out)
    if previous.is_dir() and not out.exists():
        previous.rename(out)
    shutil.rmtree(previous, ignore_errors=True)
    shutil.rmtree(out.with_name(f".{out.name}.partial"), ignore_errors=True)
