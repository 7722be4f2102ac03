"""Tokens in two launches: when that is chosen, and that the two make one product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from spearfish.bench.explain import explain
from spearfish.bench.problems import Point, parse_scheme
from spearfish.kernels.choose import choose
from spearfish.kernels.config import CHIPS, Bound, Family, Problem
from spearfish.kernels.parts import PARTS, InTwo, families_of

H200 = CHIPS["sm_90"]


def problem(m: int, n: int = 8192, k: int = 28672, **more: bool) -> Problem:
    return Problem("int4_24", False, m, n, k, 1, False, **more)


@pytest.mark.parametrize(("m", "first"), [(257, 256), (300, 256), (520, 512)])
def test_tokens_just_beyond_whole_blocks_go_in_two(m: int, first: int) -> None:
    family, way = choose(problem(m), H200)
    assert family is PARTS
    assert way.tokens == first
    in_one, config = choose(problem(m), H200, "hopper")
    assert PARTS.microseconds(way, problem(m), H200) < in_one.microseconds(config, problem(m), H200)
    # Each part is what would have been chosen for so many tokens alone.
    for *chosen, part in way.parts(problem(m)):
        assert choose(part, H200) == tuple(chosen)
    assert [tuple(chosen) for *chosen, _ in way.parts(problem(m))] == [way.first, way.rest]
    assert [part.m for *_, part in way.parts(problem(m))] == [first, m - first]
    assert [part.name for part in families_of(family, way)] == ["hopper", "hopper"]
    assert families_of(*way.first) == [way.first[0]]


@pytest.mark.parametrize("m", [1, 64, 128, 256, 384, 1000, 1024, 4096])
def test_whole_blocks_stay_whole(m: int) -> None:
    assert choose(problem(m), H200)[0] is not PARTS


def test_one_order_of_sums_or_one_family_means_one_launch() -> None:
    assert choose(problem(300, batch_invariant=True), H200)[0] is not PARTS
    for name in ("hopper", "portable", "unpack"):
        assert choose(problem(300), H200, name)[0].name == name


def test_both_parts_are_explained() -> None:
    lines = explain(Point(28672, 8192, 300, "fp16", parse_scheme("int4-g128")), H200).splitlines()
    (chosen,) = [line for line in lines if line.endswith(" chosen |")]
    assert "in two: 256 tokens by hopper: " in chosen
    assert "; then the rest by hopper: " in chosen


@dataclass(frozen=True)
class _Dense:
    """A family of one kernel that multiplies with a dense weight, for as many tokens as it is bound for."""

    name: str = "dense"

    def microseconds(self, config: Any, problem: Problem, chip: Any) -> float:
        return float(problem.m)

    def bind(self, config: Any, problem: Problem, device: int) -> Bound:
        def run(
            x: torch.Tensor,
            stream: torch.Tensor,
            column_scale: torch.Tensor | None,
            bias: torch.Tensor | None,
            out: torch.Tensor,
        ) -> None:
            assert x.shape == (problem.m, problem.k)
            assert out.shape == (problem.m, problem.n)
            assert column_scale is not None
            assert bias is not None
            out.copy_(x @ stream.T * column_scale + bias)

        return run


def test_the_two_make_one_product() -> None:
    make = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 16, generator=make), torch.randn(8, 16, generator=make)
    scale, bias = torch.rand(8, generator=make), torch.randn(8, generator=make)
    asked = Problem("int4_24", False, 7, 8, 16, 1, False)
    dense = cast(Family, _Dense())
    way = InTwo(4, (dense, None), (dense, None))
    assert PARTS.microseconds(way, asked, H200) > 7
    out = torch.full((7, 1, 8), float("nan"))  # as for x with more dimensions
    PARTS.bind(way, asked, 0)(x, weight, scale, bias, out)
    torch.testing.assert_close(out[:, 0], x @ weight.T * scale + bias)
