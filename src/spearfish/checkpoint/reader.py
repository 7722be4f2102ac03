"""Open a checkpoint folder of any format and take its layers out one at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from spearfish.checkpoint.config import QuantConfig, read_config
from spearfish.checkpoint.safefile import Entry, check_memory, find_tensors, read_tensor
from spearfish.errors import FormatError
from spearfish.formats import FORMATS, transforms
from spearfish.formats.ct_bitmask import CtSparseBitmask
from spearfish.reference import dequantize
from spearfish.scheme import QuantScheme, QuantWeight

# Which layer formats may lie in a folder of each format, in the order in which their tensors are looked for.
LAYER_FORMATS = {
    "marlin_24": ("marlin_24", "marlin"),
    "ct-marlin-24": ("ct-marlin-24", "ct-pack-quantized"),
    "ct-sparse-24-bitmask": ("ct-sparse-bitmask", "ct-sparse-24-bitmask"),
}
# What the bitmask formats make of one parameter.
BITMASK_PARTS = ("compressed", "bitmask", "shape", "row_offsets")
# Modules whose 2-D weight is a table to look rows up in, not a linear layer.
_EMBEDDING = re.compile(r"(^|[._])(embed\w*|wte|wpe|word_embeddings|position_embeddings)([._]|$)")
# A layer with fewer spoilt quads than this was meant to be 2:4 and lost it; one with more was never pruned. (A layer
# pruned without structure to one half spoils 31 % of its quads, an unpruned int4 layer more than 90 %.)
ALMOST = 0.5
_SAMPLE_BYTES = 1 << 20  # of a dense weight, read to see whether it may be 2:4


def layer_format(format: str, is_sparse: bool) -> str:
    """The format that a layer is written in, of a folder in `format`: in some, dense layers have one of their own."""
    return format if is_sparse else LAYER_FORMATS.get(format, (format,))[-1]


def is_embedding(tensor: str) -> bool:
    """Whether a full tensor name looks like an embedding table's."""
    return _EMBEDDING.search(tensor.removesuffix(".weight")) is not None


def is_head(module: str) -> bool:
    """Whether a module is the output head, which stays as it is."""
    return re.search(r"(^|\.)lm_head$", module) is not None


@dataclass(frozen=True)
class LinearInfo:
    """One quantised or 2:4 linear layer as the headers and the config show it; no values were read.

    scheme: what the file says. GPTQ and pack-quantized files do not record sparsity, so `weight()` may find 2:4.
    bits: the width in the file; 2- and 3-bit codes are widened to 4 on reading.
    tensors: local name -> full name in the files.
    """

    name: str
    n: int
    k: int
    scheme: QuantScheme
    format: str
    bits: int
    nbytes: int
    tensors: dict[str, str]


class Checkpoint:
    """A folder of safetensors with its config. Holds headers only; every read takes one layer."""

    def __init__(self, path: Path, config: dict[str, Any], quant: QuantConfig, entries: dict[str, Entry]) -> None:
        self.path = path
        self.config = config
        self.quant = quant
        # safetensors sorts by dtype; people read by layer number.
        self.entries = dict(sorted(entries.items(), key=lambda item: natural_order(item[0])))
        self.notes = list(quant.notes)
        # Layer name -> (format, local -> full tensor name); empty for a dense folder, whose layers show by value only.
        self.modules = _group(self.entries, quant) if quant.format != "dense" else {}
        # Tensors that a bitmask format has compressed although they are no linear layers: full name -> as above.
        self.tables = _take_tables(self.entries, self.modules)

    @property
    def format(self) -> str:
        """The folder's format, a key of `FORMATS`."""
        return self.quant.format

    @cached_property
    def linears(self) -> dict[str, LinearInfo]:
        """The quantised or 2:4 layers by module name."""
        if self.format == "dense":
            return {name: self._dense_info(name) for name in self._dense_24()}
        return {name: self.info(name) for name in self.modules}

    @cached_property
    def tensor_names(self) -> list[str]:
        """Every tensor that is not part of a layer of `linears`: embeddings, norms, biases, plain weights."""
        taken = {full for info in self.linears.values() for full in info.tensors.values()}.union(self.companions)
        taken.update(full for _, tensors in self.tables.values() for full in tensors.values())
        return [name for name in self.entries if name not in taken] + list(self.tables)

    @cached_property
    def companions(self) -> list[str]:
        """Tensors beside a quantised weight that a weight-only runtime leaves aside: scales of activations."""
        return [
            f"{name}.{local}"
            for name, (form, _) in self.modules.items()
            for local in sorted(FORMATS[form].companions - {"bias"})
            if f"{name}.{local}" in self.entries
        ]

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor by its full name, decompressed if a bitmask format has compressed it."""
        if name in self.tables:
            return self._table(name)
        if name not in self.entries:
            raise FormatError(f"{self.path}: no tensor {name}")
        return read_tensor(self.entries[name], name)

    def weight(self, name: str) -> QuantWeight:
        """The weight of one layer, checked, cropped to its true size, and marked 2:4 if its values are."""
        info = self._linear(name)
        check_memory(4 * info.n * info.k, f"{name} decoded")
        weight = self.decode(name, self.read_layer(name))
        shape = self.quant.layer(name).get("shape")
        if shape is not None:
            weight = transforms.crop(weight, shape[0], shape[1], name)
        return transforms.find_24(weight)

    def read_layer(self, name: str) -> dict[str, torch.Tensor]:
        """The stored tensors of one layer by local name."""
        tensors = self.modules[name][1] if name in self.modules else {"weight": f"{name}.weight"}
        return {local: read_tensor(self.entries[full], full) for local, full in tensors.items()}

    def decode(self, name: str, tensors: dict[str, torch.Tensor]) -> QuantWeight:
        """What a layer's stored tensors mean, as its format says: not cropped, no pattern looked for."""
        form = self.modules[name][0] if name in self.modules else "dense"
        return FORMATS[form].decode(tensors, self.quant.of(name), name)

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The layer's weight [n, k] dequantised, also for the unstructured files that have no `QuantWeight`."""
        info = self._linear(name)
        if info.format == CtSparseBitmask.name:
            return self.values(name).to(dtype)
        return dequantize(self.weight(name), dtype)

    def values(self, name: str) -> torch.Tensor:
        """The float matrix [n, k] of a layer of the unstructured sparse-bitmask format, which need not be 2:4."""
        info = self._linear(name)
        check_memory(4 * info.n * info.k, f"{name} decoded")
        return CtSparseBitmask().values(self.read_layer(name), name)

    def plain_linears(self) -> Iterator[str]:
        """Modules with a 2-D float `weight` that are neither in `linears` nor embeddings: layers left unquantised."""
        for name in self.tensor_names:
            entry = self.entries.get(name)
            if entry is not None and name.endswith(".weight") and _is_matrix(entry) and not is_embedding(name):
                yield name.removesuffix(".weight")

    def _table(self, name: str) -> torch.Tensor:
        form, names = self.tables[name]
        tensors = {local: read_tensor(self.entries[full], full) for local, full in names.items()}
        if form != CtSparseBitmask.name:
            weight = FORMATS[form].decode(tensors, None, name)
            return dequantize(weight, weight.codes.dtype)
        missing = {"compressed", "bitmask", "row_offsets"} - tensors.keys()
        if missing:
            raise FormatError(f"{self.path}: {name} is compressed, but {', '.join(sorted(missing))} of it is missing")
        flat = tensors["shape"].numel() == 1
        if flat:
            tensors = {local: tensor.reshape(1, -1) for local, tensor in tensors.items()}
            tensors["compressed"], tensors["row_offsets"] = tensors["compressed"][0], tensors["row_offsets"][0]
            tensors["shape"] = torch.tensor([1, int(tensors["shape"])])
        values = CtSparseBitmask().values(tensors, name)
        return values[0] if flat else values

    def _linear(self, name: str) -> LinearInfo:
        info = self.linears.get(name)
        if info is None:
            raise FormatError(f"{self.path}: no quantised or 2:4 layer {name}; there are {len(self.linears)} of them")
        return info

    def info(self, name: str) -> LinearInfo:
        """Size and scheme of one quantised layer, from headers and config."""
        form, tensors = self.modules[name]
        # Shapes decide, so meta tensors stand for the data; only a stored shape is small enough to be read here.
        views = {
            local: read_tensor(entry, full)
            if (entry := self.entries[full]).nbytes <= 16 and entry.dtype in (torch.int64, torch.int32)
            else torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            for local, full in tensors.items()
        }
        about = FORMATS[form].describe(views, self.quant.of(name), name)
        n, k = self.quant.layer(name).get("shape", (about.n, about.k))
        nbytes = sum(self.entries[full].nbytes for full in tensors.values())
        return LinearInfo(name, n, k, about.scheme, form, about.bits, nbytes, tensors)

    def _dense_info(self, name: str) -> LinearInfo:
        full = f"{name}.weight"
        n, k = self.entries[full].shape
        bits = self.entries[full].dtype.itemsize * 8
        return LinearInfo(name, n, k, QuantScheme(16), "dense", bits, self.entries[full].nbytes, {"weight": full})

    def _dense_24(self) -> list[str]:
        """The linear layers of a dense folder whose first rows are 2:4; `weight()` looks at the rest."""
        return [
            full.removesuffix(".weight")
            for full, entry in self.entries.items()
            if full.endswith(".weight")
            and _is_matrix(entry)
            and not is_embedding(full)
            and not is_head(full.removesuffix(".weight"))
            and self.sample_violations(full) == 0
        ]

    def sample_violations(self, full: str) -> float:
        """The share of groups of four with more than two non-zeros in the first rows of a plain weight."""
        entry = self.entries[full]
        if entry.shape[1] % 4:
            return 1.0
        row = entry.shape[1] * entry.dtype.itemsize
        rows = max(1, min(entry.shape[0], _SAMPLE_BYTES // row))
        head = Entry(entry.file, entry.dtype, (rows, entry.shape[1]), entry.offset, rows * row)
        values = read_tensor(head, full)
        mask = (values.to(torch.float32) if values.dtype.itemsize == 1 else values) != 0
        return float((mask.reshape(rows, -1, 4).sum(-1) > 2).double().mean())


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint folder: config, index and headers are read and checked, no weights.

    Raises FormatError for a folder that is damaged or contradicts itself, UnsupportedError for a format not read.
    """
    checkpoint = open_folder(path)
    if checkpoint.format != "dense":
        # Describes every layer, so that a contradiction comes out here and not in the middle of a long job.
        _ = checkpoint.linears
    return checkpoint


def open_folder(path: str | Path) -> Checkpoint:
    """`open_checkpoint` without a look at the single layers: what `verify` needs, to report every bad one."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        hint = (
            "; give the folder that holds it"
            if folder.is_file()
            else "; a hub model must be downloaded first (hf download NAME)"
        )
        raise FormatError(f"{folder}: no such folder{hint}")
    config, quant = read_config(folder)
    checkpoint = Checkpoint(folder, config, quant, find_tensors(folder))
    if quant.format == "dense":
        _refuse_unexplained(checkpoint)
    elif not checkpoint.modules:
        raise FormatError(
            f"{folder}: {quant.where} says {quant.format}, but no layer has"
            f" {', '.join(sorted(FORMATS[quant.format].markers))}"
        )
    return checkpoint


def _refuse_unexplained(checkpoint: Checkpoint) -> None:
    """Raise FormatError if a folder whose config says nothing of quantisation holds quantised layers."""
    marks = {mark: form for form in FORMATS.values() if form.name != "dense" for mark in form.markers if len(mark) > 1}
    for full in checkpoint.entries:
        form = marks.get(full.rpartition(".")[2])
        if form is not None:
            raise FormatError(
                f"{checkpoint.path}: {full} belongs to a quantised format ({form.name}?), but neither config.json nor"
                f" quantize_config.json says so; restore the quantization_config of the original"
            )


def _group(entries: dict[str, Entry], quant: QuantConfig) -> dict[str, tuple[str, dict[str, str]]]:
    """Layer name -> (format, local -> full tensor name) for every module that holds tensors of a quantised format."""
    modules: dict[str, dict[str, str]] = {}
    for full in entries:
        module, _, local = full.rpartition(".")
        # The bitmask formats were also written with the parameter's own name in front: P.weight.bitmask.
        if module.endswith(".weight") and local in BITMASK_PARTS:
            module = module.removesuffix(".weight")
        modules.setdefault(module, {})[local] = full
    candidates = LAYER_FORMATS.get(quant.format, (quant.format,))
    grouped: dict[str, tuple[str, dict[str, str]]] = {}
    for module, tensors in modules.items():
        form = next((name for name in candidates if FORMATS[name].markers & tensors.keys()), None)
        if form is None:
            foreign = [f.name for f in FORMATS.values() if f.name != "dense" and f.markers & tensors.keys()]
            if foreign:
                raise FormatError(
                    f"{module}: {quant.where} says {quant.format}, but the layer's tensors"
                    f" ({', '.join(sorted(tensors))}) are those of {' or '.join(foreign)}"
                )
            continue
        companions = FORMATS[form].companions
        grouped[module] = (form, {local: full for local, full in tensors.items() if local not in companions})
    return grouped


def _take_tables(
    entries: dict[str, Entry], modules: dict[str, tuple[str, dict[str, str]]]
) -> dict[str, tuple[str, dict[str, str]]]:
    """Take out of `modules` what the bitmask formats stored of embeddings, norms and biases, by full tensor name.

    Old writers compressed every parameter, and newer ones whatever their ignore list forgot.
    """
    tables = {}
    for module, (form, tensors) in list(modules.items()):
        shape = entries.get(tensors.get("shape", ""))
        if not form.startswith("ct-sparse") or shape is None:
            continue
        if shape.shape == (1,) or is_embedding(module):
            prefix = tensors["shape"].removesuffix(".shape")
            name = prefix if prefix.endswith((".weight", ".bias")) else f"{prefix}.weight"
            tables[name] = modules.pop(module)
    return tables


def natural_order(name: str) -> list[tuple[int, str]]:
    """A sort key by which layer 10 follows layer 9: numbers go by their length first, other parts stand before them."""
    parts = re.split(r"(\d+)", name)
    return [(len(part.lstrip("0")) + 1, part.lstrip("0")) if part.isdecimal() else (0, part) for part in parts]


def _is_matrix(entry: Entry) -> bool:
    return len(entry.shape) == 2 and entry.dtype.is_floating_point and 0 not in entry.shape
