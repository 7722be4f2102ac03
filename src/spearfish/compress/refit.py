"""Given a mask, the kept weights that lose least: one least-squares problem per row, all rows at once."""

from __future__ import annotations

import torch


def refit(
    target: torch.Tensor, start: torch.Tensor, mask: torch.Tensor, h: torch.Tensor, steps: int = 12
) -> torch.Tensor:
    """Conjugate gradients on the support: minimises (t − v) H (t − v)ᵀ over rows v of [n, k] that are zero outside
    `mask`, from `start`, preconditioned by H's diagonal. H must be positive definite (damped).

    After `steps` steps the error is never above that of `start`: conjugate gradients only descend.
    """
    allowed = mask.to(target.dtype)
    inverse_diagonal = h.diagonal().reciprocal() * allowed
    v = start * allowed
    residual = ((target - v) @ h) * allowed
    z = residual * inverse_diagonal
    direction = z.clone()
    rz = (residual * z).sum(dim=1, keepdim=True)
    tiny = torch.finfo(target.dtype).tiny
    for _ in range(steps):
        hd = (direction @ h) * allowed
        alpha = rz / (direction * hd).sum(dim=1, keepdim=True).clamp_min(tiny)
        v = v + alpha * direction
        residual = residual - alpha * hd
        z = residual * inverse_diagonal
        new = (residual * z).sum(dim=1, keepdim=True)
        direction = z + (new / rz.clamp_min(tiny)) * direction
        rz = new
    return v
