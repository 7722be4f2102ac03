"""Is a product right? Nobody is timed before this says so.

Two looks at y [m, n]: a few rows in full against float64, and *every* row through one random sum. For signs r [n],
y·r must equal x·(Wᵀr), which costs a product with one vector instead of n; a wrong tile anywhere moves it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spearfish.bench.problems import Weights, row_chunks

# Rounding of the weight, of the result, and what a dozen rounded partial sums may add: four units in the last place.
# The data race of the 2024 kernel (2e-3 to 8e-3 in float16) is beyond it.
TOLERANCE = {torch.float16: 4 * 2.0**-11, torch.bfloat16: 4 * 2.0**-8}
_ROWS = 8


@dataclass(frozen=True)
class Truth:
    """What a product should be: some rows of it, and the random sum of every row, in float64."""

    rows: torch.Tensor
    values: torch.Tensor
    signs: torch.Tensor
    sums: torch.Tensor


def truth(x: torch.Tensor, weights: Weights, kind: str) -> Truth:
    """The truth of x [m, k] times the weight `kind` of `weights`."""
    m = x.shape[0]
    rows = torch.linspace(0, m - 1, min(m, _ROWS), device=x.device).round().long()
    make = torch.Generator(device=x.device).manual_seed(m)
    signs = torch.randint(2, (weights.n,), generator=make, device=x.device).double() * 2 - 1
    some, values = x[rows].double(), []
    projected = torch.zeros(weights.k, dtype=torch.float64, device=x.device)
    for part in row_chunks(weights.n, weights.k):
        exact = weights.exact(kind, part)
        values.append(some @ exact.T)
        projected += exact.T @ signs[part]
    sums = torch.cat([x[part].double() @ projected for part in row_chunks(m, weights.k)])
    return Truth(rows, torch.cat(values, dim=1), signs, sums)


def error(y: torch.Tensor, known: Truth) -> float:
    """Relative error of y [m, n]: ‖y − truth‖ / ‖truth‖ over the known rows, or the same seen through the random sums
    of all rows, or a tenth of the worst row's; whichever is largest. Infinite if a value is not finite."""
    if y.shape != (known.sums.numel(), known.signs.numel()) or not bool(y.isfinite().all()):
        return float("inf")
    difference = y[known.rows].double() - known.values
    in_full = float(difference.norm() / known.values.norm())
    if known.rows.numel() == known.sums.numel():
        return in_full
    # The signs are independent of y, so a row's sum has on average the norm of the row for its size.
    size = known.values.norm() / known.rows.numel() ** 0.5
    sums = torch.cat([y[part].double() @ known.signs for part in row_chunks(y.shape[0], y.shape[1])])
    off = (sums - known.sums) / size
    # Ten standard deviations: by chance no row of any run lies so far out, so the worst row counts for a tenth.
    return max(in_full, float(off.norm() / off.numel() ** 0.5), float(off.abs().max()) / 10)
