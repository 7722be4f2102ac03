"""The grid that quantised values lie on: scales per group, codes, and the step from solved weights to a QuantWeight."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from spearfish import sparse24
from spearfish.scheme import QuantScheme, QuantWeight

# Shares of the largest magnitude that a scale search tries: clipping a few large weights often pays.
SHRINK = tuple(1.0 - 0.04 * step for step in range(14))


def code_range(scheme: QuantScheme) -> tuple[int, int]:
    """Lowest and highest signed code, e.g. -8 and 7."""
    return -scheme.zero_point, scheme.zero_point - 1


def group_slices(scheme: QuantScheme, k: int) -> Iterator[slice]:
    """The columns of each scale group; the last one may be shorter."""
    size = k if scheme.group_size is None else scheme.group_size
    for start in range(0, k, size):
        yield slice(start, min(start + size, k))


def as_stored(scales: torch.Tensor) -> torch.Tensor:
    """float32 scales that float16 holds exactly, never zero: what a checkpoint will carry."""
    smallest = torch.finfo(torch.float16).smallest_normal
    return scales.clamp(smallest, torch.finfo(torch.float16).max).half().float()


def find_scales(
    weight: torch.Tensor, scheme: QuantScheme, importance: torch.Tensor | None = None, search: bool = True
) -> torch.Tensor:
    """float32 [n, groups], exact in float16, for weight [n, k] (zeros where the mask took a value).

    With `search`, each group takes the share of its largest magnitude that minimises Σ importance · (w − q)²;
    importance is [k], ones if not given. Without, the classic largest magnitude over 2^(bits-1) − ½.
    """
    low, high = code_range(scheme)
    columns = []
    for cut in group_slices(scheme, weight.shape[1]):
        w = weight[:, cut]
        full = w.abs().amax(dim=1, keepdim=True) / (high + 0.5)
        best = as_stored(full)
        if search:
            cost_weight = torch.ones(w.shape[1], device=w.device) if importance is None else importance[cut]
            lowest = torch.full_like(full, float("inf"))
            # 1.0 / (high + 0.5) maps the largest value halfway beyond the last code; SHRINK's first entries widen it.
            for share in (1.08, 1.04, *SHRINK):
                scale = as_stored(full * share)
                q = (w / scale).round().clamp(low, high) * scale
                cost = ((w - q).square() * cost_weight).sum(dim=1, keepdim=True)
                better = cost < lowest
                best = torch.where(better, scale, best)
                lowest = torch.where(better, cost, lowest)
        columns.append(best)
    return torch.cat(columns, dim=1)


def scale_of_columns(scales: torch.Tensor, scheme: QuantScheme, k: int) -> torch.Tensor:
    """[n, k]: every column's scale."""
    size = k if scheme.group_size is None else scheme.group_size
    return scales.repeat_interleave(size, dim=1)[:, :k]


def pack(
    values: torch.Tensor, scales: torch.Tensor | None, mask: torch.Tensor | None, scheme: QuantScheme
) -> QuantWeight:
    """A QuantWeight from values [n, k] that lie on the grid (16 bit: any values), masked by bool [n, k] or dense."""
    positions = None if mask is None else sparse24.positions_of_mask(mask)
    if scheme.bits == 16:
        kept = values if positions is None else sparse24.compress(values, positions)
        return QuantWeight(scheme, kept.contiguous(), positions=positions)
    if scales is None:
        raise ValueError("quantised values need scales")
    low, high = code_range(scheme)
    codes = (values / scale_of_columns(scales, scheme, values.shape[1])).round().clamp(low, high) + scheme.zero_point
    codes = codes.to(torch.uint8)
    if positions is not None:
        codes = sparse24.compress(codes, positions)
    return QuantWeight(scheme, codes.contiguous(), scales=scales.half(), positions=positions)
