"""GPTQ: AutoGPTQ's "v1" and GPTQModel's "v2", which differ only in the zero points.

    qweight  int32 [k * bits / 32, n]        codes, packed along k
    qzeros   int32 [groups, n * bits / 32]   zero points, packed along n; v1 stores zero - 1, v2 the zero itself
    scales   float [groups, n]
    g_idx    int32 [k]                       group of every k; differs from k // group_size with act-order

Codes of 2, 4 and 8 bits fill words exactly; 3-bit codes run on as one stream, 32 codes in three words. Sparsity is
not recorded: a 2:4 weight is one whose pruned places hold the zero point's code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from spearfish import layouts
from spearfish.errors import FormatError, ShapeError
from spearfish.formats import transforms
from spearfish.formats.base import (
    Declared,
    Description,
    Format,
    LayerFacts,
    Tensors,
    TensorSpec,
    check_bits,
    gptq_config,
    group_size,
    need,
)
from spearfish.scheme import SCALE_DTYPES, QuantScheme, QuantWeight


class Gptq(Format):
    name = "gptq"
    title = "GPTQ v1"
    markers = frozenset({"qweight", "qzeros"})
    n_multiple = 32
    k_multiple = 32
    offset: ClassVar[int] = 1  # what the file's zero-point fields lack

    def tensors(self, n: int, k: int, scheme: QuantScheme) -> tuple[TensorSpec, ...]:
        return self._table(n, k, scheme.groups(k), scheme.bits)

    def _table(self, n: int, k: int, groups: int, bits: int) -> tuple[TensorSpec, ...]:
        group_dim = 0 if groups > 1 else None
        return (
            TensorSpec("qweight", (k * bits // 32, n), (torch.int32,), n_dim=1, k_dim=0),
            TensorSpec("qzeros", (groups, n * bits // 32), (torch.int32,), n_dim=1, k_dim=group_dim),
            TensorSpec("scales", (groups, n), SCALE_DTYPES, n_dim=1, k_dim=group_dim),
            TensorSpec("g_idx", (k,), (torch.int32, torch.int64), k_dim=0, optional=True),
        )

    def describe(self, tensors: Tensors, declared: Declared | None = None, name: str = "weight") -> Description:
        declared = declared or Declared()
        qweight, qzeros = need(tensors, "qweight", 2, name), need(tensors, "qzeros", 2, name)
        groups, n = need(tensors, "scales", 2, name).shape
        bits = 32 * qzeros.shape[1] // n
        if bits not in (2, 3, 4, 8) or n * bits != 32 * qzeros.shape[1] or qweight.shape[0] * 32 % bits:
            raise ShapeError(
                f"{name}: qweight {list(qweight.shape)}, qzeros {list(qzeros.shape)} and scales {[groups, n]} do not"
                f" belong to 2-, 3-, 4- or 8-bit codes (GPTQ's 5- to 7-bit layouts are not read)"
            )
        check_bits(bits, declared, name, "qzeros")
        k = qweight.shape[0] * 32 // bits
        if "g_idx" not in tensors and declared.act_order:
            raise FormatError(f"{name}: the config says desc_act, but g_idx is missing")
        group = group_size(groups, k, declared, name, "scales")
        self.validate(tensors, self._table(n, k, groups, bits), name)
        symmetric = declared.symmetric is not False
        return Description(n, k, QuantScheme(4 if bits <= 4 else 8, group, symmetric, "dense"), bits)

    def decode(self, tensors: Tensors, declared: Declared | None = None, name: str = "weight") -> QuantWeight:
        declared = declared or Declared()
        about = self.describe(tensors, declared, name)
        codes = layouts.unpack_fields(tensors["qweight"].T, about.bits, about.k)
        fields = layouts.unpack_fields(tensors["qzeros"], about.bits, about.n)
        zeros: torch.Tensor | None = fields.T.to(torch.int16) + self.offset
        codes, zeros, bits = transforms.widen(codes, zeros, about.bits)
        symmetric = zeros is None or bool((zeros == 1 << (bits - 1)).all())
        if declared.symmetric and not symmetric:
            raise FormatError(
                f"{name}: the config says sym, but the zero points are not all in the middle of the range"
                f" (first field {int(fields[0, 0])}). Is checkpoint_format right? gptq holds zero - 1, gptq_v2 zero"
            )
        scheme = QuantScheme(bits, about.scheme.group_size, symmetric, "dense")
        weight = QuantWeight(
            scheme,
            codes,
            tensors["scales"].T.contiguous(),
            zeros=None if symmetric or zeros is None else zeros.contiguous(),
            group_index=act_order_index(tensors.get("g_idx"), scheme, about.k),
        )
        weight.check(name)
        return weight

    def refusals(self, weight: QuantWeight) -> list[str]:
        reasons = []
        if weight.scheme.bits == 16:
            reasons.append("its values are 16 bit: quantise them (--bits), or use ct-sparse-24-bitmask or dense")
        for letter, size in (("k", weight.k), ("n", weight.n)):
            if size % 32:
                reasons.append(f"{letter} = {size} is not a multiple of 32 (ct-pack-quantized takes any)")
        zeros, top = weight.zeros, 1 << weight.scheme.bits
        if zeros is not None and self.offset and bool((zeros == 0).any()):
            reasons.append("a zero point of 0 cannot be written as zero - 1 (gptq_v2 and ct-pack-quantized hold it)")
        if zeros is not None and bool((zeros == top).any()):
            if not self.offset:
                reasons.append(f"a zero point of {top} has no field (gptq holds it)")
            elif weight.positions is not None:
                reasons.append(f"a zero point of {top} leaves no code for a pruned value")
        return reasons

    def encode(self, weight: QuantWeight, name: str = "weight") -> dict[str, torch.Tensor]:
        self.require(weight, name)
        weight = transforms.to_dense(weight)
        bits, zeros = weight.scheme.bits, weight.zeros
        if weight.scales is None:
            raise ShapeError(f"{name}: not a quantised weight")
        if zeros is None:
            zeros = torch.full(weight.scales.shape, weight.scheme.zero_point, dtype=torch.int16, device=weight.device)
        return {
            "qweight": layouts.pack_fields(weight.codes, bits).T.contiguous(),
            "qzeros": layouts.pack_fields((zeros.T - self.offset).to(torch.uint8), bits),
            "scales": weight.scales.T.contiguous(),
            "g_idx": weight.group_of_k().to(torch.int32),
        }

    def config(self, layers: Mapping[str, LayerFacts], ignore: Sequence[str]) -> dict[str, Any]:
        return gptq_config(layers, ignore, self.name)


class GptqV2(Gptq):
    name = "gptq_v2"
    title = "GPTQ v2"
    offset = 0


def act_order_index(g_idx: torch.Tensor | None, scheme: QuantScheme, k: int) -> torch.Tensor | None:
    """The group index int32 [k], or None if it is the natural one. A column of -1 means that there is none."""
    if g_idx is None or bool((g_idx == -1).all()):
        return None
    size = k if scheme.group_size is None else scheme.group_size
    natural = torch.arange(k, device=g_idx.device) // size
    return None if torch.equal(g_idx.long(), natural) else g_idx.clamp(-1, 2**31 - 1).to(torch.int32)
