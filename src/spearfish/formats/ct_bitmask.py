"""compressed-tensors bitmask formats: kept values and one bit per place, rows apart.

sparse-24-bitmask (0.9 to 0.14), the compact file of 16-bit 2:4:
    shape       int64 [2, 1]          n, k
    compressed  [n, k/2]              the kept values in k order
    bitmask     uint8 [n, ceil(k/8)]  bit k % 8 of byte k // 8, from the low bit up; two bits set in every four

sparse-bitmask, its unstructured relative:
    shape int64 [2], compressed [kept], bitmask as above, row_offsets int64 [n]: where each row's values begin

Values of int8 or fp8 appear in W8A8 files, with a `weight_scale` beside them: int8 then decodes to an 8-bit weight
with every value kept, fp8 to 16-bit values with the scale multiplied in and rounded once. Without a scale both decode
exactly to fp16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spearfish import layouts, sparse24
from spearfish.errors import FormatError, ShapeError, UnsupportedError
from spearfish.formats import transforms
from spearfish.formats.base import Declared, Description, Format, LayerFacts, Tensors, TensorSpec, need
from spearfish.formats.compressed_tensors import COMPANIONS, ct_config, row_scales
from spearfish.formats.ct_pack_quantized import stored_shape
from spearfish.scheme import SCALE_DTYPES, VALUE_DTYPES, QuantScheme, QuantWeight

_NARROW = (torch.int8, torch.float8_e4m3fn)


class CtSparse24Bitmask(Format):
    name = "ct-sparse-24-bitmask"
    title = "compressed-tensors sparse-24-bitmask"
    markers = frozenset({"compressed", "bitmask"})
    k_multiple = 4
    companions = COMPANIONS

    def tensors(self, n: int, k: int, scheme: QuantScheme) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("shape", (2, 1), (torch.int64,)),
            TensorSpec("compressed", (n, k // 2), VALUE_DTYPES + _NARROW, n_dim=0, k_dim=1),
            TensorSpec("bitmask", (n, -(-k // 8)), (torch.uint8,), n_dim=0, k_dim=1),
            TensorSpec("weight_scale", (n, scheme.groups(k)), SCALE_DTYPES, n_dim=0, optional=True),
            TensorSpec("weight_zero_point", (n, scheme.groups(k)), (torch.int8,), n_dim=0, optional=True),
        )

    def describe(self, tensors: Tensors, declared: Declared | None = None, name: str = "weight") -> Description:
        compressed = need(tensors, "compressed", 2, name)
        tensors = row_scales(_whole_shape(tensors), compressed.shape[0])
        n, k = stored_shape(need(tensors, "shape", 2, name), name, "shape")
        if k % 4:
            raise ShapeError(f"{name}: shape says k = {k}, 2:4 needs a multiple of 4")
        quantised = compressed.dtype == torch.int8 and "weight_scale" in tensors
        scheme = QuantScheme(8) if quantised else QuantScheme(16)
        self.validate(tensors, self.tensors(n, k, scheme), name)
        return Description(n, k, scheme, compressed.dtype.itemsize * 8)

    def decode(self, tensors: Tensors, declared: Declared | None = None, name: str = "weight") -> QuantWeight:
        about = self.describe(tensors, declared, name)
        tensors = row_scales(tensors, about.n)
        mask = _mask(tensors["bitmask"], about.k, name)
        try:
            positions = sparse24.positions_of_mask(mask)
        except ShapeError as error:
            raise FormatError(f"{name}: bitmask: {error}") from error
        values, scale = tensors["compressed"], tensors.get("weight_scale")
        zeros = tensors.get("weight_zero_point")
        if zeros is not None and bool((zeros != 0).any()):
            raise UnsupportedError(f"{name}: int8 or fp8 values with zero points other than 0 are not read")
        if about.scheme.bits == 8:
            codes = (values.to(torch.int16) + 128).to(torch.uint8)
            weight = QuantWeight(about.scheme, codes, scale, positions)
        else:
            weight = QuantWeight(about.scheme, _values(values, scale), positions=positions)
        weight.check(name)
        return weight

    def refusals(self, weight: QuantWeight) -> list[str]:
        if weight.scheme.bits != 16:
            return ["its values are quantised: dequantise them first, which `convert` does"]
        return []

    def encode(self, weight: QuantWeight, name: str = "weight") -> dict[str, torch.Tensor]:
        self.require(weight, name)
        if weight.positions is None:
            raise ShapeError(f"{name}: not a 2:4 weight")
        kept = sparse24.expand(torch.ones_like(weight.codes, dtype=torch.uint8), weight.positions)
        return {
            "shape": torch.tensor([[weight.n], [weight.k]]),
            "compressed": weight.codes.contiguous(),
            "bitmask": layouts.pack_fields(kept, 1, torch.uint8),
        }

    def config(self, layers: Mapping[str, LayerFacts], ignore: Sequence[str]) -> dict[str, Any]:
        sparsity = {
            "format": "sparse-24-bitmask",
            "targets": ["Linear"],
            "ignore": sorted(ignore),
            "global_sparsity": 0.5,
            "sparsity_structure": "2:4",
            "registry_requires_subclass": False,
        }
        return ct_config(layers, ignore, "dense", sparsity)


class CtSparseBitmask(Format):
    name = "ct-sparse-bitmask"
    title = "compressed-tensors sparse-bitmask"
    markers = frozenset({"row_offsets"})
    companions = COMPANIONS

    def tensors(self, n: int, k: int, scheme: QuantScheme) -> tuple[TensorSpec, ...]:
        return self._table(n, k, n * k // 2)

    def _table(self, n: int, k: int, kept: int) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("shape", (2,), (torch.int64,)),
            TensorSpec("compressed", (kept,), VALUE_DTYPES + _NARROW),
            TensorSpec("bitmask", (n, -(-k // 8)), (torch.uint8,), n_dim=0, k_dim=1),
            TensorSpec("row_offsets", (n,), (torch.int64, torch.int32), n_dim=0),
        )

    def describe(self, tensors: Tensors, declared: Declared | None = None, name: str = "weight") -> Description:
        n, k = stored_shape(need(tensors, "shape", 1, name), name, "shape")
        compressed = tensors.get("compressed")
        kept = 0 if compressed is None else compressed.numel()
        self.validate(tensors, self._table(n, k, kept), name)
        bits = 16 if compressed is None else compressed.dtype.itemsize * 8
        return Description(n, k, QuantScheme(16), bits)

    def values(self, tensors: Tensors, name: str = "weight") -> torch.Tensor:
        """The dense matrix [n, k], which need not be 2:4."""
        about = self.describe(tensors, None, name)
        mask, compressed = _mask(tensors["bitmask"], about.k, name), tensors["compressed"]
        counts = mask.sum(1)
        starts = counts.cumsum(0) - counts
        if int(counts.sum()) != compressed.numel() or not torch.equal(starts, tensors["row_offsets"].long()):
            raise FormatError(
                f"{name}: bitmask keeps {int(counts.sum())} values, compressed holds {compressed.numel()},"
                f" or row_offsets disagree with the bitmask"
            )
        values = _values(compressed, None)
        dense = torch.zeros(mask.shape, dtype=values.dtype, device=mask.device)
        return dense.masked_scatter_(mask, values)

    def decode(self, tensors: Tensors, declared: Declared | None = None, name: str = "weight") -> QuantWeight:
        weight = transforms.sparse_values(self.values(tensors, name), name)
        weight.check(name)
        return weight

    def refusals(self, weight: QuantWeight) -> list[str]:
        return ["it is read only (ct-sparse-24-bitmask is the compact file of 2:4)"]

    def encode(self, weight: QuantWeight, name: str = "weight") -> dict[str, torch.Tensor]:
        self.require(weight, name)
        return {}

    def config(self, layers: Mapping[str, LayerFacts], ignore: Sequence[str]) -> dict[str, Any]:
        raise UnsupportedError(f"{self.name} is read only")


def _whole_shape(tensors: Tensors) -> Tensors:
    """The tensors with `shape` as [2, 1]: some writers stored it flat."""
    shape = tensors.get("shape")
    return {**tensors, "shape": shape.reshape(2, 1)} if shape is not None and shape.numel() == 2 else tensors


def _mask(bitmask: torch.Tensor, k: int, name: str) -> torch.Tensor:
    bits = layouts.unpack_fields(bitmask, 1, 8 * bitmask.shape[1]).bool()
    if bool(bits[:, k:].any()):
        raise FormatError(f"{name}: bitmask has bits set beyond k = {k}")
    return bits[:, :k]


def _values(values: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if values.dtype in VALUE_DTYPES and scale is None:
        return values
    if scale is None:
        return values.to(torch.float16)
    return (values.to(torch.float32) * scale.to(torch.float32)).to(scale.dtype)
