"""marlin_24: the 2:4-sparse, 4- or 8-bit format of vLLM 0.4.3 to 0.14 (method `gptq_marlin_24`).

    B_24    int32 [k/32, n * bits / 2]   the two kept codes of every four k, in tiles
    B_meta  int16 [k/32, 2 n]            which two of four: one nibble per four k
    s       fp16  [groups, n]            scales; permuted within 8 columns if there is more than one group
    bias    the layer's own, untouched

The zero point is 8 or 128 and not stored. Cost per weight: bits / 2, plus 1 bit of metadata, plus the scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from spearfish import layouts
from spearfish.errors import ShapeError
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
    half_scales,
    marlin_refusals,
    need,
)
from spearfish.scheme import QuantScheme, QuantWeight


class Marlin24(Format):
    name = "marlin_24"
    title = "2:4 sparse Marlin"
    markers = frozenset({"B_24", "B_meta"})
    n_multiple = layouts.TILE_N
    k_multiple = 2 * layouts.TILE_K
    # What the three tensors are called; compressed-tensors has other names for the same bytes.
    codes_name, meta_name, scales_name = "B_24", "B_meta", "s"

    def tensors(self, n: int, k: int, scheme: QuantScheme) -> tuple[TensorSpec, ...]:
        groups = scheme.groups(k)
        rows = k // self.k_multiple
        return (
            TensorSpec(self.codes_name, (rows, n * scheme.bits // 2), (torch.int32,), n_dim=1, k_dim=0),
            TensorSpec(self.meta_name, (rows, 2 * n), (torch.int16,), n_dim=1, k_dim=0),
            TensorSpec(self.scales_name, (groups, n), (torch.float16,), n_dim=1, k_dim=0 if groups > 1 else None),
        )

    def describe(self, tensors: Tensors, declared: Declared | None = None, name: str = "weight") -> Description:
        declared = declared or Declared()
        codes = need(tensors, self.codes_name, 2, name)
        meta = need(tensors, self.meta_name, 2, name)
        scales = need(tensors, self.scales_name, 2, name)
        n, k = meta.shape[1] // 2, meta.shape[0] * self.k_multiple
        bits = 8 if codes.shape[1] == 4 * n else 4
        if n % self.n_multiple or meta.shape[1] % 2:
            raise ShapeError(
                f"{name}: {self.meta_name} has {meta.shape[1]} columns, wanted 2 n with n a multiple of"
                f" {self.n_multiple}"
            )
        check_bits(bits, declared, name, self.codes_name)
        group = group_size(scales.shape[0], k, declared, name, self.scales_name)
        scheme = QuantScheme(bits, group)
        self.validate(tensors, self.tensors(n, k, scheme), name)
        return Description(n, k, scheme, bits)

    def decode(self, tensors: Tensors, declared: Declared | None = None, name: str = "weight") -> QuantWeight:
        declared = declared or Declared()
        about = self.describe(tensors, declared, name)
        grouped = self.scales_are_permuted(about, declared)
        weight = QuantWeight(
            about.scheme,
            layouts.unpack_marlin_24_codes(tensors[self.codes_name], about.bits),
            layouts.marlin_24_scales_from_file(tensors[self.scales_name], grouped),
            layouts.unpack_marlin_24_meta(tensors[self.meta_name]),
        )
        weight.check(name)
        return weight

    def scales_are_permuted(self, about: Description, declared: Declared) -> bool:
        """Whether `s` stands in grouped order: decided by the whole layer, also for one rank's rows of it."""
        return about.scheme.groups(declared.k or about.k) > 1

    def refusals(self, weight: QuantWeight) -> list[str]:
        reasons = []
        if not weight.scheme.is_sparse:
            reasons.append("it is dense (marlin, gptq and ct-pack-quantized hold dense codes)")
        return reasons + marlin_refusals(weight, self.k_multiple, self.n_multiple)

    def encode(self, weight: QuantWeight, name: str = "weight") -> dict[str, torch.Tensor]:
        self.require(weight, name)
        weight = transforms.canonical(replace(weight, scales=half_scales(weight)))
        if weight.positions is None or weight.scales is None:
            raise ShapeError(f"{name}: not a quantised 2:4 weight")
        return {
            self.codes_name: layouts.pack_marlin_24_codes(weight.codes, weight.scheme.bits),
            self.meta_name: layouts.pack_marlin_24_meta(weight.positions),
            self.scales_name: layouts.marlin_24_scales_to_file(weight.scales, weight.groups > 1),
        }

    def extensions(self, n: int, k: int, scheme: QuantScheme) -> list[str]:
        """The limits of vLLM 0.4.3 to 0.14: k and n multiples of 128, groups of 128 or one per column."""
        reasons = [f"{letter} = {size} is not a multiple of 128" for letter, size in (("k", k), ("n", n)) if size % 128]
        if scheme.group_size not in (None, 128):
            reasons.append(f"group size {scheme.group_size} is neither 128 nor per column")
        return reasons

    def config(self, layers: Mapping[str, LayerFacts], ignore: Sequence[str]) -> dict[str, Any]:
        return gptq_config(layers, ignore, "marlin_24")
