"""What the GPU tests share: random weights, the float64 truth, and one tolerance that follows from rounding."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from spearfish import reference, sparse24
from spearfish.kernels.choose import all_variants
from spearfish.kernels.jit import architecture, compile_variant
from spearfish.scheme import QuantScheme, QuantWeight

# Half a unit in the last place, relative: what one rounding to the dtype may change.
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def random_weight(
    scheme: QuantScheme,
    n: int,
    k: int,
    dtype: torch.dtype,
    seed: int = 0,
    extreme: bool = False,
    device: str = "cuda",
) -> QuantWeight:
    """A weight [n, k] with every code, place and zero point equally likely; `extreme`: only the ends."""
    make = torch.Generator(device=device).manual_seed(seed)

    def integers(high: int, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        if extreme:
            return (torch.randint(2, shape, generator=make, device=device) * (high - 1)).to(kind)
        return torch.randint(high, shape, generator=make, device=device).to(kind)

    columns = k // 2 if scheme.is_sparse else k
    positions = None
    if scheme.is_sparse:
        legal = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8, device=device)
        positions = legal[torch.randint(6, (n, k // 4), generator=make, device=device)]
    if scheme.bits == 16:
        values = torch.randn((n, columns), generator=make, device=device) / 30
        return QuantWeight(scheme, values.to(dtype), positions=positions)
    groups = scheme.groups(k)
    scales = (0.5 + torch.rand((n, groups), generator=make, device=device)) / (30 << (scheme.bits - 3))
    zeros = None if scheme.symmetric else integers((1 << scheme.bits) + 1, (n, groups), torch.int16)
    return QuantWeight(
        scheme, integers(1 << scheme.bits, (n, columns), torch.uint8), scales.to(dtype), positions, zeros
    )


@dataclass(frozen=True)
class Expected:
    """The float64 product [m, n], and how far each element may be from it. `unit` is one rounding to the dtype.

    Every element: the weight is rounded once (|x| |w| u), float32 sums may lose k roundings of 2**-24, the result is
    rounded once. As a whole: these errors are independent, so that their norm stays below one rounding of the norm.
    (Uniform errors have a root mean square of u / sqrt(3) at most; there are two.)
    """

    truth: torch.Tensor
    allowed: torch.Tensor
    unit: float

    def check(self, y: torch.Tensor) -> None:
        got = y.double().reshape(self.truth.shape)
        assert got.isfinite().all(), f"{int((~got.isfinite()).sum())} of {got.numel()} results are not finite"
        wrong = (got - self.truth).abs() > self.allowed
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {wrong.nonzero()[0].tolist()}"
        if got.numel() >= 1000:  # a norm over a few results is no average
            error = float((got - self.truth).norm() / self.truth.norm())
            assert error < self.unit, f"relative error {error:.2e}"


def expect(x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None = None) -> Expected:
    """What x [..., k] times the dequantised weight [n, k] (float64), transposed, must give."""
    unit = ROUNDING[x.dtype]
    wide = x.double().reshape(-1, x.shape[-1])
    truth, size = wide @ dense.T, wide.abs() @ dense.abs().T
    if bias is not None:
        truth, size = truth + bias.double(), size + bias.double().abs()
    return Expected(truth, size * (unit + x.shape[-1] * 2.0**-24) * 1.01 + truth.abs() * unit + 1e-7, unit)


def check(y: torch.Tensor, x: torch.Tensor, weight: QuantWeight, bias: torch.Tensor | None = None) -> None:
    """Compare y with the float64 product."""
    expect(x, reference.dequantize(weight, torch.float64), bias).check(y)


def compile_all() -> str:
    """Compile every kernel that this GPU may use, a compiler for each core, and say how many in what time. One after
    another at their first use they take many times as long."""
    started, variants = time.perf_counter(), all_variants(architecture(0))
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        binaries = list(workers.map(compile_variant, variants))
    fresh = sum(binary.seconds > 0 for binary in binaries)
    return f"{len(binaries)} kernels, {fresh} compiled, {time.perf_counter() - started:.0f} s"
