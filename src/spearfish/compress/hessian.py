"""What a layer's inputs say about its weights: H = Σ x xᵀ over the calibration tokens, and factors of its inverse.

The error that compression minimises is ‖(W − Ŵ) X‖² = Σ_rows d H dᵀ with d = one row of W − Ŵ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spearfish.errors import ShapeError, SpearfishError

DAMPING = 0.1  # first try, as a share of the mean of H's diagonal
MAX_DAMPING = 10.0
FAR = 2.0  # times the median lag: no token counts as further away than that


class Hessian:
    """Accumulates Σ x xᵀ, float32 [k, k], token by token.

    equal_norm: scale every token to the same length first. Attention-sink tokens are hundreds of times longer than the
    rest and would otherwise own the sum; on a small model this lowered perplexity by some 6 %.

    Tokens with NaN or Inf are left out and counted in `skipped`.
    """

    def __init__(self, k: int, device: torch.device | str = "cpu", equal_norm: bool = True) -> None:
        self.sum = torch.zeros(k, k, dtype=torch.float32, device=device)
        self.lag: torch.Tensor | None = None  # Σ lag xᵀ [n, k]
        self.equal_norm = equal_norm
        self.tokens = 0
        self.skipped = 0

    @property
    def k(self) -> int:
        return self.sum.shape[0]

    def add(self, x: torch.Tensor, lag: torch.Tensor | None = None) -> None:
        """Takes inputs [..., k] of any float dtype; and, with them always or never, how far the layer's outputs lag
        behind what they should be, [..., n]."""
        x = x.reshape(-1, x.shape[-1]).to(self.sum)
        finite = x.isfinite().all(dim=1)
        if lag is not None:
            lag = lag.reshape(-1, lag.shape[-1]).to(self.sum)
            finite &= lag.isfinite().all(dim=1)
        count = int(finite.sum())
        if count < x.shape[0]:
            self.skipped += x.shape[0] - count
            x = x[finite]
            lag = None if lag is None else lag[finite]
        self.tokens += count
        if self.equal_norm:
            length = x.norm(dim=1, keepdim=True)
            size = self.k**0.5 / length.clamp_min(torch.finfo(torch.float32).tiny)
            x = x * size
            lag = None if lag is None else lag * size
        self.sum.addmm_(x.T, x)
        if lag is not None and count:
            # Attention sinks are whole lengths away from where they should be, and would own this sum too.
            far = lag.norm(dim=1, keepdim=True)
            lag = lag * (FAR * far.median() / far.clamp_min(torch.finfo(torch.float32).tiny)).clamp_max(1.0)
            if self.lag is None:
                self.lag = torch.zeros(lag.shape[1], self.k, dtype=torch.float32, device=self.sum.device)
            self.lag.addmm_(lag.T, x)

    def mean(self, name: str = "layer") -> torch.Tensor:
        """H divided by the number of tokens. Raises SpearfishError if more than half of them were not finite."""
        if self.skipped > self.tokens:
            raise SpearfishError(
                f"{name}: {self.skipped} of {self.skipped + self.tokens} calibration tokens have non-finite inputs; run"
                " the calibration in float32 or bfloat16, and look whether the dense model itself overflows"
            )
        if not self.sum.isfinite().all():
            raise SpearfishError(f"{name}: the inputs are finite but the sum of their squares overflows float32")
        return self.sum / max(self.tokens, 1)


@dataclass(frozen=True)
class Factor:
    """Upper triangular `inverse` U with H⁻¹ = UᵀU of the damped H, and what had to be done to get it.

    damping: share of the mean diagonal that was added, `grown` if more than asked for. diagonal: True if even the
    largest damping failed and only H's diagonal was used. dead: bool [k], inputs that are zero in every calibration
    token.
    """

    inverse: torch.Tensor
    damped: torch.Tensor
    damping: float
    diagonal: bool
    dead: torch.Tensor
    grown: bool = False

    @property
    def remark(self) -> str | None:
        """One sentence for the report if something unusual was needed."""
        said = []
        if self.diagonal:
            said.append("the Hessian could not be inverted even with the largest damping, only its diagonal was used")
        elif self.grown:
            said.append(f"damping grown to {self.damping:g} of the mean diagonal")
        if count := int(self.dead.sum()):
            said.append(f"{count} inputs are always zero")
        return "; ".join(said) or None


def inverse_factor(h: torch.Tensor) -> torch.Tensor:
    """Upper triangular U with H⁻¹ = UᵀU for a positive definite H [k, k].

    Cholesky of H read backwards gives H = V Vᵀ with V upper triangular, and U = V⁻¹: one factorisation and one
    triangular solve, where inverting H first would square its condition. Raises ShapeError naming the index at which H
    is not positive definite or not finite; damp it first (`factorise` does).
    """
    if not h.isfinite().all():
        index = int((~h.isfinite()).any(dim=1).nonzero()[0])
        raise ShapeError(f"the Hessian is not finite in row {index}: look for NaN or Inf in the layer's inputs")
    lower, info = torch.linalg.cholesky_ex(h.flip(0, 1))
    if int(info) > 0:
        index = h.shape[0] - int(info)
        raise ShapeError(f"the Hessian is not positive definite at index {index}: damp it first")
    identity = torch.eye(h.shape[0], dtype=h.dtype, device=h.device)
    inverse: torch.Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
    return inverse


def factorise(h: torch.Tensor, damping: float = DAMPING) -> Factor:
    """The damped H and the factor of its inverse; damping grows tenfold until it works. Never fails on a finite H."""
    diagonal = h.diagonal()
    dead = diagonal <= 0
    mean = float(diagonal.mean())
    if mean <= 0:
        mean = 1.0
    filled = h.clone()
    # A dead input says nothing about its weight: a diagonal of one keeps it apart from all others.
    filled[dead, :] = 0
    filled[:, dead] = 0
    filled.diagonal()[dead] = mean
    share = damping
    while share <= MAX_DAMPING:
        damped = filled.clone()
        damped.diagonal().add_(share * mean)
        try:
            inverse = inverse_factor(damped)
        except ShapeError:
            share *= 10
            continue
        if inverse.isfinite().all():
            return Factor(inverse, damped, share, False, dead, grown=share > damping)
        share *= 10
    damped = torch.diag(filled.diagonal() + MAX_DAMPING * mean)
    return Factor(torch.diag(damped.diagonal().rsqrt()), damped, MAX_DAMPING, True, dead)


def relative_error(weight: torch.Tensor, approximation: torch.Tensor, h: torch.Tensor) -> float:
    """‖(W − Ŵ) X‖² / ‖W X‖² for weights [n, k] and the undamped H."""
    difference = weight - approximation
    lost = float(((difference @ h) * difference).sum())
    total = float(((weight @ h) * weight).sum())
    if total <= 0:
        return 0.0
    return max(lost, 0.0) / total
