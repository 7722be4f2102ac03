"""One sweep over the columns of a weight, each column pruned or rounded and its error moved onto those still to come.

With a mask still to be found this is SparseGPT (Frantar & Alistarh 2023), with rounding it is GPTQ (Frantar et al.
2022), with both it is their joint form. Weights are held transposed, [k, n], so that a column is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

BLOCK = 128

# The six pairs of places in a quad.
PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))


def quad_order(h: torch.Tensor) -> torch.Tensor:
    """int64 [k]: columns with their quads in descending order of the Hessian's diagonal.

    Early columns have most others left to carry their error, so the loud inputs go first. Needs k a multiple of 4.
    """
    loudness = h.diagonal().reshape(-1, 4).sum(dim=1)
    quads = loudness.sort(descending=True, stable=True).indices
    return (quads[:, None] * 4 + torch.arange(4, device=h.device)).flatten()


def cheapest_pairs(w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """bool [4, n], True = kept: the pair of each quad whose removal costs least, w [4, n] and u = U's 4 x 4 block.

    Removing the pair P and letting all other columns make up for it costs w_Pᵀ ([H⁻¹]_PP)⁻¹ w_P exactly, where H is
    that of the columns from here on and its inverse's top block is uᵀu.
    """
    first, second, keep = _pairs(w.device)
    inverse = u.T @ u
    aa, bb, ab = (inverse[i, j][:, None] for i, j in ((first, first), (second, second), (first, second)))
    x, y = w[first], w[second]
    determinant = (aa * bb - ab * ab).clamp_min(torch.finfo(torch.float32).tiny)
    costs = (x.square() * bb + y.square() * aa - 2 * x * y * ab) / determinant
    return keep[costs.argmin(dim=0)].T


@cache
def _pairs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both places of each pair, int64 [6], and bool [6, 4] of what stays when it goes: made once, not per quad."""
    first, second = torch.tensor(PAIRS, device=device).T
    keep = torch.ones(len(PAIRS), 4, dtype=torch.bool, device=device)
    rows = torch.arange(len(PAIRS), device=device)
    keep[rows, first] = False
    keep[rows, second] = False
    return first, second, keep


def sweep(
    weight: torch.Tensor,
    inverse: torch.Tensor,
    mask: torch.Tensor | None = None,
    choose_mask: bool = False,
    scales: torch.Tensor | None = None,
    code_range: tuple[int, int] = (-8, 7),
    after_block: Callable[[int, torch.Tensor], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (values, mask), both [k, n].

    weight: [k, n], in the order in which columns are to be visited. inverse: U [k, k] of the same order. mask: bool
    [k, n] to respect, or choose_mask to find one. scales: [k, n] to round to, or None to keep values real.
    after_block(end, values so far) is called after each block of columns, for tests.
    """
    w = weight.clone()
    k, n = w.shape
    out = torch.zeros_like(w)
    if choose_mask:
        mask = torch.zeros(k, n, dtype=torch.bool, device=w.device)
    low, high = code_range
    for start in range(0, k, BLOCK):
        end = min(start + BLOCK, k)
        part, u = w[start:end], inverse[start:end, start:end]
        errors = torch.empty_like(part)
        # Numbers are quicker on a CPU; on a GPU they would have to be waited for.
        diagonal = u.diagonal() if u.is_cuda else u.diagonal().tolist()
        for i in range(end - start):
            column = part[i]
            if choose_mask and i % 4 == 0:
                if mask is None:
                    raise ValueError("unreachable: choose_mask made one above")
                mask[start + i : start + i + 4] = cheapest_pairs(part[i : i + 4], u[i : i + 4, i : i + 4])
            value = column
            if scales is not None:
                scale = scales[start + i]
                value = (column / scale).round_().clamp_(low, high).mul_(scale)
            if mask is not None:
                value = value * mask[start + i]
            out[start + i] = value
            torch.sub(column, value, out=errors[i])
            errors[i] /= diagonal[i]
            if i + 1 < end - start:
                part[i + 1 :].addr_(u[i, i + 1 :], errors[i], alpha=-1)
        if end < k:
            w[end:].addmm_(inverse[start:end, end:].T, errors, alpha=-1)
        if after_block is not None:
            after_block(end, out)
    return out, mask
