"""Say what a checkpoint is: format, layers, measured sparsity, sizes, and what runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from spearfish import sparse24
from spearfish.checkpoint.hosts import hosts
from spearfish.checkpoint.reader import ALMOST, Checkpoint, LinearInfo, is_head, open_checkpoint
from spearfish.errors import FormatError
from spearfish.formats import FORMATS, transforms
from spearfish.formats.ct_bitmask import CtSparseBitmask
from spearfish.scheme import QuantWeight


@dataclass(frozen=True)
class LayerRow:
    """One linear layer. `zeros` is the share of weights that are exactly zero and `spoilt` the share of groups of four
    with more than two non-zeros, both None if the values were not read; `sparsity` is then what the file says."""

    name: str
    n: int
    k: int
    format: str
    bits: int
    group_size: int | None
    symmetric: bool
    act_order: bool
    sparsity: str
    nbytes: int
    bits_per_weight: float
    zeros: float | None = None
    spoilt: float | None = None


@dataclass
class Inspection:
    """A checkpoint in numbers. Bytes count tensors, not files."""

    path: str
    format: str
    title: str
    where: str
    layers: list[LayerRow] = field(default_factory=list)
    plain_linears: list[str] = field(default_factory=list)
    extended: list[str] = field(default_factory=list)
    runs_on: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    linear_bytes: int = 0
    other_bytes: int = 0
    weights: int = 0
    bits_per_weight: float = 0.0
    measured: bool = True


def inspect(
    path: str | Path, measure: bool = True, progress: Callable[[str, int, int], None] | None = None
) -> Inspection:
    """Open a checkpoint and describe it. With `measure` every layer is read, one at a time, to count its zeros."""
    checkpoint = open_checkpoint(path)
    quant = checkpoint.quant
    result = Inspection(str(path), checkpoint.format, FORMATS[checkpoint.format].title, quant.where, measured=measure)
    infos = list(checkpoint.linears.values())
    reasons: list[str] = []
    for i, info in enumerate(infos, 1):
        if progress is not None:
            progress(info.name, i, len(infos))
        scheme, act_order, zeros, spoilt = info.scheme, bool(quant.of(info.name).act_order), None, None
        found = _measure(checkpoint, info) if measure else None
        if isinstance(found, QuantWeight):
            scheme, act_order, zeros = found.scheme, found.group_index is not None, transforms.zeros_share(found)
        elif found is not None:
            zeros = 1 - float(found.double().mean())
        if isinstance(found, QuantWeight) and found.scheme.is_sparse:
            spoilt = 0.0
        elif found is not None:
            mask = transforms.nonzero(found) if isinstance(found, QuantWeight) else found
            spoilt = float(sparse24.violations(mask).double().mean()) if info.k % 4 == 0 else 1.0
        sparsity = scheme.sparsity if spoilt is None else "2:4" if spoilt == 0 else "dense"
        reasons += FORMATS[info.format].extensions(info.n, info.k, scheme)
        result.layers.append(
            LayerRow(
                info.name,
                info.n,
                info.k,
                info.format,
                info.bits,
                scheme.group_size,
                scheme.symmetric,
                act_order,
                sparsity,
                info.nbytes,
                8 * info.nbytes / (info.n * info.k),
                zeros,
                spoilt,
            )
        )
    result.plain_linears = list(checkpoint.plain_linears())
    result.extended = list(quant.extended) or sorted(set(reasons))
    result.runs_on = hosts(checkpoint.format, bool(result.extended))
    if not result.layers:
        result.runs_on = result.runs_on[1:]
    result.notes = checkpoint.notes + _almost(checkpoint, result.plain_linears)
    if checkpoint.format == "dense" and result.layers:
        result.notes.append(
            "zeros take as much room here as other values, and other programs multiply by them:"
            " `spearfish convert --to marlin_24` stores what is left in 4 bits (--to ct-sparse-24-bitmask keeps all 16)"
        )
    result.weights = sum(row.n * row.k for row in result.layers)
    result.linear_bytes = sum(row.nbytes for row in result.layers)
    result.other_bytes = sum(entry.nbytes for entry in checkpoint.entries.values()) - result.linear_bytes
    result.bits_per_weight = 8 * result.linear_bytes / result.weights if result.weights else 0.0
    return result


def _measure(checkpoint: Checkpoint, info: LinearInfo) -> QuantWeight | torch.Tensor:
    """The layer, or which of its values are not zero, bool [n, k], if it is not 2:4 and so no `QuantWeight`."""
    if info.format == CtSparseBitmask.name:
        return checkpoint.values(info.name) != 0
    try:
        return checkpoint.weight(info.name)
    except FormatError:
        if info.format != "dense":
            raise
        return checkpoint.tensor(info.tensors["weight"]).float() != 0


def _almost(checkpoint: Checkpoint, plain: list[str]) -> list[str]:
    """A note on plain layers that look as if they were meant to be 2:4."""
    if checkpoint.format != "dense":
        return []
    shares = {name: checkpoint.sample_violations(f"{name}.weight") for name in plain if not is_head(name)}
    almost = {name: share for name, share in shares.items() if 0 < share < ALMOST}
    if not almost:
        return []
    name, share = next(iter(almost.items()))
    return [
        f"{len(almost)} of the plain layers are almost 2:4, the first is {name} ({share:.2%} of the groups of four"
        f" looked at hold more than two values); convert --reproject makes them so"
    ]
