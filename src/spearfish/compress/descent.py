"""Exact descent on the grid: quad by quad, the best codes (and the best pair to keep) given everything else.

Where a sweep of `obs` decides each column once and never looks back, this visits every quad again with all others
fixed, so mask and codes are chosen together: a weight that would round to zero is a wasted slot and loses it. The
error never rises.
"""

from __future__ import annotations

from functools import cache

import torch

from spearfish.compress.obs import PAIRS

BLOCK = 128


def descend(
    target: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    h: torch.Tensor,
    scales: torch.Tensor | None,
    code_range: tuple[int, int] = (-8, 7),
    sweeps: int = 1,
    free_mask: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (values, mask), both [k, n], with an error (t − v)ᵀ H (t − v) per row not above the start's.

    All of [k, n] (transposed). scales None: real values. mask None: dense, each column on its own.
    """
    v = values.clone()
    keep = None if mask is None else mask.clone()
    pairs = _both_orders(v.device)
    k = v.shape[0]
    for _ in range(sweeps):
        # gradient = H (t − v); kept up to date inside a block, and for all others by one product per block.
        gradient = h @ (target - v)
        for start in range(0, k, BLOCK):
            end = min(start + BLOCK, k)
            hb, g, before = h[start:end, start:end], gradient[start:end], v[start:end].clone()
            for i in range(0, end - start, 4):
                rows = slice(start + i, start + i + 4)
                old = v[rows].clone()
                a = hb[i : i + 4, i : i + 4]
                # In this quad alone the error is (x − best)ᵀ A (x − best) + const, with A best = g + A old.
                pull = g[i : i + 4] + a @ old
                new, kept = _best_quad(
                    pull,
                    a,
                    old,
                    None if keep is None else keep[rows],
                    None if scales is None else scales[rows],
                    code_range,
                    free_mask,
                    pairs,
                )
                v[rows] = new
                if keep is not None and kept is not None:
                    keep[rows] = kept
                g.addmm_(hb[:, i : i + 4], new - old, alpha=-1)
            if end < k or start > 0:
                change = v[start:end] - before
                gradient[:start].addmm_(h[:start, start:end], change, alpha=-1)
                gradient[end:].addmm_(h[end:, start:end], change, alpha=-1)
    return v, keep


@cache
def _both_orders(device: torch.device) -> torch.Tensor:
    """int64 [2, 12]: the six pairs of places in both orders."""
    return torch.tensor(PAIRS + tuple((b, a) for a, b in PAIRS), device=device).T


def _round(x: torch.Tensor, scale: torch.Tensor | None, code_range: tuple[int, int]) -> torch.Tensor:
    if scale is None:
        return x
    return (x / scale).round_().clamp_(*code_range).mul_(scale)


def _cost(x: torch.Tensor, a: torch.Tensor, pull: torch.Tensor) -> torch.Tensor:
    return (x * (a @ x - 2 * pull)).sum(dim=0)


def _best_quad(
    pull: torch.Tensor,
    a: torch.Tensor,
    old: torch.Tensor,
    kept: torch.Tensor | None,
    scale: torch.Tensor | None,
    code_range: tuple[int, int],
    free_mask: bool,
    pairs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The cheapest x [4, n] found, under the cost xᵀ A x - 2 xᵀ pull, and the places that it keeps.

    For a pair, the first value takes its best real place and is rounded, the second its best place given the first;
    `pairs` [2, 12] holds the six pairs in both orders. The old x wins unless another is cheaper.
    """
    if kept is None:
        x = old.clone()
        for j in range(4):
            others = pull[j] - a[j] @ x + a[j, j] * x[j]
            x[j] = _round(others / a[j, j], None if scale is None else scale[j], code_range)
        better = _cost(x, a, pull) < _cost(old, a, pull)
        return torch.where(better, x, old), None
    # [12, n]: the six pairs in both orders.
    first, second = pairs
    p, q = pull[first], pull[second]
    aa, bb, ab = a[first, first, None], a[second, second, None], a[first, second, None]
    s, t = (None, None) if scale is None else (scale[first], scale[second])
    x = _round((p * bb - q * ab) / (aa * bb - ab * ab).clamp_min(torch.finfo(torch.float32).tiny), s, code_range)
    y = _round((q - ab * x) / bb, t, code_range)
    cost = x * (aa * x + 2 * ab * y - 2 * p) + y * (bb * y - 2 * q)
    if not free_mask:
        chosen = kept.gather(0, first[:, None].expand_as(x)) & kept.gather(0, second[:, None].expand_as(x))
        cost = cost.masked_fill(~chosen, float("inf"))
    lowest, best = cost.min(dim=0, keepdim=True)
    better = lowest < _cost(old, a, pull)
    place, other = first[best], second[best]
    new = torch.zeros_like(old)
    new.scatter_(0, place, x.gather(0, best)).scatter_(0, other, y.gather(0, best))
    new_kept = torch.zeros_like(kept).scatter_(0, place, True).scatter_(0, other, True)
    return torch.where(better, new, old), torch.where(better, new_kept, kept)
