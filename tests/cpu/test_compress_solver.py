"""The solvers against slow truths, on inputs that are correlated as those of a real model are: with white inputs a
solver that forgets the mask looks fine (12.6 % of quads go wrong here without it, none with white inputs)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spearfish import sparse24
from spearfish.compress import grid, methods, obs
from spearfish.compress.admm import admm_mask, nearest_two
from spearfish.compress.descent import descend
from spearfish.compress.hessian import DAMPING, Hessian, factorise, inverse_factor, relative_error
from spearfish.compress.refit import refit
from spearfish.errors import ShapeError, SpearfishError
from spearfish.reference import dequantize
from spearfish.scheme import QuantScheme


def problem(n: int = 32, k: int = 256, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight [n, k] and mean Hessian of inputs whose spectrum falls as exp(-i / (k / 8)), mixed by a rotation."""
    torch.manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(k, k)).Q
    x = torch.randn(4 * k, k) * torch.exp(-torch.arange(k) / (k / 8)) @ rotation
    hessian = Hessian(k, equal_norm=False)
    hessian.add(x)
    return torch.randn(n, k) / k**0.5, hessian.mean()


def test_hessian_is_the_sum_of_outer_products() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 50, 12).double() * 10 ** torch.linspace(-2, 2, 12).double()
    plain, equal = Hessian(12, equal_norm=False), Hessian(12)
    for part in x:
        plain.add(part.float())
        equal.add(part.float())
    flat = x.flatten(0, 1)
    same = flat / flat.norm(dim=1, keepdim=True) * 12**0.5
    for hessian, tokens in ((plain, flat), (equal, same)):
        wanted = tokens.T @ tokens / 150
        size = wanted.diagonal().sqrt()
        assert ((hessian.mean().double() - wanted) / size / size[:, None]).abs().max() < 1e-6


def test_tokens_that_are_not_finite_are_left_out_and_counted() -> None:
    x = torch.ones(10, 4)
    x[3, 1], x[7, 0] = float("inf"), float("nan")
    hessian = Hessian(4, equal_norm=False)
    hessian.add(x)
    assert (hessian.tokens, hessian.skipped) == (8, 2)
    torch.testing.assert_close(hessian.mean("q_proj"), torch.ones(4, 4))
    hessian.add(torch.full((20, 4), float("nan")))
    with pytest.raises(SpearfishError, match=r"q_proj: 22 of 30 .*float32 or bfloat16"):
        hessian.mean("q_proj")


def test_inverse_factor_against_float64() -> None:
    _, h = problem()
    damped = h + 0.01 * h.diagonal().mean() * torch.eye(256)
    u = inverse_factor(damped).double()
    assert torch.equal(u, u.triu())
    torch.testing.assert_close(u.T @ u @ damped.double(), torch.eye(256).double(), rtol=0, atol=2e-3)


def test_low_level_factor_refuses_and_names_the_index() -> None:
    h = torch.eye(6)
    h[2, 2] = 0
    with pytest.raises(ShapeError, match="index 2"):
        inverse_factor(h)
    h[2, 2] = float("inf")
    with pytest.raises(ShapeError, match="row 2"):
        inverse_factor(h)


def test_dead_inputs_lose_their_weights_and_are_reported() -> None:
    w, h = problem(8, 64)
    h[5], h[:, 5] = 0, 0
    solved = methods.Problem.of(w, h, QuantScheme(4, 32))
    assert solved.factor.remark == "1 inputs are always zero"
    assert solved.factor.dead.nonzero().flatten().tolist() == [5]
    assert dequantize(methods.sparsegpt(solved))[:, 5].abs().max() == 0


def test_ten_samples_of_a_wide_layer_need_more_damping_or_not_but_finish() -> None:
    torch.manual_seed(0)
    hessian = Hessian(256)
    hessian.add(torch.randn(10, 256))
    factor = factorise(hessian.mean())
    assert not factor.diagonal and factor.damping >= DAMPING
    # Not even symmetric positive: minus the identity next to a large diagonal makes every small damping fail.
    bad = torch.full((8, 8), 3.0).fill_diagonal_(1.0)
    grown = factorise(bad)
    assert grown.damping > DAMPING and "damping grown" in str(grown.remark)
    hopeless = factorise(torch.full((8, 8), 1000.0).fill_diagonal_(1.0))
    assert hopeless.diagonal and "only its diagonal" in str(hopeless.remark)


def truth_sweep(w: torch.Tensor, h: torch.Tensor, mask: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """GPTQ as its paper states it: row by row, column by column, the inverse of the remaining Hessian recomputed."""
    out = torch.zeros_like(w)
    k = w.shape[1]
    for row in range(w.shape[0]):
        left = w[row].clone()
        for j in range(k):
            inverse = torch.linalg.inv(h[j:, j:])
            value = left[j]
            if scales is not None:
                value = (value / scales[row, j]).round().clamp(-8, 7) * scales[row, j]
            value = value * mask[row, j]
            out[row, j] = value
            left[j:] -= (left[j] - value) / inverse[0, 0] * inverse[:, 0]
    return out


@pytest.mark.parametrize("rounded", [True, False])
def test_sweep_against_the_papers_slow_form(rounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obs, "BLOCK", 16)  # so that the update across blocks is part of it
    w, h = (t.double() for t in problem(6, 48))
    h += 0.05 * h.diagonal().mean() * torch.eye(48)
    mask = sparse24.magnitude_mask(w.abs())
    scales = torch.full_like(w, 0.05) if rounded else None
    got, _ = obs.sweep(
        w.T.contiguous(), inverse_factor(h), mask=mask.T.contiguous(), scales=None if scales is None else scales.T
    )
    torch.testing.assert_close(got.T, truth_sweep(w, h, mask, scales), rtol=1e-6, atol=1e-9)


def test_pairs_are_the_cheapest_of_all_six() -> None:
    torch.manual_seed(1)
    root = torch.randn(4, 4).double()
    h = root @ root.T + 0.1 * torch.eye(4)
    w = torch.randn(4, 50).double()
    kept = obs.cheapest_pairs(w, inverse_factor(h))
    for column in range(50):
        costs = {}
        for pair in obs.PAIRS:
            rest = [i for i in range(4) if i not in pair]
            # Best values for the two kept: least squares with the others at zero.
            best = torch.linalg.solve(h[rest][:, rest], h[rest] @ w[:, column])
            left = w[:, column].clone()
            left[rest] -= best
            costs[pair] = float(left @ h @ left)
        pruned = tuple((~kept[:, column]).nonzero().flatten().tolist())
        assert costs[pruned] == pytest.approx(min(costs.values()), rel=1e-9)


def test_the_pattern_holds_after_every_block_and_is_lost_without_a_mask() -> None:
    w, h = problem(64, 512)
    inverse = inverse_factor(h + 0.01 * h.diagonal().mean() * torch.eye(512))
    sparse, mask = obs.sweep(w.T.contiguous(), inverse, choose_mask=True)
    scales = torch.full((512, 64), 0.03)
    seen = []

    def look(end: int, values: torch.Tensor) -> None:
        seen.append(end)
        assert not sparse24.violations(values[:end].T.contiguous()).any()

    kept, _ = obs.sweep(sparse, inverse, mask=mask, scales=scales, after_block=look)
    assert seen == [128, 256, 384, 512]
    assert not kept[~mask].any()
    lost, _ = obs.sweep(sparse, inverse, scales=scales)
    assert sparse24.violations(lost.T.contiguous()).float().mean() > 0.05


def test_quads_stay_together_in_the_visiting_order() -> None:
    _, h = problem(1, 64)
    order = obs.quad_order(h).reshape(-1, 4)
    assert torch.equal(order, order[:, :1] // 4 * 4 + torch.arange(4))
    loud = h.diagonal().reshape(-1, 4).sum(1)[order[:, 0] // 4]
    assert (loud.diff() <= 0).all()


def test_refit_reaches_the_normal_equations() -> None:
    w, h = (t.double() for t in problem(6, 32))
    h += 0.05 * h.diagonal().mean() * torch.eye(32)
    mask = sparse24.magnitude_mask(w.abs())
    got = refit(w, w * mask, mask, h, steps=60)
    for row in range(6):
        on = mask[row].nonzero().flatten()
        wanted = torch.linalg.solve(h[on][:, on], h[on] @ w[row])
        torch.testing.assert_close(got[row, on], wanted, rtol=1e-5, atol=1e-7)
    assert not got[~mask].any()


@given(st.integers(0, 1000), st.booleans(), st.booleans())
@settings(max_examples=20, deadline=None)
def test_descent_never_rises_and_keeps_pattern_and_grid(seed: int, rounded: bool, free: bool) -> None:
    w, h = problem(8, 32, seed)
    h += 0.01 * h.diagonal().mean() * torch.eye(32)
    mask = sparse24.magnitude_mask(w.abs())
    scales = torch.full((32, 8), 0.05) if rounded else None
    start = (w * mask).T
    if scales is not None:
        start = (start / scales).round().clamp(-8, 7) * scales
    values, kept = descend(
        w.T.contiguous(), start.contiguous(), mask.T.contiguous(), h, scales, sweeps=2, free_mask=free
    )
    before, after = relative_error(w, start.T, h), relative_error(w, values.T, h)
    assert after <= before * (1 + 1e-5)
    assert kept is not None and torch.equal(values != 0, (values != 0) & kept)
    assert (kept.T.reshape(8, -1, 4).sum(-1) == 2).all()
    if not free:
        assert torch.equal(kept, mask.T)
    if scales is not None:
        torch.testing.assert_close(values / scales, (values / scales).round(), rtol=0, atol=1e-4)


def test_nearest_two_and_the_admm_mask() -> None:
    w, h = problem(16, 64)
    assert torch.equal(nearest_two(w), sparse24.magnitude_mask(w.abs()))
    factor = factorise(h)
    mask = admm_mask(w, factor.damped)
    assert (mask.reshape(16, -1, 4).sum(-1) == 2).all()
    swept, by_sweep = obs.sweep(w.T.contiguous(), factor.inverse, choose_mask=True)
    assert by_sweep is not None
    better = refit(w, w, mask, factor.damped)
    assert relative_error(w, better, h) < 0.9 * relative_error(w, swept.T, h)


def test_methods_are_ordered_as_published() -> None:
    w, h = problem(64, 512)
    scheme = QuantScheme(4, 128)
    errors = {}
    for name, method in methods.METHODS.items():
        solved = methods.Problem.of(w, h, scheme if method.prunes else QuantScheme(4, 128, sparsity="dense"))
        weight = method.solve(solved)
        weight.check(name)
        errors[name] = relative_error(w, dequantize(weight), h)
    assert errors["magnitude"] > errors["wanda"] > 1.1 * errors["sparsegpt"]
    assert errors["sparsegpt"] > 1.05 * errors["joint"] and errors["joint"] > errors["admm"]
    assert errors["rtn"] > 1.5 * errors["gptq"]


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("group", [None, 64, 96])
def test_every_scheme_packs_what_was_solved(bits: int, group: int | None) -> None:
    w, h = problem(16, 160)  # 160 leaves a short last group for 64 and 96
    scheme = QuantScheme(bits, None if bits == 16 else group)
    solved = methods.Problem.of(w, h, scheme)
    weight = methods.joint(solved)
    weight.check()
    assert (weight.n, weight.k) == (16, 160)
    values = dequantize(weight)
    assert not sparse24.violations(values).any()
    naive = relative_error(w, dequantize(methods.magnitude(solved)), h)
    assert relative_error(w, values, h) < 0.8 * naive


def test_scale_search_beats_the_largest_magnitude_and_survives_fp16() -> None:
    torch.manual_seed(0)
    w = torch.randn(32, 256)
    w[:, 17] *= 8  # one outlier per group: clipping it pays
    scheme = QuantScheme(4, 128, sparsity="dense")
    errors = []
    for search in (False, True):
        scales = grid.find_scales(w, scheme, search=search)
        assert torch.equal(scales, scales.half().float())
        wide = grid.scale_of_columns(scales, scheme, 256)
        q = (w / wide).round().clamp(-8, 7) * wide
        errors.append(float((w - q).square().sum()))
    assert errors[1] < 0.95 * errors[0]
    zero = grid.find_scales(torch.zeros(2, 256), scheme)
    assert (zero > 0).all() and (zero.half() > 0).all()


def test_weights_whose_width_is_no_multiple_of_four_are_refused_for_2_4() -> None:
    with pytest.raises(ShapeError, match="multiple of 4"):
        methods.Problem.of(torch.randn(4, 30), torch.eye(30), QuantScheme(4))
    dense = methods.Problem.of(torch.randn(4, 30), torch.eye(30), QuantScheme(4, sparsity="dense"))
    assert methods.METHODS["gptq"].solve(dense).k == 30
