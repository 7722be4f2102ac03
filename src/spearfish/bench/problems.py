"""What is measured: layers [k, n], tokens m, a dtype, a scheme; and the random weights that stand for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from spearfish import reference, sparse24
from spearfish.errors import UnsupportedError
from spearfish.formats import transforms
from spearfish.scheme import QuantScheme, QuantWeight

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

# k x n of each layer, the most telling first: a run that ends early has measured those.
SHAPE_SETS: dict[str, tuple[tuple[int, int], ...]] = {
    "nine": (
        (4096, 4096),
        (8192, 8192),
        (4096, 28672),
        (14336, 4096),
        (28672, 8192),
        (7168, 7168),
        (8192, 57344),
        (20480, 7168),
        (7168, 40960),
    ),
    # An 8B model with q, k, v in one layer and gate, up in one.
    "8b": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
}
# All m of the large tables, again the most telling first. `passes` takes four at a time through all shapes.
TOKENS = (1, 16, 64, 256, 32, 128, 1024, 4096, 8, 512, 2048, 8192, 2, 4)
_PASS = 4


@dataclass(frozen=True)
class Point:
    """One measurement: m tokens times a weight [n, k] of some scheme, activations of some dtype."""

    k: int
    n: int
    m: int
    dtype: str
    scheme: QuantScheme

    def __str__(self) -> str:
        return f"{self.k} x {self.n}, m = {self.m}, {scheme_name(self.scheme)}, {self.dtype}"

    @property
    def flops(self) -> int:
        """Operations of the dense product; a 2:4 kernel does half of them."""
        return 2 * self.m * self.n * self.k

    @property
    def weight_bytes(self) -> int:
        """The fewest bytes that hold the weight."""
        return weight_bytes(self.n, self.k, self.scheme)

    @property
    def bytes(self) -> int:
        """The fewest bytes to move: weight, x and y once each."""
        return self.weight_bytes + 2 * self.m * (self.k + self.n)


def weight_bytes(n: int, k: int, scheme: QuantScheme) -> int:
    """Codes, four bits for each quad of a 2:4 weight, and 16-bit scales (and zero points of the codes' width)."""
    values = n * k // 2 if scheme.is_sparse else n * k
    positions = n * k // 8 if scheme.is_sparse else 0
    groups = 0 if scheme.bits == 16 else n * scheme.groups(k)
    zeros = 0 if scheme.symmetric else groups * scheme.bits // 8
    return values * scheme.bits // 8 + positions + 2 * groups + zeros


# ------------------------------------------------------------------------------------------------------- from words

_SCHEME = re.compile(r"(dense-)?int([48])(?:-(g\d+|channel))?(-asym)?$")


def parse_scheme(text: str) -> QuantScheme:
    """ "int4-g128", "int8-channel", "dense-int4-g64-asym", "f16"; without a group, g128.

    Raises UnsupportedError.
    """
    if text == "f16":
        return QuantScheme(16)
    found = _SCHEME.match(text)
    if not found:
        raise UnsupportedError(
            f"scheme {text!r} is not known; such as int4-g128, int8-channel, dense-int4-g128, int4-g64-asym, f16"
        )
    dense, bits, group, asymmetric = found.groups()
    size = None if group == "channel" else int((group or "g128")[1:])
    return QuantScheme(int(bits), size, not asymmetric, "dense" if dense else "2:4")


def scheme_name(scheme: QuantScheme) -> str:
    """The word that `parse_scheme` reads."""
    if scheme.bits == 16:
        return "f16"
    group = "channel" if scheme.group_size is None else f"g{scheme.group_size}"
    return f"{'' if scheme.is_sparse else 'dense-'}int{scheme.bits}-{group}{'' if scheme.symmetric else '-asym'}"


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """The layers of a set's name, or of "4096x28672" (k x n). Raises UnsupportedError."""
    if text in SHAPE_SETS:
        return SHAPE_SETS[text]
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if not found or int(found[1]) % 4 or not int(found[1]) or not int(found[2]):
        raise UnsupportedError(
            f"{text!r} is neither a set of shapes ({', '.join(SHAPE_SETS)}), nor k x n such as 4096x28672 (k a"
            f" multiple of 4), nor a checkpoint folder"
        )
    return ((int(found[1]), int(found[2])),)


def parse_tokens(text: str) -> tuple[int, ...]:
    """ "1,16,256" or "all". Raises UnsupportedError."""
    if text == "all":
        return TOKENS
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UnsupportedError(f"m is {text!r}, wanted token counts such as 1,16,256 or the word all")
    return tuple(dict.fromkeys(int(word) for word in words))


def parse_seconds(text: str | None) -> float | None:
    """Seconds of "240s", "240" or "5m"; None of None. Raises UnsupportedError."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m)?", text.strip())
    if not found:
        raise UnsupportedError(f"the budget is {text!r}, wanted such as 240s or 5m")
    return float(found[1]) * (60 if found[2] == "m" else 1)


def passes(layers: Sequence[tuple[int, int, QuantScheme]], tokens: Sequence[int], dtype: str) -> Iterator[list[Point]]:
    """The order of a run: four m at a time over all layers; one list for each layer and pass, so that a layer's weights
    are prepared once for it. Whoever stops early has whole columns of the most important m."""
    for first in range(0, len(tokens), _PASS):
        for k, n, scheme in layers:
            yield [Point(k, n, m, dtype, scheme) for m in tokens[first : first + _PASS]]


# ------------------------------------------------------------------------------------------------------- the weights


def random_weight(
    scheme: QuantScheme, n: int, k: int, dtype: torch.dtype, device: torch.device, seed: int
) -> QuantWeight:
    """Every code, place and zero point equally likely. Random, because zeros run cooler and so faster."""
    make = torch.Generator(device=device).manual_seed(seed)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=make, device=device, dtype=torch.uint8)

    positions = None
    columns = k
    if scheme.is_sparse:
        columns = k // 2
        legal = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8, device=device)
        positions = legal[integers(len(legal), n, k // 4).int()]
    if scheme.bits == 16:
        return QuantWeight(scheme, random_values(n, columns, dtype, device, seed), positions=positions)
    groups = scheme.groups(k)
    scales = (0.5 + torch.rand((n, groups), generator=make, device=device)) / (30 << (scheme.bits - 3))
    top = 1 << scheme.bits
    zeros = None if scheme.symmetric else integers(top - 1, n, groups).to(torch.int16) + 1
    codes = integers(256, n, columns)
    return QuantWeight(scheme, codes % top if scheme.bits < 8 else codes, scales.to(dtype), positions, zeros)


def random_values(n: int, k: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Normal [n, k] in `dtype`."""
    make = torch.Generator(device=device).manual_seed(seed)
    return torch.randn((n, k), generator=make, device=device, dtype=dtype) / 30


# Values that are dequantised at a time, so that float64 needs little memory.
_CHUNK = 1 << 24


class Weights:
    """The three weights of one layer that take part: `own` in the point's scheme, `codes` dense with the same codes and
    groups for dense rivals, `full` dense in `dtype` for the library's product. Each is made when first asked for."""

    def __init__(self, k: int, n: int, scheme: QuantScheme, dtype: torch.dtype, device: torch.device, seed: int = 0):
        self.k, self.n, self.scheme, self.dtype, self.device, self.seed = k, n, scheme, dtype, device, seed

    @cached_property
    def own(self) -> QuantWeight:
        return random_weight(self.scheme, self.n, self.k, self.dtype, self.device, self.seed)

    @cached_property
    def codes(self) -> QuantWeight:
        scheme = QuantScheme(self.scheme.bits, self.scheme.group_size, self.scheme.symmetric, "dense")
        return random_weight(scheme, self.n, self.k, self.dtype, self.device, self.seed + 1)

    @cached_property
    def full(self) -> torch.Tensor:
        if self.scheme.bits == 16:
            return random_values(self.n, self.k, self.dtype, self.device, self.seed + 2)
        weight = torch.empty((self.n, self.k), dtype=self.dtype, device=self.device)
        for rows in row_chunks(self.n, self.k):
            weight[rows] = reference.dequantize(transforms.rows(self.codes, rows.start, rows.stop), self.dtype)
        return weight

    def exact(self, kind: str, rows: slice) -> torch.Tensor:
        """float64 [rows, k] of the weight `kind`: "own", "codes" or "full"."""
        weight = getattr(self, kind)
        if isinstance(weight, torch.Tensor):
            return weight[rows].double()
        return reference.dequantize(transforms.rows(weight, rows.start, rows.stop), torch.float64)


def row_chunks(n: int, k: int) -> Iterator[slice]:
    """Slices of [n, k] of a bounded number of elements."""
    step = max(1, _CHUNK // max(1, k))
    for first in range(0, n, step):
        yield slice(first, min(n, first + step))
