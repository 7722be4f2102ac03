"""From one checkpoint format to another, a layer at a time. What cannot be done is refused with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from spearfish import sparse24
from spearfish.checkpoint.reader import ALMOST, Checkpoint, is_head, natural_order, open_checkpoint
from spearfish.checkpoint.writer import CheckpointWriter
from spearfish.errors import FormatError, SpearfishError, UnsupportedError
from spearfish.formats import FORMATS, transforms
from spearfish.formats.ct_bitmask import CtSparseBitmask
from spearfish.reference import dequantize
from spearfish.scheme import QuantWeight

TARGETS = tuple(name for name in FORMATS if name != CtSparseBitmask.name)
# Formats made for 2:4, where a layer that has almost kept the pattern is not passed over in silence; those that also
# hold codes; and formats that hold values instead of codes.
MEANT_FOR_24 = ("marlin_24", "ct-marlin-24", "ct-sparse-24-bitmask")
SPARSE_TARGETS = ("marlin_24", "ct-marlin-24")
VALUE_TARGETS = ("ct-sparse-24-bitmask", "dense")
SHOWN = 5  # failures of layers in one message
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Converted:
    """One layer: what it was, what it became, and the damage.

    error: relative Frobenius error of the weight, None if every value was kept.
    dropped: non-zero values removed by --reproject.
    """

    name: str
    n: int
    k: int
    before: str
    after: str
    error: float | None = None
    dropped: int = 0


@dataclass
class ConvertReport:
    """What `convert` did. `plain` names the linear layers, other than the head, that hold no codes and no 2:4."""

    source: str
    out: str
    source_format: str
    format: str
    layers: list[Converted] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    extended: list[str] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0


def convert(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    reproject: bool = False,
    pad: bool = False,
    require_sparse: bool = False,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> ConvertReport:
    """Write `source` as format `to` into the folder `out`; needs only config.json and the tensors.

    bits, group_size: for layers of 16-bit 2:4 values that are to be quantised (round-to-nearest; 4 and 128 if not
        given, group_size -1 for one scale per column). Layers that are quantised already keep their codes.
    reproject: make layers that are almost 2:4 exactly so, dropping the smallest values.
    pad: add zeros to layers whose size the format cannot hold; spearfish alone reads the result.
    require_sparse: refuse if any linear layer except the head is not 2:4.
    dtype: of the values of `dense` and `ct-sparse-24-bitmask`; the model's own if not given.
    progress: called with (layer, number, of how many) before each.

    Raises UnsupportedError or FormatError with every reason of every layer; then nothing is left at `out`.
    """
    if to not in TARGETS:
        raise UnsupportedError(f"cannot convert to {to!r}; there are {', '.join(TARGETS)}")
    if dtype is not None and dtype not in DTYPES:
        raise UnsupportedError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if bits is not None and bits not in (4, 8):
        raise UnsupportedError(f"--bits is {bits}, wanted 4 or 8")
    if group_size is not None and group_size != -1 and group_size < 1:
        raise UnsupportedError(f"--group-size is {group_size}, wanted a positive number, or -1 for one per column")
    checkpoint = open_checkpoint(source)
    job = _Job(checkpoint, to, bits, group_size, reproject, dtype)
    report = job.report
    report.out = str(out)
    parts = list(_parts(checkpoint))
    step = {"to": to, "bits": bits, "group_size": group_size, "reproject": reproject, "pad": pad, "dtype": dtype}
    recipe = _recipe(checkpoint, step)
    with CheckpointWriter(
        out, checkpoint.path, checkpoint.config, format=to, overwrite=overwrite, pad=pad, recipe=recipe
    ) as writer:
        for i, (name, is_layer) in enumerate(parts, 1):
            if progress is not None:
                progress(name, i, len(parts))
            if is_layer:
                job.try_layer(name, writer)
            else:
                writer.add_tensor(name, checkpoint.tensor(name))
        job.finish(require_sparse)
        report.extended = writer.extended()
        report.bytes_after = writer.nbytes
    return report


class _Job:
    """The options of one conversion and what it has seen so far."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        to: str,
        bits: int | None,
        group_size: int | None,
        reproject: bool,
        dtype: str | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.to = to
        self.bits = bits
        self.group_size = 128 if group_size is None else None if group_size == -1 else group_size
        self.asked = bits is not None or group_size is not None
        self.reproject = reproject
        self.dtype = DTYPES[dtype] if dtype is not None else None
        self.sparse = 0
        self.failed: list[SpearfishError] = []
        self.requantised = 0
        self.report = ConvertReport(str(checkpoint.path), "", checkpoint.format, to, notes=list(checkpoint.notes))
        if checkpoint.format != "dense":
            self.report.plain += [name for name in checkpoint.plain_linears() if not is_head(name)]
        self.report.bytes_before = sum(entry.nbytes for entry in checkpoint.entries.values())
        if checkpoint.companions:
            self.report.notes.append(
                f"{len(checkpoint.companions)} scales of activations were left out: spearfish runs weights only"
            )

    def try_layer(self, name: str, writer: CheckpointWriter) -> None:
        """`layer`, but a failure waits until all layers have been looked at, so that all can be reported."""
        try:
            self.layer(name, writer)
        except SpearfishError as error:
            self.failed.append(error)

    def layer(self, name: str, writer: CheckpointWriter) -> None:
        """Read, change and write one layer."""
        source = self._read(name)
        n, k = (source.n, source.k) if isinstance(source, QuantWeight) else (source.shape[0], source.shape[1])
        before = str(source.scheme) if isinstance(source, QuantWeight) else f"{_short(source.dtype)} dense"
        weight, dropped = self._as_sparse(source, name)
        if isinstance(weight, QuantWeight):
            weight = self._as_target(weight, name)
            self.sparse += weight.scheme.is_sparse if isinstance(weight, QuantWeight) else 0
        if isinstance(weight, torch.Tensor):
            if not isinstance(source, QuantWeight) and weight is source:
                self.report.plain.append(name)
                writer.add_tensor(f"{name}.weight", source)
                return
            writer.add_tensor(f"{name}.weight", weight)
            after = f"{_short(weight.dtype)} {'2:4 values' if isinstance(source, QuantWeight) else 'dense'}"
        else:
            writer.add_weight(name, weight)
            after = str(weight.scheme)
        error = _error(source, weight)
        self.report.layers.append(Converted(name, n, k, before, after, error, dropped))

    def finish(self, require_sparse: bool) -> None:
        """The checks that need all layers. Raises; the writer then leaves nothing."""
        if len(self.failed) == 1:
            raise self.failed[0]
        if self.failed:
            kind = FormatError if all(isinstance(error, FormatError) for error in self.failed) else UnsupportedError
            shown = [f"  {error}" for error in self.failed[:SHOWN]]
            more = [f"  ... and {len(self.failed) - SHOWN} more"] if len(self.failed) > SHOWN else []
            raise kind("\n".join([f"{len(self.failed)} layers cannot be converted:", *shown, *more]))
        unpruned = self.report.plain + [layer.name for layer in self.report.layers if "dense" in layer.after]
        if require_sparse and unpruned:
            raise UnsupportedError(
                f"--require-sparse: not every linear layer is 2:4; {len(unpruned)} are not, the first is {unpruned[0]}"
            )
        decompressed = self.to == "dense" and self.checkpoint.format != "dense"
        if not self.report.layers and not decompressed:
            raise UnsupportedError(
                f"{self.checkpoint.path}: no layer is quantised or 2:4, so there is nothing to convert to {self.to}."
                f" Compress the model first (spearfish compress)"
            )
        if self.to in SPARSE_TARGETS and not self.sparse:
            raise UnsupportedError(
                f"{self.checkpoint.path}: no layer is 2:4, so there is nothing to store as {self.to}."
                f" Its dense codes fit marlin, gptq or ct-pack-quantized; spearfish compress prunes the original model"
            )
        dense = [layer.name for layer in self.report.layers if "dense" in layer.after]
        if self.to in SPARSE_TARGETS and dense:
            self.report.notes.append(
                f"{len(dense)} of {len(self.report.layers)} layers are not 2:4, nor nearly, and were stored dense; the"
                f" first is {dense[0]} (--require-sparse refuses such a folder)"
            )
        if self.asked and not self.requantised:
            self.report.notes.append("--bits and --group-size had no effect: the layers are quantised already")

    def _read(self, name: str) -> QuantWeight | torch.Tensor:
        info = self.checkpoint.linears.get(name)
        if info is None:
            return self.checkpoint.tensor(f"{name}.weight")
        if info.format == "dense":
            return self.checkpoint.tensor(info.tensors["weight"])
        if info.format == CtSparseBitmask.name:
            return self.checkpoint.values(name)
        return self.checkpoint.weight(name)

    def _as_sparse(self, source: QuantWeight | torch.Tensor, name: str) -> tuple[QuantWeight | torch.Tensor, int]:
        """The layer as 2:4 if it is, or if it almost is and may be reprojected; else as it came. And values dropped."""
        if isinstance(source, QuantWeight) and source.scheme.is_sparse:
            return source, 0
        if isinstance(source, QuantWeight) and self.to not in MEANT_FOR_24 and not self.reproject:
            return source, 0
        mask = transforms.nonzero(source) if isinstance(source, QuantWeight) else _nonzero_values(source)
        if mask.shape[1] % 4 or is_head(name):
            return source, 0
        share = float(sparse24.violations(mask).double().mean())
        if share >= ALMOST:
            return source, 0
        if share == 0:
            # Only float values come here: 2:4 codes were found by the reader.
            if isinstance(source, torch.Tensor):
                return FORMATS["dense"].decode({"weight": source}, None, name), 0
            return source, 0
        if not self.reproject:
            if self.to == "dense":
                return source, 0
            transforms.require_24(mask, name)
        if isinstance(source, QuantWeight):
            weight = transforms.reproject(source)
        else:
            weight = transforms.reproject_values(source)
        return weight, int(mask.sum()) - int(transforms.nonzero(weight).sum())

    def _as_target(self, weight: QuantWeight, name: str) -> QuantWeight | torch.Tensor:
        """The weight in the kind of numbers that the target holds."""
        if self.to not in VALUE_TARGETS:
            if weight.scheme.bits != 16:
                return weight
            self.requantised += 1
            return transforms.round_to_nearest(weight, self.bits or 4, self.group_size)
        if weight.scheme.bits == 16:
            dtype = self.dtype or weight.codes.dtype
            values = transforms.in_range(weight.codes, dtype, name)
            weight = QuantWeight(weight.scheme, values, positions=weight.positions)
        elif weight.scheme.is_sparse:
            weight = transforms.to_values(weight, self.dtype or self._model_dtype(), name)
        else:
            return transforms.in_range(dequantize(weight), self.dtype or self._model_dtype(), name)
        return FORMATS["dense"].encode(weight)["weight"] if self.to == "dense" else weight

    def _model_dtype(self) -> torch.dtype:
        text = self.checkpoint.config.get("text_config")
        for config in (self.checkpoint.config, text if isinstance(text, dict) else {}):
            for key in ("dtype", "torch_dtype"):
                dtype = DTYPES.get(str(config.get(key)).removeprefix("torch."))
                if dtype is not None:
                    return dtype
        return torch.float16


def _parts(checkpoint: Checkpoint) -> Iterator[tuple[str, bool]]:
    """(name, whether it is a layer) of everything in the folder, in the model's order: neighbours share a shard."""
    layers = set(checkpoint.linears)
    if checkpoint.format == "dense":
        layers |= {name for name in checkpoint.plain_linears() if not is_head(name)}
    taken = {f"{name}.weight" for name in layers}
    parts = [(name, True) for name in layers]
    parts += [(name, False) for name in checkpoint.tensor_names if name not in taken]
    yield from sorted(parts, key=lambda part: natural_order(part[0]))


def _error(source: QuantWeight | torch.Tensor, result: QuantWeight | torch.Tensor) -> float | None:
    """Relative Frobenius error between two forms of a weight, None if they are equal."""
    if result is source:
        return None
    n = source.n if isinstance(source, QuantWeight) else source.shape[0]
    damage = size = 0.0
    for start in range(0, n, 1024):  # a few rows at a time: both forms in float32 would be the largest thing in memory
        a, b = _dense_rows(source, start), _dense_rows(result, start)
        damage += float((a - b).square().sum(dtype=torch.float64))
        size += float(a.square().sum(dtype=torch.float64))
    return None if damage == 0 else (damage / size) ** 0.5 if size else 1.0


def _dense_rows(weight: QuantWeight | torch.Tensor, start: int) -> torch.Tensor:
    if isinstance(weight, QuantWeight):
        return dequantize(transforms.rows(weight, start, start + 1024))
    return weight[start : start + 1024].float()


def _recipe(checkpoint: Checkpoint, step: Mapping[str, object]) -> dict[str, object]:
    """How the weights were made, as far as the source says it, and this conversion."""
    before = (checkpoint.quant.ours or {}).get("recipe")
    recipe = dict(before) if isinstance(before, dict) else {}
    earlier = recipe.get("converted")
    given = {name: value for name, value in step.items() if value not in (None, False)}
    recipe["converted"] = [*(earlier if isinstance(earlier, list) else []), {"from": checkpoint.format, **given}]
    return recipe


def _nonzero_values(values: torch.Tensor) -> torch.Tensor:
    return (values.float() if values.dtype.itemsize == 1 else values) != 0


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
