"""ADMM for the mask (the idea of ALPS, Meng et al. 2024): weights and their nearest 2:4 matrix, pulled together slowly.

Unlike a sweep it can change its mind about every quad at every step. The weights found are then refitted on the
support by `refit`.
"""

from __future__ import annotations

import torch

from spearfish import sparse24

# The penalty doubles in two levels, from a tenth of H's (unit) diagonal until masks no longer change. Measured on
# SmolLM2: 9 levels of 4 steps reach the error of 60 steps with a growing penalty and an eigendecomposition, in a third
# of the time; larger jumps lose (a factor of 3 gives up most of the gain over SparseGPT).
LEVELS = tuple(0.1 * 2 ** (level / 2) for level in range(9))
STEPS = 4


def nearest_two(values: torch.Tensor) -> torch.Tensor:
    """bool [n, k]: magnitudes not below the second largest of their quad. Ties keep more than two: `admm_mask` breaks
    them at the end; until then speed counts, and sorting quads takes most of the time."""
    quads = values.abs().reshape(values.shape[0], -1, 4)
    a, b, c, d = quads.unbind(-1)
    high, other = torch.maximum(a, b), torch.maximum(c, d)
    second = torch.maximum(torch.minimum(high, other), torch.maximum(torch.minimum(a, b), torch.minimum(c, d)))
    return (quads >= second[..., None]).reshape(values.shape)


def admm_mask(target: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """bool [n, k], the 2:4 mask of target [n, k] under the damped H [k, k].

    Minimises ‖(t - v) X‖² subject to v = d, d being 2:4. Inputs are first scaled so that H has a unit diagonal, which
    makes |v| comparable between columns.
    """
    size = h.diagonal().sqrt()
    scaled = h / size / size[:, None]
    t = target * size
    ht = t @ scaled
    d = wanted = t
    dual = torch.zeros_like(t)
    for penalty in LEVELS:
        loaded = scaled.clone()
        loaded.diagonal().add_(penalty)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(loaded))
        for _ in range(STEPS):
            v = (ht + penalty * d - dual) @ inverse
            wanted = v + dual / penalty
            d = wanted * nearest_two(wanted)
            dual = dual + penalty * (v - d)
    return sparse24.magnitude_mask(wanted.abs())
