"""The worst inputs of tests/emulation.py on the real kernels: errors stay under the bound derived in docs/numerics.md.

`python -m pytest tests/gpu/test_gpu_numerics.py --require-gpu -s` prints the worst by kind, dtype and family, as a
table for that page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from emulation import KINDS, PATTERNS, UNIT, Kind, attack, judge
from spearfish.kernels.choose import families
from spearfish.kernels.config import Problem, chip_of
from spearfish.kernels.matmul import prepare
from spearfish.kernels.prepare import PreparedWeight

ROWS = 64
DEPTHS = (128, 4096, 14336)
# For every family a number of tokens that it is made for: few, and as many as each can take.
TOKENS = (4, 72)
SEEDS = 2


@pytest.fixture(scope="module", autouse=True)
def exact_sums(compiled: None) -> Iterator[None]:
    """The library's product, with which the unpack family ends, may add parts in 16 bits unless it is told not to."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction
    flags.allow_fp16_reduced_precision_reduction = flags.allow_bf16_reduced_precision_reduction = False
    yield
    flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction = before


def problem_of(prepared: PreparedWeight, m: int) -> Problem:
    bf16 = prepared.dtype == torch.bfloat16
    return Problem(prepared.kind, bf16, m, prepared.n, prepared.k, prepared.granules, prepared.has_zeros)


def cheapest(family: Any, problem: Problem) -> Any:
    """The configuration that the chooser would take of this family, or None."""
    chip = chip_of(0)
    legal = [config for config in family.candidates(problem, chip) if family.why_not(config, problem, chip) is None]
    return min(legal, key=lambda config: family.microseconds(config, problem, chip), default=None)


def product(family: Any, config: Any, prepared: PreparedWeight, x: torch.Tensor) -> torch.Tensor:
    y = torch.full((len(x), prepared.n), float("nan"), dtype=x.dtype, device="cuda")
    family.bind(config, problem_of(prepared, len(x)), 0)(x, prepared.stream, prepared.column_scale, None, y)
    return y


def bound(kind: Kind, dtype: torch.dtype, k: int, family: str) -> float:
    """`Kind.bound`, and one rounding more where the unpack family rounds code times the scale of a row, which the other
    kernels multiply their sums with."""
    scheme = kind.scheme
    rounded = family == "unpack" and scheme.bits != 16 and scheme.group_size is None and scheme.symmetric
    return (1 + kind.bound(dtype, k)) * (1 + UNIT[dtype] * rounded) - 1


def spread(x: torch.Tensor, m: int) -> torch.Tensor:
    """[m, k] of the rows of x [4, k], again and again."""
    return x.repeat(m // 4, 1)


@pytest.mark.parametrize("dtype", tuple(UNIT), ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_input_is_found_beyond_the_bound(kind: Kind, dtype: torch.dtype) -> None:
    worst: dict[str, tuple[float, str]] = {}
    for k in DEPTHS:
        for pattern in PATTERNS:
            for seed in range(SEEDS):
                x, weight = attack(kind, dtype, ROWS, k, pattern, seed)
                x, weight = x.cuda(), weight.to("cuda")
                prepared = prepare(weight, dtype=dtype)
                assert prepared.stream is not None, prepared.path
                for m in TOKENS:
                    tokens = spread(x, m)
                    error_of = judge(tokens, weight)
                    for family in families():
                        config = cheapest(family, problem_of(prepared, m))
                        if config is None:
                            continue
                        error = error_of(product(family, config, prepared, tokens))
                        most = bound(kind, dtype, k, family.name)
                        assert error <= most, (family.name, str(config), k, pattern, seed, m)
                        found = error / most, f"{pattern}, k = {k}, m = {m}"
                        worst[family.name] = max(worst.get(family.name, (0.0, "")), found)
    for name, (share, by) in worst.items():
        print(f"| {kind} | {str(dtype).removeprefix('torch.')} | {name} | {share:.0%} | {by} |")
    assert {"portable", "unpack"} <= worst.keys()
    assert min(share for share, _ in worst.values()) > 0.1, "a search that finds nothing has not searched"


@pytest.mark.parametrize("dtype", tuple(UNIT), ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_configuration_on_the_worst_inputs(kind: Kind, dtype: torch.dtype) -> None:
    """Every shape of every family, k whole and in the most parts."""
    k, chip = 4096, chip_of(0)
    for pattern in ("aligned", "cancel"):
        x, weight = attack(kind, dtype, 128, k, pattern, 1)
        x, weight = x.cuda(), weight.to("cuda")
        prepared = prepare(weight, dtype=dtype)
        for m in (8, 16, 32, 64, 100):
            tokens, problem = spread(x, m), problem_of(prepared, m)
            error_of = judge(tokens, weight)
            for family in families():
                by_shape: dict[Any, list[Any]] = {}
                for config in family.candidates(problem, chip):
                    if family.why_not(config, problem, chip) is None:
                        by_shape.setdefault(getattr(config, "shape", config), []).append(config)
                for config in [c for same in by_shape.values() for c in dict.fromkeys((same[0], same[-1]))]:
                    error = error_of(product(family, config, prepared, tokens))
                    assert error <= bound(kind, dtype, k, family.name), (family.name, str(config), pattern, m)
