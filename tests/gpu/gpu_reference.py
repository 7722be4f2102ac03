"""What the GPU tests share: random weights, the float64 truth, and one tolerance that follows from rounding."""

from __future__ import annotations

import torch

from spearfish import reference, sparse24
from spearfish.scheme import QuantScheme, QuantWeight

# Half a unit in the last place, relative: what one rounding to the dtype may change.
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def random_weight(
    scheme: QuantScheme, n: int, k: int, dtype: torch.dtype, seed: int = 0, extreme: bool = False
) -> QuantWeight:
    """A weight [n, k] on the GPU with every code, place and zero point equally likely; `extreme`: only the ends."""
    make = torch.Generator(device="cuda").manual_seed(seed)

    def integers(high: int, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        if extreme:
            return (torch.randint(2, shape, generator=make, device="cuda") * (high - 1)).to(kind)
        return torch.randint(high, shape, generator=make, device="cuda").to(kind)

    columns = k // 2 if scheme.is_sparse else k
    positions = None
    if scheme.is_sparse:
        legal = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8, device="cuda")
        positions = legal[torch.randint(6, (n, k // 4), generator=make, device="cuda")]
    if scheme.bits == 16:
        values = torch.randn((n, columns), generator=make, device="cuda") / 30
        return QuantWeight(scheme, values.to(dtype), positions=positions)
    groups = scheme.groups(k)
    scales = (0.5 + torch.rand((n, groups), generator=make, device="cuda")) / (30 << (scheme.bits - 3))
    zeros = None if scheme.symmetric else integers((1 << scheme.bits) + 1, (n, groups), torch.int16)
    return QuantWeight(
        scheme, integers(1 << scheme.bits, (n, columns), torch.uint8), scales.to(dtype), positions, zeros
    )


def check(y: torch.Tensor, x: torch.Tensor, weight: QuantWeight, bias: torch.Tensor | None = None) -> None:
    """Compare y with the float64 product.

    Every element: the weight is rounded once (|x| |w| u), float32 sums may lose k roundings of 2**-24, the result is
    rounded once. As a whole: these errors are independent, so that their norm stays below one rounding of the norm.
    (Uniform errors have a root mean square of u / sqrt(3) at most; there are two.)
    """
    unit = ROUNDING[x.dtype]
    dense = reference.dequantize(weight, torch.float64)
    wide = x.double().reshape(-1, x.shape[-1])
    truth, size = wide @ dense.T, wide.abs() @ dense.abs().T
    if bias is not None:
        truth, size = truth + bias.double(), size + bias.double().abs()
    got = y.double().reshape(truth.shape)
    assert got.isfinite().all(), f"{int((~got.isfinite()).sum())} of {got.numel()} results are not finite"
    allowed = size * (unit + weight.k * 2.0**-24) * 1.01 + truth.abs() * unit + 1e-7
    wrong = (got - truth).abs() > allowed
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {wrong.nonzero()[0].tolist()}"
    if truth.numel() >= 1000:  # a norm over a few results is no average
        error = float((got - truth).norm() / truth.norm())
        assert error < unit, f"relative error {error:.2e}"
