"""The kernels' arithmetic in plain torch, bit for bit where it is defined, and inputs that are as bad as can be for it.

`python tests/emulation.py` prints the table of docs/numerics.md. Definitions there: u is half a unit in the last place
of the activations' dtype, S = sum |x| |w|, and every error is a share of S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from spearfish import reference, sparse24
from spearfish.scheme import QuantScheme, QuantWeight

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
FLOOR = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}  # half the smallest step of the dtype
# What a tensor core may lose with each product that it adds: it cuts off instead of rounding, at 24 bits or more.
ADD = 2.0**-23


@dataclass(frozen=True)
class Kind:
    """A kind of weight in the kernels' eyes: what is rounded on the way to a product."""

    scheme: QuantScheme
    scales: torch.dtype = torch.float16

    def __str__(self) -> str:
        kept = f"{self.scheme}" if self.scheme.bits != 16 else "16-bit 2:4"
        return kept if self.scheme.bits == 16 else f"{kept}, {str(self.scales).removeprefix('torch.')} scales"

    def weight_error(self, dtype: torch.dtype) -> float:
        """Most that a weight may be wrong by, as a share of itself (above the dtype's floor)."""
        u = UNIT[dtype]
        if self.scheme.bits == 16:
            return 0.0 if self.scales == dtype else u  # here: the dtype of the values
        if self.scheme.group_size is None and self.scheme.symmetric:
            return 0.0  # codes are exact; the scale multiplies the float32 sum
        # Eight bits of a bfloat16 scale times three of a symmetric 4-bit code are at most eleven: float16 holds them.
        short = self.scales == torch.bfloat16 and dtype == torch.float16 and self.scheme.bits == 4
        product = 0.0 if short and self.scheme.symmetric else u
        exact = self.scales == dtype or (self.scales == torch.bfloat16 and dtype == torch.float16)
        return product if exact else (1 + u) ** 2 - 1

    def bound(self, dtype: torch.dtype, k: int) -> float:
        """Most that a result may be wrong by, as a share of S: weights, float32 sums, the result's own rounding."""
        weight, sums = self.weight_error(dtype), k * ADD
        scale = 2 * 2.0**-24 if self.scheme.group_size is None and self.scheme.bits != 16 else 0.0
        return (1 + weight) * (1 + sums) * (1 + scale) * (1 + UNIT[dtype]) - 1


KINDS = [
    Kind(QuantScheme(bits, group, symmetric, sparsity), scales)
    for sparsity in ("2:4", "dense")
    for bits in (4, 8)
    for group, symmetric in ((128, True), (128, False), (None, True))
    for scales in (torch.float16, torch.bfloat16)
] + [Kind(QuantScheme(16)), Kind(QuantScheme(16), torch.bfloat16)]


# ------------------------------------------------------------------------------------------------ unpacking


def _or(bits: torch.Tensor, base: int, dtype: torch.dtype) -> torch.Tensor:
    """Bits OR-ed into the mantissa of a number, read as 16-bit floats: `mask_or` of common.cuh."""
    return (bits.to(torch.int32) | base).to(torch.int16).view(dtype)


def _rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One rounding to nearest even of a value that float64 holds exactly: what `fma.rn` does."""
    # float64 to float32 to 16 bits would round twice if the first step were not exact; both are for these operands.
    single = value.to(torch.float32)
    if not torch.equal(single.double(), value):
        raise ValueError("this value would be rounded twice")
    return single.to(dtype)


def unpack(codes: torch.Tensor, zeros: torch.Tensor | None, bits: int, dtype: torch.dtype, high: bool) -> torch.Tensor:
    """code - zero point as the kernels make it, in `dtype`; `high`: as for the rows gq + 8 of a fragment."""
    bf16 = dtype == torch.bfloat16
    value: torch.Tensor

    def offset(symmetric: float, bias: float) -> torch.Tensor:
        if zeros is None:
            return torch.full(codes.shape, symmetric, dtype=torch.float64)
        return _rounded(bias - zeros.double(), dtype).double()

    if bits == 4 and bf16:
        value = _or(codes, 0x4300, dtype).double() + offset(-136, -128)
    elif bits == 4 and high:
        value = _or(codes.to(torch.int32) << 4, 0x6400, dtype).double() / 16 + offset(-72, -64)
    elif bits == 4:
        value = _or(codes, 0x6400, dtype).double() + offset(-1032, -1024)
    elif bf16:
        top = (codes & 128) == 0
        minus = torch.where(top, -256.0, -128.0).double()
        value = _rounded(_or(codes & 127, 0x4300, dtype).double() + minus, dtype).double() + offset(0, 128)
    else:
        value = _or(codes, 0x6400, dtype).double() + offset(-1152, -1024)
    return _rounded(value, dtype)


def weights(weight: QuantWeight, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The values [n, k] that the tensor cores multiply, and the float32 scale [n] of the sums, or None."""
    scheme = weight.scheme
    column = None
    if scheme.bits == 16:
        values = weight.codes.to(dtype)
    else:
        index = weight.group_of_k().expand(weight.n, -1)
        if weight.positions is not None:
            index = index.gather(1, sparse24.kept_columns(weight.positions))
        zeros = None if weight.zeros is None else weight.zeros.gather(1, index)
        values = unpack(weight.codes, zeros, scheme.bits, dtype, high=False)
        assert weight.scales is not None
        if weight.groups == 1 and scheme.symmetric:
            column = weight.scales[:, 0].float()
        else:
            scales = weight.scales.to(dtype).gather(1, index)
            values = _rounded(values.double() * scales.double(), dtype)
    if weight.positions is not None:
        values = sparse24.expand(values, weight.positions)
    return values, column


def _cut(value: torch.Tensor) -> torch.Tensor:
    """float64 to the float32 grid towards zero, as a tensor core's adder cuts off."""
    single = value.to(torch.float32)
    over = single.double().abs() > value.abs()
    return torch.where(over, torch.nextafter(single, torch.zeros_like(single)), single).double()


def matmul(x: torch.Tensor, weight: QuantWeight) -> torch.Tensor:
    """y [m, n] in x's dtype. One instruction adds 32 (2:4) or 16 (dense) k to the float32 sum; inside it the products
    are exact and their sum is cut off once, after it the sum."""
    values, column = weights(weight, x.dtype)
    step = 32 if weight.scheme.is_sparse else 16
    total = torch.zeros(x.shape[0], weight.n, dtype=torch.float64)
    for k in range(0, weight.k, step):
        total = _cut(total + _cut(x[:, k : k + step].double() @ values[:, k : k + step].double().T))
    if column is not None:
        total = (total * column.double()).to(torch.float32).double()
    return total.to(torch.float32).to(x.dtype)


# ------------------------------------------------------------------------------------------------ the worst inputs


@cache
def worst_pair(kind: Kind, dtype: torch.dtype, sign: int) -> tuple[int, float]:
    """The code and the scale in [1, 2) / 1024 whose product the kernels round worst upwards (sign 1) or downwards: all
    codes times all scales of that binade."""
    bits = kind.scheme.bits
    mantissas = 1 << (10 if kind.scales == torch.float16 else 7)
    scales = ((1 + torch.arange(mantissas) / mantissas) / 1024).to(kind.scales)
    codes = torch.arange(1 << bits, dtype=torch.uint8)
    q = codes.double() - (1 << (bits - 1))
    made = _rounded(q[:, None] * scales.to(dtype).double(), dtype).double()
    true = q[:, None] * scales.double()
    error = torch.where(true == 0, 0.0, (made - true) / true.abs().clamp(min=1e-30)) * sign * true.sign()
    code, scale = divmod(int(error.argmax()), mantissas)
    return int(codes[code]), float(scales[scale])


def attack(kind: Kind, dtype: torch.dtype, n: int, k: int, pattern: str, seed: int) -> tuple[torch.Tensor, QuantWeight]:
    """x [4, k] and a weight [n, k] made to be as wrong as possible.

    pattern: "aligned": every weight the worst pair, x of one sign, so that all errors add up. "cancel": large values
    that cancel, small ones in between, to lose them in the sum. "spread": magnitudes over the dtype's range. "random".
    """
    make = torch.Generator().manual_seed(seed)
    scheme, bits = kind.scheme, kind.scheme.bits
    columns = k // 2 if scheme.is_sparse else k
    positions = None
    if scheme.is_sparse:
        legal = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8)
        positions = legal[torch.randint(6, (n, k // 4), generator=make)]
    if bits == 16:
        values = (torch.randn((n, columns), generator=make) / 30).to(kind.scales)
        if pattern == "aligned":  # halfway between two values of the narrower dtype
            values = torch.full((n, columns), 1 + 2.0**-8 + 2.0**-10 if dtype == torch.bfloat16 else 1.5).to(
                kind.scales
            )
        weight = QuantWeight(scheme, values, positions=positions)
    else:
        groups = scheme.groups(k)
        codes = torch.randint(1 << bits, (n, columns), generator=make).to(torch.uint8)
        scales = ((1 + torch.rand((n, groups), generator=make)) / 1024).to(kind.scales)
        zeros = (
            None if scheme.symmetric else torch.randint((1 << bits) + 1, (n, groups), generator=make).to(torch.int16)
        )
        if pattern == "aligned":
            code, scale = worst_pair(kind, dtype, 1 if seed % 2 else -1)
            codes, scales = torch.full_like(codes, code), torch.full_like(scales, scale)
            zeros = None if zeros is None else torch.full_like(zeros, 1 << (bits - 1))
        weight = QuantWeight(scheme, codes, scales, positions, zeros)
    x = torch.randn((4, k), generator=make)
    if pattern == "aligned":
        x = x.abs() + 0.5
        x = x * reference.dequantize(weight)[0].sign()
    elif pattern == "cancel":
        x = x / 64
        x[:, ::32], x[:, 16::32] = 64.0, -64.0
    elif pattern == "spread":
        x = x * torch.exp2(torch.randint(-12, 5, (4, k), generator=make))
    return x.to(dtype), weight


PATTERNS = ("aligned", "cancel", "spread", "random")


def judge(x: torch.Tensor, weight: QuantWeight) -> Callable[[torch.Tensor], float]:
    """A function that tells the largest error of a y, as a share of S of its element, above the dtype's floor."""
    dense = reference.dequantize(weight, torch.float64)
    truth, size = x.double() @ dense.T, x.double().abs() @ dense.abs().T
    floor = FLOOR[x.dtype] * (1 + x.double().abs().sum(-1, keepdim=True) * (1 + (1 << weight.scheme.bits) % 65536))

    def error(y: torch.Tensor) -> float:
        return float((((y.double() - truth).abs() - floor).clamp(min=0) / size.clamp(min=1e-300)).max())

    return error


def error_of(y: torch.Tensor, x: torch.Tensor, weight: QuantWeight) -> float:
    """What `judge` says of one y."""
    return judge(x, weight)(y)


def search(kind: Kind, dtype: torch.dtype, k: int, tries: int) -> tuple[float, str]:
    """The largest error of the emulated kernel and the pattern that gave it."""
    found = (0.0, "")
    for pattern in PATTERNS:
        for seed in range(tries):
            x, weight = attack(kind, dtype, 8, k, pattern, seed)
            found = max(found, (error_of(matmul(x, weight), x, weight), pattern))
    return found


def main() -> None:
    torch.set_num_threads(1)
    print("| weight | activations | k | bound | worst found | share | by |\n|---|---|--:|--:|--:|--:|---|")
    for kind in KINDS:
        for dtype in UNIT:
            for k in (4096,):
                worst, pattern = search(kind, dtype, k, 12)
                bound = kind.bound(dtype, k)
                name = str(dtype).removeprefix("torch.")
                print(
                    f"| {kind} | {name} | {k} | {bound:.2e} | {worst:.2e} | {worst / bound:.0%} | {pattern} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
