"""compressed-tensors "pack-quantized": integer codes of any shape, dense or 2:4 by value.

    weight_packed      int32 [n, ceil(k * bits / 32)]   code + 2^(bits-1), packed along k
    weight_scale       float [n, groups]
    weight_shape       int64 [2]                        n, k
    weight_zero_point  int32 [ceil(n * bits / 32), groups], packed along n; only if asymmetric (older: int8 [n, groups])
    weight_g_idx       int32 [k]                        only with act-order

Nothing in the file says 2:4; llm-compressor writes 2:4 models in it, and the reader finds the pattern by looking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spearfish import layouts
from spearfish.errors import FormatError, ShapeError
from spearfish.formats import transforms
from spearfish.formats.base import Declared, Description, Format, LayerFacts, Tensors, TensorSpec, group_size, need
from spearfish.formats.compressed_tensors import COMPANIONS, ct_config, row_scales
from spearfish.formats.gptq import act_order_index
from spearfish.scheme import SCALE_DTYPES, QuantScheme, QuantWeight


class CtPackQuantized(Format):
    name = "ct-pack-quantized"
    title = "compressed-tensors pack-quantized"
    markers = frozenset({"weight_packed"})
    companions = COMPANIONS

    def tensors(self, n: int, k: int, scheme: QuantScheme) -> tuple[TensorSpec, ...]:
        return self._table(n, k, scheme.groups(k), scheme.bits)

    def _table(self, n: int, k: int, groups: int, bits: int, unpacked_zeros: bool = False) -> tuple[TensorSpec, ...]:
        group_dim = 1 if groups > 1 else None
        zeros = TensorSpec(
            "weight_zero_point", (_words(n, bits), groups), (torch.int32,), n_dim=0, k_dim=group_dim, optional=True
        )
        if unpacked_zeros:
            zeros = TensorSpec("weight_zero_point", (n, groups), (torch.int8,), n_dim=0, k_dim=group_dim, optional=True)
        return (
            TensorSpec("weight_packed", (n, _words(k, bits)), (torch.int32,), n_dim=0, k_dim=1),
            TensorSpec("weight_scale", (n, groups), SCALE_DTYPES, n_dim=0, k_dim=group_dim),
            TensorSpec("weight_shape", (2,), (torch.int64, torch.int32)),
            zeros,
            TensorSpec("weight_g_idx", (k,), (torch.int32, torch.int64), k_dim=0, optional=True),
        )

    def describe(self, tensors: Tensors, declared: Declared | None = None, name: str = "weight") -> Description:
        declared = declared or Declared()
        packed = need(tensors, "weight_packed", 2, name)
        tensors = row_scales(tensors, packed.shape[0])
        scale = need(tensors, "weight_scale", 2, name)
        n, k = stored_shape(need(tensors, "weight_shape", 1, name), name, "weight_shape")
        widths = [declared.bits] if declared.bits is not None else [4, 8, 2, 3, 5, 6, 7]
        bits = next((b for b in widths if 2 <= b <= 8 and packed.shape == (n, _words(k, b))), None)
        if bits is None:
            said = f"{declared.bits} bits" if declared.bits is not None else "any width of 2 to 8 bits"
            raise ShapeError(
                f"{name}: weight_packed {list(packed.shape)} does not hold [{n}, {k}] codes of {said}"
                f" (weight_shape and the config say so)"
            )
        group = group_size(scale.shape[1], k, declared, name, "weight_scale")
        zeros = tensors.get("weight_zero_point")
        unpacked = zeros is not None and zeros.dtype == torch.int8
        self.validate(tensors, self._table(n, k, scale.shape[1], bits, unpacked), name)
        if zeros is None and declared.symmetric is False:
            raise FormatError(f"{name}: the config says asymmetric, but weight_zero_point is missing")
        return Description(n, k, QuantScheme(4 if bits <= 4 else 8, group, zeros is None, "dense"), bits)

    def decode(self, tensors: Tensors, declared: Declared | None = None, name: str = "weight") -> QuantWeight:
        declared = declared or Declared()
        about = self.describe(tensors, declared, name)
        tensors = row_scales(tensors, about.n)
        codes = layouts.unpack_fields(tensors["weight_packed"], about.bits, about.k)
        zeros = tensors.get("weight_zero_point")
        if zeros is not None and zeros.dtype == torch.int8:
            zeros = zeros.to(torch.int16) + (1 << (about.bits - 1))
        elif zeros is not None:
            zeros = layouts.unpack_fields(zeros.T, about.bits, about.n).T.to(torch.int16)
        codes, zeros, bits = transforms.widen(codes, zeros, about.bits)
        if zeros is not None and declared.symmetric is not False and bool((zeros == 1 << (bits - 1)).all()):
            zeros = None
        scheme = QuantScheme(bits, about.scheme.group_size, zeros is None, "dense")
        weight = QuantWeight(
            scheme,
            codes,
            tensors["weight_scale"],
            zeros=None if zeros is None else zeros.contiguous(),
            group_index=act_order_index(tensors.get("weight_g_idx"), scheme, about.k),
        )
        weight.check(name)
        return weight

    def refusals(self, weight: QuantWeight) -> list[str]:
        if weight.scheme.bits == 16:
            return ["its values are 16 bit: quantise them (--bits), or use ct-sparse-24-bitmask or dense"]
        top = 1 << weight.scheme.bits
        if weight.zeros is not None and bool((weight.zeros == top).any()):
            return [f"a zero point of {top} has no field (gptq holds it)"]
        return []

    def encode(self, weight: QuantWeight, name: str = "weight") -> dict[str, torch.Tensor]:
        self.require(weight, name)
        weight = transforms.to_dense(weight)
        if weight.scales is None:
            raise ShapeError(f"{name}: not a quantised weight")
        tensors = {
            "weight_packed": layouts.pack_fields(weight.codes, weight.scheme.bits),
            "weight_scale": weight.scales.contiguous(),
            "weight_shape": torch.tensor([weight.n, weight.k]),
        }
        if weight.zeros is not None:
            packed = layouts.pack_fields(weight.zeros.T.to(torch.uint8), weight.scheme.bits)
            tensors["weight_zero_point"] = packed.T.contiguous()
        index = act_order_index(weight.group_index, weight.scheme, weight.k)
        if index is not None:
            tensors["weight_g_idx"] = index
        return tensors

    def config(self, layers: Mapping[str, LayerFacts], ignore: Sequence[str]) -> dict[str, Any]:
        return ct_config(layers, ignore, "pack-quantized", {})


def stored_shape(shape: torch.Tensor, name: str, tensor: str) -> tuple[int, int]:
    """(n, k) from a small tensor that stores them. Raises ShapeError unless these are two positive numbers."""
    values = shape.flatten().tolist() if shape.device.type != "meta" and not shape.is_floating_point() else []
    if len(values) != 2 or not all(0 < value < 1 << 31 for value in values):
        raise ShapeError(f"{name}: {tensor} holds {values or list(shape.shape)}, wanted n and k")
    return values[0], values[1]


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)
