"""How wrong a result may be: the unpacking of the kernels, every code and scale, and a search for the worst inputs."""

from __future__ import annotations

import pytest
import torch

from emulation import ADD, KINDS, UNIT, Kind, attack, error_of, matmul, search, unpack, weights, worst_pair
from spearfish import reference
from spearfish.scheme import QuantScheme

DTYPES = tuple(UNIT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("high", [False, True])
def test_unpacking_is_exact(bits: int, dtype: torch.dtype, high: bool) -> None:
    """Every code with every zero point: nothing is rounded before the scale."""
    codes = torch.arange(1 << bits, dtype=torch.uint8)
    plain = unpack(codes, None, bits, dtype, high)
    assert torch.equal(plain.double(), codes.double() - (1 << (bits - 1)))
    zeros = torch.arange((1 << bits) + 1)
    grid = unpack(codes[:, None].expand(-1, len(zeros)), zeros.expand(len(codes), -1), bits, dtype, high)
    assert torch.equal(grid.double(), codes[:, None].double() - zeros)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_weights_are_rounded_as_often_as_said(kind: Kind, dtype: torch.dtype) -> None:
    worst = 0.0
    for seed in range(6):
        _, weight = attack(kind, dtype, 16, 512, ("aligned", "random")[seed // 3], seed)
        made, column = weights(weight, dtype)
        values = made.double() if column is None else made.double() * column.double()[:, None]
        truth = reference.dequantize(weight, torch.float64)
        # Values of random 16-bit weights reach below the normal numbers of float16, where the step is fixed.
        wrong = ((values - truth).abs() - 2.0**-25).clamp(min=0) / truth.abs().clamp(min=1e-300)
        worst = max(worst, float(wrong.max()))
    bound = kind.weight_error(dtype)
    assert worst <= bound
    if bound and kind.scheme.bits != 16:
        assert worst > 0.9 * UNIT[dtype], "the worst pair comes near the bound of one rounding"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_input_is_found_beyond_the_bound(kind: Kind, dtype: torch.dtype) -> None:
    k = 512
    worst, pattern = search(kind, dtype, k, 3)
    assert worst <= kind.bound(dtype, k), pattern
    assert worst > 0.25 * UNIT[dtype], "a search that finds nothing has not searched"


def test_the_bound_would_notice_one_more_rounding() -> None:
    """A kernel that rounded its sums to 16 bits between instructions must fail."""
    kind, dtype = Kind(QuantScheme(4, 128)), torch.float16
    x, weight = attack(kind, dtype, 8, 4096, "aligned", 0)
    values, _ = weights(weight, dtype)
    total = torch.zeros(4, 8, dtype=dtype)
    for k in range(0, 4096, 32):
        total = (total.double() + x[:, k : k + 32].double() @ values[:, k : k + 32].double().T).to(dtype)
    assert error_of(total, x, weight) > kind.bound(dtype, 4096) > error_of(matmul(x, weight), x, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_worst_pair_is_the_worst(dtype: torch.dtype) -> None:
    """Against a plain loop over all codes and scales of one binade."""
    kind = Kind(QuantScheme(4, 128))
    code, scale = worst_pair(kind, dtype, 1)

    def growth(code: int, scale: float) -> float:
        true = abs(code - 8) * scale
        made = torch.tensor(abs(code - 8) * float(torch.tensor(scale).to(dtype)), dtype=torch.float32).to(dtype)
        return (float(made) - true) / true

    found = growth(code, scale)
    assert 0.9 * UNIT[dtype] < found
    for i in range(0, 1024, 3):
        for other in range(16):
            if other != 8:
                assert growth(other, (1 + i / 1024) / 1024) <= found + 1e-12


def test_the_bound_of_the_sums_is_small_beside_a_rounding() -> None:
    """Up to the longest rows of the models in the benchmarks."""
    assert UNIT[torch.float16] / ADD == 4096 and UNIT[torch.bfloat16] / ADD > 29568
