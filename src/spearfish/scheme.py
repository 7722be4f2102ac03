"""The neutral weight: what a checkpoint says about one linear layer, free of any file or kernel layout.

Formats decode files into a `QuantWeight`, kernels prepare and multiply one, the compressor makes one. It keeps the
row-per-output orientation of `torch.nn.Linear`: dimension 0 is n (out_features), dimension 1 is k (in_features).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from spearfish.errors import ShapeError

Sparsity = Literal["2:4", "dense"]

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
VALUE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class QuantScheme:
    """How a weight is quantised.

    bits: 4 or 8 (integer codes), or 16 (values kept as floats; then 2:4 is the only reason to be here).
    group_size: dense k that share one scale, or None for one scale per output row ("per column" of the GEMM).
    symmetric: True if the zero point is 2**(bits - 1) everywhere and therefore not stored.
    sparsity: "2:4" (two kept values in every four along k) or "dense".
    """

    bits: int
    group_size: int | None = None
    symmetric: bool = True
    sparsity: Sparsity = "2:4"

    def __post_init__(self) -> None:
        if self.bits not in (4, 8, 16):
            raise ShapeError(f"bits must be 4, 8 or 16, got {self.bits}; widen 2- and 3-bit codes to 4 first")
        if self.sparsity not in ("2:4", "dense"):
            raise ShapeError(f"sparsity must be '2:4' or 'dense', got {self.sparsity!r}")
        if self.group_size is not None and self.group_size < 1:
            raise ShapeError(f"group_size must be positive, or None for one scale per row, got {self.group_size}")
        if self.bits == 16 and not (self.sparsity == "2:4" and self.symmetric and self.group_size is None):
            raise ShapeError("16-bit weights are 2:4, symmetric and carry no groups; keep dense 16-bit ones as tensors")

    @property
    def zero_point(self) -> int:
        """The implicit zero point of a symmetric scheme: 8 for 4 bit, 128 for 8 bit."""
        return 1 << (self.bits - 1)

    @property
    def is_sparse(self) -> bool:
        return self.sparsity == "2:4"

    def groups(self, k: int) -> int:
        """Number of scale groups along k; the last one may be shorter."""
        return 1 if self.group_size is None else -(-k // self.group_size)

    def __str__(self) -> str:
        if self.bits == 16:
            return "16-bit 2:4"
        group = "per column" if self.group_size is None else f"g{self.group_size}"
        return f"int{self.bits} {self.sparsity} {group}{'' if self.symmetric else ' asymmetric'}"


@dataclass(frozen=True, eq=False)
class QuantWeight:
    """One linear layer's weight [n, k].

    codes: uint8 [n, k] (dense) or [n, k/2] (2:4, the two kept values of each quad in k order), offset by the zero
        point; for 16 bit the values themselves, float [n, k/2].
    positions: None (dense), or uint8 [n, k/4]: `i0 | i1 << 2` with 0 <= i0 < i1 <= 3, the kept places of each quad.
    scales: float [n, groups], None for 16 bit. w = scale * (code - zero).
    zeros: None (symmetric), or int16 [n, groups], in the code's own range.
    group_index: None (k // group_size), or int32 [k], the group of every k (act-order).

    Frozen, and nothing in spearfish writes into its tensors. `check()` is called by every codec on what it read.
    """

    scheme: QuantScheme
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    group_index: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _check_structure(self)

    @property
    def n(self) -> int:
        """out_features"""
        return self.codes.shape[0]

    @property
    def k(self) -> int:
        """in_features, dense"""
        return self.codes.shape[1] * (2 if self.scheme.is_sparse else 1)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def groups(self) -> int:
        return 1 if self.scales is None else self.scales.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are present, by field name."""
        names = ("codes", "scales", "positions", "zeros", "group_index")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def to(self, device: torch.device | str) -> QuantWeight:
        """A copy on `device` (the same object if every tensor is there already)."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        if all(moved[name] is tensor for name, tensor in self.tensors().items()):
            return self
        return replace(self, **moved)

    def group_of_k(self) -> torch.Tensor:
        """int64 [k]: the scale group of every dense k."""
        if self.group_index is not None:
            return self.group_index.long()
        size = self.k if self.scheme.group_size is None else self.scheme.group_size
        return torch.arange(self.k, device=self.device) // size

    def check(self, name: str = "weight") -> None:
        """Look at every value: codes in range, positions ascending, scales finite and not negative, zero points and
        group indices in range. Raises ShapeError naming `name`, the first bad place and how many there are."""
        _check_values(self, name)


def _check_structure(w: QuantWeight) -> None:
    scheme, codes = w.scheme, w.codes

    def want(ok: bool, tensor: str, wanted: str) -> None:
        if not ok:
            got = getattr(w, tensor)
            seen = "none" if got is None else f"{got.dtype} {list(got.shape)}"
            raise ShapeError(f"{tensor} of an {scheme} weight: wanted {wanted}, got {seen}")

    code_dtypes = VALUE_DTYPES if scheme.bits == 16 else (torch.uint8,)
    want(codes.dim() == 2 and codes.dtype in code_dtypes, "codes", f"a matrix of {code_dtypes}")
    n, k = w.n, w.k
    if scheme.is_sparse:
        want(codes.shape[1] % 2 == 0, "codes", "an even number of columns: k must be a multiple of 4")
        positions = w.positions
        want(
            positions is not None and positions.dtype == torch.uint8 and tuple(positions.shape) == (n, k // 4),
            "positions",
            f"uint8 [{n}, {k // 4}]",
        )
    else:
        want(w.positions is None, "positions", "none (dense)")
    if scheme.bits == 16:
        for tensor in ("scales", "zeros", "group_index"):
            want(getattr(w, tensor) is None, tensor, "none (16-bit values need no scale)")
        return
    index = w.group_index
    if index is not None:
        want(index.dtype == torch.int32 and tuple(index.shape) == (k,), "group_index", f"int32 [{k}]")
    groups = scheme.groups(k)
    scales = w.scales
    want(
        scales is not None and scales.dtype in SCALE_DTYPES and tuple(scales.shape) == (n, groups),
        "scales",
        f"float [{n}, {groups}]",
    )
    if scheme.symmetric:
        want(w.zeros is None, "zeros", "none (symmetric)")
    else:
        zeros = w.zeros
        want(
            zeros is not None and zeros.dtype == torch.int16 and tuple(zeros.shape) == (n, groups),
            "zeros",
            f"int16 [{n}, {groups}]",
        )
    devices = {tensor.device for tensor in w.tensors().values()}
    if len(devices) > 1:
        raise ShapeError(f"all tensors of one weight must be on one device, got {sorted(map(str, devices))}")


def _check_values(w: QuantWeight, name: str) -> None:
    def refuse(tensor: str, bad: torch.Tensor, wanted: str) -> None:
        count = int(bad.sum())
        if count:
            place = [int(i) for i in bad.nonzero()[0]]
            value = getattr(w, tensor)[tuple(place)].item()
            raise ShapeError(f"{name}: {tensor}{place} is {value}, wanted {wanted} ({count} bad in all)")

    bits = w.scheme.bits
    if bits == 16:
        refuse("codes", ~w.codes.isfinite(), "finite values")
    elif bits < 8:
        refuse("codes", w.codes >= 1 << bits, f"codes below {1 << bits}")
    if w.positions is not None:
        p = w.positions
        refuse("positions", (p > 15) | ((p & 3) >= (p >> 2)), "i0 | i1 << 2 with i0 < i1 <= 3")
    if w.scales is not None:
        refuse("scales", ~w.scales.isfinite() | (w.scales < 0), "finite scales >= 0")
    if w.zeros is not None:
        refuse("zeros", (w.zeros < 0) | (w.zeros > 1 << bits), f"zero points in 0..{1 << bits}")
    if w.group_index is not None:
        refuse("group_index", (w.group_index < 0) | (w.group_index >= w.groups), f"groups below {w.groups}")
