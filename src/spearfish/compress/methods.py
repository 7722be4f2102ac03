"""The ways to turn one weight into a QuantWeight. A new method is one function and one line in METHODS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from spearfish import sparse24
from spearfish.compress import grid
from spearfish.compress.admm import admm_mask
from spearfish.compress.descent import descend
from spearfish.compress.hessian import DAMPING, Factor, factorise
from spearfish.compress.obs import quad_order, sweep
from spearfish.compress.refit import refit
from spearfish.compress.replay import REPLAYS, Tensors
from spearfish.errors import ShapeError
from spearfish.scheme import QuantScheme, QuantWeight


@dataclass(frozen=True)
class Problem:
    """One weight [n, k] in float32, the undamped mean Hessian [k, k] of its inputs, and the scheme to reach.

    `order` visits the quads by the Hessian; `factor` is that of H in its own order, `ordered` that in visiting order.
    """

    weight: torch.Tensor
    h: torch.Tensor
    scheme: QuantScheme
    order: torch.Tensor
    factor: Factor
    ordered: torch.Tensor

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        h: torch.Tensor,
        scheme: QuantScheme,
        damping: float = DAMPING,
        lag: torch.Tensor | None = None,
    ) -> Problem:
        """lag: mean of lag xᵀ [n, k], see `Hessian.add`; the weight to come close to is then the one that makes it
        good, by least squares with the damped H. Raises ShapeError if k is no multiple of 4 though 2:4 is asked for."""
        if scheme.is_sparse and weight.shape[1] % 4:
            raise ShapeError(f"2:4 needs k to be a multiple of 4, got a weight {list(weight.shape)}")
        order = quad_order(h) if h.shape[0] % 4 == 0 else h.diagonal().sort(descending=True, stable=True).indices
        factor = factorise(h, damping)
        if lag is not None:
            weight = weight + lag @ factor.inverse.T @ factor.inverse
        weight = weight.masked_fill(factor.dead, 0.0)
        reordered = factorise(factor.damped[order][:, order], 1e-9)
        return cls(weight, h, scheme, order, factor, reordered.inverse)

    def swept(
        self, weight: torch.Tensor, mask: torch.Tensor | None, choose_mask: bool, scales: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`obs.sweep` in visiting order for [n, k] matrices; scales are [n, groups]."""
        full = None
        if scales is not None:
            full = grid.scale_of_columns(scales, self.scheme, weight.shape[1]).T[self.order].contiguous()
        code_range = grid.code_range(self.scheme) if full is not None else (0, 0)

        def run(weight: torch.Tensor, inverse: torch.Tensor, *rest: torch.Tensor | None) -> Tensors:
            return sweep(weight, inverse, rest[0], choose_mask, rest[1], code_range)

        values, found = REPLAYS.call(
            ("sweep", choose_mask, code_range),
            run,
            weight.T[self.order].contiguous(),
            self.ordered,
            None if mask is None else mask.T[self.order].contiguous(),
            full,
        )
        if values is None:
            raise ValueError("unreachable: a sweep returns values")
        back = torch.argsort(self.order)
        return values[back].T, None if found is None else found[back].T


def round_to_nearest(weight: torch.Tensor, mask: torch.Tensor | None, scheme: QuantScheme) -> QuantWeight:
    """No compensation at all: every kept value goes to the nearest code, scales from the largest magnitude."""
    kept = weight if mask is None else weight * mask
    if scheme.bits == 16:
        return grid.pack(kept, None, mask, scheme)
    return grid.pack(kept, grid.find_scales(kept, scheme, search=False), mask, scheme)


def _quantise_with_compensation(
    problem: Problem, start: torch.Tensor, mask: torch.Tensor | None, descents: int
) -> QuantWeight:
    """GPTQ on the kept values of `start`, scales searched under H's diagonal with the mask in view; then `descents`
    sweeps of exact descent, which may move the mask too."""
    scheme = problem.scheme
    if scheme.bits == 16:
        return grid.pack(start, None, mask, scheme)
    diagonal = problem.factor.damped.diagonal().contiguous()
    (scales,) = REPLAYS.call(
        ("scales", scheme), lambda w, importance: (grid.find_scales(w, scheme, importance),), start, diagonal
    )
    if scales is None:
        raise ValueError("unreachable: a search returns scales")
    values, _ = problem.swept(start, mask, choose_mask=False, scales=scales)
    if descents and problem.weight.shape[1] % 4 == 0:
        full = grid.scale_of_columns(scales, scheme, values.shape[1]).T.contiguous()
        code_range = grid.code_range(scheme)
        turned, kept = REPLAYS.call(
            ("descend", code_range, descents),
            lambda t, v, m, h, s: descend(t, v, m, h, s, code_range, sweeps=descents),
            problem.weight.T.contiguous(),
            values.T.contiguous(),
            None if mask is None else mask.T.contiguous(),
            problem.factor.damped,
            full,
        )
        values = values if turned is None else turned.T
        mask = None if kept is None else kept.T
    return grid.pack(values, scales, mask, scheme)


def magnitude(problem: Problem) -> QuantWeight:
    """Largest magnitudes, then round to nearest: the naive baseline."""
    mask = sparse24.magnitude_mask(problem.weight.abs()) if problem.scheme.is_sparse else None
    return round_to_nearest(problem.weight, mask, problem.scheme)


def wanda(problem: Problem) -> QuantWeight:
    """Magnitude times the norm of the input (Sun et al. 2023), then round to nearest."""
    mask = None
    if problem.scheme.is_sparse:
        mask = sparse24.magnitude_mask(problem.weight.abs() * problem.h.diagonal().clamp_min(0).sqrt())
    return round_to_nearest(problem.weight, mask, problem.scheme)


def sparsegpt(problem: Problem) -> QuantWeight:
    """SparseGPT for the mask, then GPTQ that keeps it. Without a mask this is plain GPTQ."""
    if not problem.scheme.is_sparse:
        return _quantise_with_compensation(problem, problem.weight, None, descents=0)
    values, mask = problem.swept(problem.weight, None, choose_mask=True, scales=None)
    return _quantise_with_compensation(problem, values, mask, descents=0)


def joint(problem: Problem) -> QuantWeight:
    """SparseGPT for the mask, least squares on it, GPTQ, then exact descent on codes and mask together."""
    if not problem.scheme.is_sparse:
        return _quantise_with_compensation(problem, problem.weight, None, descents=1)
    values, mask = problem.swept(problem.weight, None, choose_mask=True, scales=None)
    return _from_mask(problem, values, mask)


def admm(problem: Problem) -> QuantWeight:
    """ADMM for the mask, least squares on it, GPTQ, then exact descent on codes and mask together."""
    if not problem.scheme.is_sparse:
        return _quantise_with_compensation(problem, problem.weight, None, descents=1)
    mask = admm_mask(problem.weight, problem.factor.damped)
    return _from_mask(problem, problem.weight, mask)


def _from_mask(problem: Problem, start: torch.Tensor, mask: torch.Tensor | None) -> QuantWeight:
    if mask is None:
        raise ValueError("a 2:4 method found no mask")
    values = refit(problem.weight, start, mask, problem.factor.damped)
    return _quantise_with_compensation(problem, values, mask, descents=1)


@dataclass(frozen=True)
class Method:
    """solve: the function. prunes: False if it leaves every layer dense. text: one line for the help. catch_up: the
    share of earlier losses that its layers make good if a recipe does not say (`Recipe.catch_up`)."""

    solve: Callable[[Problem], QuantWeight]
    prunes: bool
    text: str
    catch_up: float = 0.0


METHODS: dict[str, Method] = {
    "admm": Method(admm, True, "ADMM mask, least squares, GPTQ, exact descent: the best without gradients", 1.0),
    "joint": Method(joint, True, "SparseGPT mask, least squares, GPTQ, exact descent: nearly as good, faster", 1.0),
    "sparsegpt": Method(sparsegpt, True, "SparseGPT mask, then GPTQ that keeps it"),
    "wanda": Method(wanda, True, "Wanda mask, round to nearest (baseline)"),
    "magnitude": Method(magnitude, True, "largest magnitudes, round to nearest (baseline)"),
    "gptq": Method(sparsegpt, False, "GPTQ without pruning (dense layers)"),
    "rtn": Method(magnitude, False, "round to nearest without pruning (baseline)"),
}
