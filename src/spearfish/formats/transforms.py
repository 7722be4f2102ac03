"""Weight in, weight out: the lossless and the lossy steps between what one file holds and what another can.

All are pure. The lossless ones (`find_24`, `to_dense`, `canonical`, `pad`, `crop`) keep every value; the lossy ones
(`round_to_nearest`, `reproject`) say so and their callers report the damage.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from spearfish import sparse24
from spearfish.errors import FormatError, ShapeError
from spearfish.reference import dequantize
from spearfish.scheme import QuantScheme, QuantWeight


def nonzero(weight: QuantWeight) -> torch.Tensor:
    """bool [n, k]: the values that differ from zero. A code at its zero point is zero, and so is -0.0."""
    kept = _nonzero_codes(weight)
    return kept if weight.positions is None else sparse24.expand(kept, weight.positions)


def zeros_share(weight: QuantWeight) -> float:
    """The share of the n * k values that are zero."""
    return 1 - int(_nonzero_codes(weight).sum()) / (weight.n * weight.k)


def _nonzero_codes(weight: QuantWeight) -> torch.Tensor:
    if weight.scheme.bits == 16:
        return weight.codes != 0
    if weight.zeros is None:
        return weight.codes != weight.scheme.zero_point
    index = weight.group_of_k().expand(weight.n, -1)
    if weight.positions is not None:
        index = index.gather(1, sparse24.kept_columns(weight.positions))
    return weight.codes != weight.zeros.gather(1, index)


def find_24(weight: QuantWeight) -> QuantWeight:
    """The same weight marked 2:4 if no quad holds more than two non-zeros, else the weight itself."""
    if weight.scheme.is_sparse or weight.k % 4 or weight.positions is not None:
        return weight
    mask = nonzero(weight)
    # A look at the first rows answers for nearly every dense layer.
    if sparse24.violations(mask[:16]).any() or sparse24.violations(mask).any():
        return weight
    positions = sparse24.positions_of_nonzero(mask)
    return replace(
        weight,
        scheme=replace(weight.scheme, sparsity="2:4"),
        codes=sparse24.compress(weight.codes, positions),
        positions=positions,
    )


def to_dense(weight: QuantWeight) -> QuantWeight:
    """The same integer weight with a code at every k; what was not kept gets the code of its zero point."""
    if weight.positions is None:
        return weight
    if weight.scheme.bits == 16:
        raise ShapeError("16-bit 2:4 values have no dense quantised form; dequantise them instead")
    scheme = replace(weight.scheme, sparsity="dense")
    if weight.zeros is None:
        codes = sparse24.expand(weight.codes, weight.positions, fill=scheme.zero_point)
        return replace(weight, scheme=scheme, codes=codes, positions=None)
    fill = weight.zeros.gather(1, weight.group_of_k().expand(weight.n, -1))
    kept = sparse24.expand(torch.ones_like(weight.codes, dtype=torch.bool), weight.positions)
    if bool(((fill >= 1 << scheme.bits) & ~kept).any()):
        raise ShapeError(f"a zero point of {1 << scheme.bits} has no code, so pruned places cannot be written")
    codes = torch.where(kept, sparse24.expand(weight.codes, weight.positions), fill.to(torch.uint8))
    return replace(weight, scheme=scheme, codes=codes, positions=None)


def canonical(weight: QuantWeight) -> QuantWeight:
    """The same 2:4 weight with its slots chosen by the original packers' rule, which looks at non-zero codes only.

    Filler slots, and kept codes that equal the zero point, so land where vLLM's packer puts them and files come out
    equal byte for byte. Only quads with fewer than two non-zeros can change.
    """
    if weight.positions is None:
        return weight
    if weight.zeros is not None:
        raise ShapeError("the packers' slot rule is for symmetric weights")
    zero = 0 if weight.scheme.bits == 16 else weight.scheme.zero_point
    old = weight.positions
    pairs = weight.codes.reshape(*old.shape, 2)
    first, second = pairs.unbind(-1)
    lone, other = first != zero, second != zero
    if bool((lone & other).all()):
        return weight
    # The place of the one non-zero decides; `_FILLERS` gives the slots that the rule picks for it.
    place = torch.where(lone, old & 3, torch.where(other, old >> 2, 4))
    slots = torch.tensor(_FILLERS, dtype=torch.uint8, device=old.device)[place.int()]
    positions = torch.where(lone & other, old, slots)
    value = torch.where(lone, first, second)
    fill = torch.full_like(value, zero)
    low = torch.where(lone & other, first, torch.where(place == (positions & 3), value, fill))
    high = torch.where(lone & other, second, torch.where(place == (positions >> 2), value, fill))
    return replace(weight, codes=torch.stack((low, high), dim=-1).reshape(weight.codes.shape), positions=positions)


# By the place 0..3 of a quad's only non-zero, or 4 if it has none: both slots as a nibble.
_FILLERS = (0x8, 0x9, 0xE, 0xE, 0xE)


def widen(codes: torch.Tensor, zeros: torch.Tensor | None, bits: int) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Codes and zero points of any width 1..8 moved into 4 or 8 bits, and that width.

    Both move by the same amount, the one that takes the middle of the old range to the middle of the new, so every
    value stays exactly what it was and a symmetric weight stays symmetric.
    """
    wide = 4 if bits <= 4 else 8
    shift = (1 << (wide - 1)) - (1 << (bits - 1))
    return codes + shift, None if zeros is None else zeros + shift, wide


def pad(weight: QuantWeight, n_multiple: int, k_multiple: int) -> QuantWeight:
    """The weight with zero rows and columns added up to the given multiples."""
    rows, columns = -weight.n % n_multiple, -weight.k % k_multiple
    if not rows and not columns:
        return weight
    if weight.group_index is not None or weight.zeros is not None:
        raise ShapeError("padding an act-order or asymmetric weight is not supported")
    scheme, stored = weight.scheme, columns // 2 if weight.scheme.is_sparse else columns
    fill = 0 if scheme.bits == 16 else scheme.zero_point
    codes = torch.nn.functional.pad(weight.codes, (0, stored, 0, rows), value=fill)
    positions, scales = weight.positions, weight.scales
    if positions is not None:
        if columns % 4:
            raise ShapeError(f"k = {weight.k} can only be padded by whole quads")
        positions = torch.nn.functional.pad(positions, (0, columns // 4, 0, rows), value=sparse24.NIBBLES[-1])
    if scales is not None:
        new_groups = scheme.groups(weight.k + columns) - weight.groups
        scales = torch.nn.functional.pad(scales, (0, new_groups, 0, rows))
    return replace(weight, codes=codes, positions=positions, scales=scales)


def crop(weight: QuantWeight, n: int, k: int, name: str = "weight") -> QuantWeight:
    """Undo `pad`: the first n rows and k columns. Raises FormatError if what is cut off is not zero."""
    if (n, k) == (weight.n, weight.k):
        return weight
    if not 0 < n <= weight.n or not 0 < k <= weight.k or (weight.scheme.is_sparse and k % 4):
        raise FormatError(f"{name}: true size [{n}, {k}] does not fit into the stored size [{weight.n}, {weight.k}]")
    mask = nonzero(weight)
    if bool(mask[n:].any()) or bool(mask[:, k:].any()):
        raise FormatError(f"{name}: the padding beyond [{n}, {k}] holds values other than zero")
    width = k // 2 if weight.scheme.is_sparse else k
    return replace(
        weight,
        codes=weight.codes[:n, :width].contiguous(),
        positions=None if weight.positions is None else weight.positions[:n, : k // 4].contiguous(),
        scales=None if weight.scales is None else weight.scales[:n, : weight.scheme.groups(k)].contiguous(),
    )


def sparse_values(dense: torch.Tensor, name: str = "weight") -> QuantWeight:
    """A float matrix [n, k] whose quads hold at most two non-zeros, as a 16-bit 2:4 weight.

    Raises FormatError naming the first quad with three, and their number.
    """
    require_24(dense != 0, name)
    positions = sparse24.positions_of_nonzero(dense != 0)
    return QuantWeight(QuantScheme(16), sparse24.compress(_value_dtype(dense), positions), positions=positions)


def require_24(mask: torch.Tensor, name: str) -> None:
    """Raise FormatError if a quad of the bool mask [n, k] holds more than two non-zeros."""
    if mask.dim() != 2 or mask.shape[1] % 4:
        raise FormatError(f"{name}: 2:4 needs a matrix with k a multiple of 4, got {list(mask.shape)}")
    bad = sparse24.violations(mask)
    count = int(bad.sum())
    if count:
        row, quad = (int(i) for i in bad.nonzero()[0])
        raise FormatError(
            f"{name}: not 2:4: row {row}, columns {4 * quad}..{4 * quad + 3} hold"
            f" {int(mask[row, 4 * quad : 4 * quad + 4].sum())} non-zeros; {count} of {bad.numel()} groups of four"
            f" ({count / bad.numel():.2%}) hold more than two. Reproject it (--reproject) to drop the smallest of them"
        )


def round_to_nearest(weight: torch.Tensor | QuantWeight, bits: int, group: int | None) -> QuantWeight:
    """Symmetric round-to-nearest of 16-bit 2:4 values or of a dense float matrix [n, k]: lossy.

    scale = 2 max|w| / (2^bits - 1) rounded to fp16, code = clamp(round(w / scale) + 2^(bits-1)); the convention of
    AutoGPTQ and of vLLM's own test quantiser. Zeros stay exactly zero, so 2:4 stays 2:4.
    """
    n, k = (weight.n, weight.k) if isinstance(weight, QuantWeight) else weight.shape
    positions = weight.positions if isinstance(weight, QuantWeight) else None
    scheme = QuantScheme(bits, group, sparsity="dense" if positions is None else "2:4")
    size = k if group is None else group
    if positions is None:
        dense = dequantize(weight) if isinstance(weight, QuantWeight) else weight.float()
        codes, scales = _nearest(dense, bits, scheme.groups(k), size)
    elif isinstance(weight, QuantWeight) and weight.scheme.bits == 16 and size % 4 == 0:
        # Groups end between quads, so the kept half can be rounded by itself.
        codes, scales = _nearest(weight.codes.float(), bits, scheme.groups(k), size // 2)
    else:
        dense = dequantize(weight) if isinstance(weight, QuantWeight) else weight.float()
        codes, scales = _nearest(dense, bits, scheme.groups(k), size)
        codes = sparse24.compress(codes, positions)
    return QuantWeight(scheme, codes, scales, positions)


def _nearest(values: torch.Tensor, bits: int, groups: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [n, width] and scales fp16 [n, groups] of float32 values [n, width] in groups of `size`."""
    n, width = values.shape
    grouped = torch.nn.functional.pad(values, (0, groups * size - width)).reshape(n, groups, size)
    limit = torch.finfo(torch.float16).max
    scales = (grouped.abs().amax(-1) * (2 / ((1 << bits) - 1))).clamp(max=limit).to(torch.float16)
    # A group without values, or too small for fp16, gets the scale 1: its codes are all zero points.
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = grouped / scales.float().unsqueeze(-1)
    codes = codes.round_().add_(1 << (bits - 1)).clamp_(0, (1 << bits) - 1).to(torch.uint8)
    return codes.reshape(n, -1)[:, :width].contiguous(), scales


def rows(weight: QuantWeight, start: int, stop: int) -> QuantWeight:
    """Output rows start..stop of a weight, as views."""
    cut = {name: tensor if name == "group_index" else tensor[start:stop] for name, tensor in weight.tensors().items()}
    return QuantWeight(weight.scheme, **cut)


def reproject(weight: QuantWeight) -> QuantWeight:
    """The nearest 2:4 weight with the same scales: of every quad the two largest values stay, the others go. Lossy."""
    if weight.positions is not None:
        return weight
    positions = sparse24.positions_of_mask(sparse24.magnitude_mask(dequantize(weight).abs()))
    return replace(
        weight,
        scheme=replace(weight.scheme, sparsity="2:4"),
        codes=sparse24.compress(weight.codes, positions),
        positions=positions,
    )


def _value_dtype(dense: torch.Tensor) -> torch.Tensor:
    """The values in fp16, bf16 or fp32, exactly: narrower floats and small integers go to fp16, fp64 to fp32."""
    if dense.dtype in (torch.float16, torch.bfloat16, torch.float32):
        return dense
    wide = dense.to(torch.float32)
    if dense.dtype == torch.float64:
        if not torch.equal(wide.double(), dense):
            raise ShapeError("float64 values that float32 cannot hold exactly")
        return wide
    return wide.to(torch.float16)


def to_values(weight: QuantWeight, dtype: torch.dtype, name: str = "weight") -> QuantWeight:
    """A quantised 2:4 weight as 16-bit (or fp32) values in `dtype`, each rounded once. Lossy unless fp32.

    Raises ShapeError if a value leaves the range of `dtype`.
    """
    if weight.positions is None:
        raise ShapeError(f"{name}: not a 2:4 weight")
    values = sparse24.compress(dequantize(weight), weight.positions)
    return QuantWeight(QuantScheme(16), in_range(values, dtype, name), positions=weight.positions)


def in_range(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """The values in `dtype`. Raises ShapeError if a finite one becomes infinite."""
    cast = values.to(dtype)
    lost = int((~cast.isfinite()).sum())
    if lost:
        raise ShapeError(
            f"{name}: {lost} values (up to {float(values.abs().max()):.4g}) leave the range of"
            f" {str(dtype).removeprefix('torch.')}; use --dtype bfloat16 or float32"
        )
    return cast


def reproject_values(dense: torch.Tensor) -> QuantWeight:
    """The nearest 16-bit 2:4 weight of a dense float matrix [n, k]: the two largest of every quad. Lossy."""
    positions = sparse24.positions_of_mask(sparse24.magnitude_mask(dense.float().abs()))
    return QuantWeight(QuantScheme(16), sparse24.compress(_value_dtype(dense), positions), positions=positions)
