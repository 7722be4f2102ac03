"""Check a checkpoint as far as it can be checked without running it: every invariant, every layer, every value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from spearfish.checkpoint.reader import Checkpoint, open_folder
from spearfish.errors import FormatError, SpearfishError
from spearfish.formats import FORMATS, transforms
from spearfish.formats.ct_bitmask import CtSparseBitmask
from spearfish.reference import dequantize


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: `where` names the layer, the tensor or the folder."""

    where: str
    what: str


@dataclass
class VerifyReport:
    """The outcome. `notes` are observations that do no harm."""

    path: str
    format: str = ""
    layers: int = 0
    tensors: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(path: str | Path, progress: Callable[[str, int, int], None] | None = None) -> VerifyReport:
    """Look at everything in a checkpoint folder and report every problem, not only the first.

    Each layer is decoded with all value checks and, where the format is writable, encoded again and compared; plain
    tensors must be finite, biases as long as their layer, and our own marks must agree with the tensors.
    """
    report = VerifyReport(str(path))
    try:
        checkpoint = open_folder(path)
    except SpearfishError as error:
        report.problems.append(Problem(str(path), str(error)))
        return report
    report.format = checkpoint.format
    report.notes += checkpoint.notes
    names = list(checkpoint.modules or checkpoint.linears)
    extensions: list[str] = []
    layer_tensors: set[str] = set()
    loose = 0
    for i, name in enumerate(names, 1):
        if progress is not None:
            progress(name, i, len(names))
        report.layers += 1
        try:
            loose += _layer(checkpoint, name, extensions)
            info = checkpoint.linears[name] if checkpoint.format == "dense" else checkpoint.info(name)
            layer_tensors.update(info.tensors.values())
            _bias(checkpoint, name, info.n)
        except SpearfishError as error:
            report.problems.append(Problem(name, _without(str(error), name)))
            tensors = checkpoint.modules[name][1].values() if name in checkpoint.modules else (f"{name}.weight",)
            layer_tensors.update(tensors)
    _plain(checkpoint, layer_tensors, report)
    _marks(checkpoint, extensions, report)
    if loose:
        report.notes.append(
            f"{loose} layers are not in the byte form that spearfish writes (other slots or padding, same values)"
        )
    return report


def _layer(checkpoint: Checkpoint, name: str, extensions: list[str]) -> bool:
    """Decode and encode one layer. Returns whether its bytes differ from ours; raises what is wrong with it."""
    form = FORMATS[checkpoint.modules[name][0] if name in checkpoint.modules else "dense"]
    if isinstance(form, CtSparseBitmask):
        checkpoint.info(name)
        _finite(CtSparseBitmask().values(checkpoint.read_layer(name), name), name)
        return False
    tensors = checkpoint.read_layer(name)
    weight = checkpoint.decode(name, tensors)
    extensions += form.extensions(weight.n, weight.k, weight.scheme)
    shape = checkpoint.quant.layer(name).get("shape")
    if shape is not None:
        transforms.crop(weight, shape[0], shape[1], name)
        extensions.append("padded")
    if form.refusals(weight):
        return False
    again = form.encode(weight, name)
    if all(_same_bytes(again[local], tensors.get(local)) for local in again):
        return False
    decoded = form.decode(again, checkpoint.quant.of(name).as_ours(), name)
    if not torch.equal(dequantize(decoded), dequantize(weight)):
        raise FormatError(f"{name}: does not survive encoding; this is a fault of spearfish, please report it")
    return True


def _same_bytes(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    if b is None or a.dtype != b.dtype or a.numel() != b.numel():
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def _bias(checkpoint: Checkpoint, name: str, n: int) -> None:
    entry = checkpoint.entries.get(f"{name}.bias")
    if entry is not None and entry.shape != (n,):
        raise FormatError(f"{name}: bias has shape {list(entry.shape)}, wanted [{n}]")


def _plain(checkpoint: Checkpoint, layer_tensors: set[str], report: VerifyReport) -> None:
    for name, entry in checkpoint.entries.items():
        if name in layer_tensors:
            continue
        report.tensors += 1
        if entry.dtype.is_floating_point:
            try:
                _finite(checkpoint.tensor(name), name)
            except SpearfishError as error:
                report.problems.append(Problem(name, _without(str(error), name)))
    if checkpoint.config.get("tie_word_embeddings") and "lm_head.weight" in checkpoint.entries:
        report.notes.append("tie_word_embeddings is true, yet there is a lm_head.weight, which loaders leave unread")


def _marks(checkpoint: Checkpoint, extensions: list[str], report: VerifyReport) -> None:
    quant = checkpoint.quant
    if quant.ours is None:
        return
    if extensions and not quant.extended:
        reasons = "; ".join(sorted(set(extensions)))
        report.problems.append(Problem(quant.where, f"not marked as extended, although: {reasons}"))
    unknown = [name for name in quant.ours.get("layers", {}) if name not in checkpoint.modules]
    if unknown:
        report.problems.append(Problem(quant.where, f"spearfish.layers names {unknown[0]}, which is no layer here"))


def _finite(tensor: torch.Tensor, name: str) -> None:
    values = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    bad = ~values.isfinite()
    if bad.any():
        place = [int(i) for i in bad.nonzero()[0]]
        raise FormatError(f"{name}: {place} is {float(values[tuple(place)])} ({int(bad.sum())} values are not finite)")


def _without(message: str, name: str) -> str:
    return message.removeprefix(f"{name}: ")
