"""2:4 sparsity along k: masks, compress and expand, and the nibble that says which two of four were kept.

A quad is four neighbouring k of one output row. `positions` holds one byte per quad, `i0 | i1 << 2` with i0 < i1:
the same nibble that the tensor cores read as metadata. All functions are vectorised torch and run on any device.
"""

from __future__ import annotations

import torch

from spearfish.errors import ShapeError

# The six legal patterns in ascending order, as nibbles and as the pair of kept places.
NIBBLES = (0x4, 0x8, 0xC, 0x9, 0xD, 0xE)


def _quads(dense: torch.Tensor) -> torch.Tensor:
    if dense.dim() != 2 or dense.shape[1] % 4:
        raise ShapeError(f"2:4 needs a matrix [n, k] with k a multiple of 4, got {list(dense.shape)}")
    return dense.reshape(dense.shape[0], dense.shape[1] // 4, 4)


def magnitude_mask(score: torch.Tensor) -> torch.Tensor:
    """bool [n, k] keeping the two largest of every quad of `score` [n, k]; ties go to the lower k."""
    quads = _quads(score)
    # A stable descending sort gives ties to the lower index on every device.
    order = quads.sort(dim=-1, descending=True, stable=True).indices[..., :2]
    return torch.zeros_like(quads, dtype=torch.bool).scatter_(-1, order, True).reshape(score.shape)


def violations(dense: torch.Tensor, zero: float = 0) -> torch.Tensor:
    """bool [n, k/4]: quads of `dense` [n, k] with more than two values unequal to `zero`. NaN counts as non-zero."""
    nonzero = (_quads(dense) != zero).contiguous()
    # The four bytes of a quad, each 0 or 1, read as one word: the product gathers their sum in the top byte.
    return ((nonzero.view(torch.int32).squeeze(-1) * 0x01010101) >> 24) > 2


def positions_of_nonzero(nonzero: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k/4] for a bool [n, k] with at most two True in each quad, by the slot rule of the original packers.

    The first slot is the first non-zero of places 0 and 1, else place 2; the second is place 1 if both 0 and 1 are
    taken, place 3 if neither is, else place 3 or 2, whichever is non-zero (2 if none). Quads with fewer than two
    non-zeros so get a filler place, always with i0 < i1. (vLLM 0.4.3 `marlin_24_quantize`.)
    """
    m0, m1, _, m3 = _quads(nonzero).unbind(-1)
    # In bytes, since a layer has tens of millions of quads: i0 counts how many of places 0 and 1 are passed over.
    i0 = (~m0).to(torch.uint8) + ~(m0 | m1)
    both = m0 & m1
    i1 = 2 - both.to(torch.uint8) + (~both & (~(m0 | m1) | m3))
    return i0 | i1 << 2


def positions_of_mask(mask: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k/4] for a bool mask [n, k] with exactly two True in each quad. Raises ShapeError otherwise."""
    counts = _quads(mask).sum(-1)
    bad = counts != 2
    if bad.any():
        row, quad = (int(i) for i in bad.nonzero()[0])
        raise ShapeError(
            f"row {row}, columns {4 * quad}..{4 * quad + 3} keep {int(counts[row, quad])} values, 2:4 wants exactly 2"
            f" ({int(bad.sum())} quads wrong)"
        )
    return positions_of_nonzero(mask)


def kept_columns(positions: torch.Tensor) -> torch.Tensor:
    """int64 [n, k/2]: the dense k of every kept value, in order."""
    base = 4 * torch.arange(positions.shape[1], device=positions.device)
    columns = torch.empty(*positions.shape, 2, dtype=torch.int64, device=positions.device)
    torch.add(base, positions & 3, out=columns[..., 0])
    torch.add(base, positions >> 2, out=columns[..., 1])
    return columns.flatten(1)


def compress(dense: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The kept values [n, k/2] of `dense` [n, k]."""
    _quads(dense)
    return dense.gather(1, kept_columns(positions))


def expand(kept: torch.Tensor, positions: torch.Tensor, fill: float = 0) -> torch.Tensor:
    """Dense [n, k] from kept values [n, k/2]; the other places hold `fill`. Inverse of `compress`."""
    n, half = kept.shape
    dense = torch.full((n, 2 * half), fill, dtype=kept.dtype, device=kept.device)
    return dense.scatter_(1, kept_columns(positions), kept)
