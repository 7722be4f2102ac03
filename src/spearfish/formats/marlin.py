"""Dense Marlin (IST-DASLab/marlin, AutoGPTQ's `checkpoint_format: marlin`).

    B  int32 [k/16, n * bits / 2]   codes, in tiles
    s  fp16  [groups, n]            scales in one of two orders, by whether there is one group or more

The zero point is 8 or 128 and not stored. Files with 8-bit codes were only ever made in memory by vLLM; they are read
and written here because mixed models need them. The original takes 4 bit, k % 128, n % 256, groups of 128 or one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spearfish import layouts
from spearfish.errors import ShapeError, UnsupportedError
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


class Marlin(Format):
    name = "marlin"
    title = "dense Marlin"
    markers = frozenset({"B"})
    n_multiple = layouts.TILE_N
    k_multiple = layouts.TILE_K

    def tensors(self, n: int, k: int, scheme: QuantScheme) -> tuple[TensorSpec, ...]:
        groups = scheme.groups(k)
        return (
            TensorSpec("B", (k // layouts.TILE_K, n * scheme.bits // 2), (torch.int32,), n_dim=1, k_dim=0),
            TensorSpec("s", (groups, n), (torch.float16,), n_dim=1, k_dim=0 if groups > 1 else None),
        )

    def describe(self, tensors: Tensors, declared: Declared | None = None, name: str = "weight") -> Description:
        declared = declared or Declared()
        if "meta" in tensors:
            raise UnsupportedError(
                f"{name}: B, meta and s are the tensors of IST's Sparse-Marlin benchmark, which prunes by the size of"
                f" the offset codes, so its pruned values do not mean zero. Make a marlin_24 file from the original"
                f" weights instead"
            )
        codes, scales = need(tensors, "B", 2, name), need(tensors, "s", 2, name)
        k, n = codes.shape[0] * layouts.TILE_K, scales.shape[1]
        bits = 8 if codes.shape[1] == 4 * n else 4
        if n % self.n_multiple:
            raise ShapeError(f"{name}: s has {n} columns, wanted a multiple of {self.n_multiple}")
        check_bits(bits, declared, name, "B")
        scheme = QuantScheme(bits, group_size(scales.shape[0], k, declared, name, "s"), sparsity="dense")
        self.validate(tensors, self.tensors(n, k, scheme), name)
        return Description(n, k, scheme, bits)

    def decode(self, tensors: Tensors, declared: Declared | None = None, name: str = "weight") -> QuantWeight:
        declared = declared or Declared()
        about = self.describe(tensors, declared, name)
        grouped = about.scheme.groups(declared.k or about.k) > 1
        weight = QuantWeight(
            about.scheme,
            layouts.unpack_marlin_codes(tensors["B"], about.bits),
            layouts.marlin_scales_from_file(tensors["s"], grouped),
        )
        weight.check(name)
        return weight

    def refusals(self, weight: QuantWeight) -> list[str]:
        return marlin_refusals(weight, self.k_multiple, self.n_multiple)

    def encode(self, weight: QuantWeight, name: str = "weight") -> dict[str, torch.Tensor]:
        self.require(weight, name)
        codes = transforms.to_dense(weight).codes
        return {
            "B": layouts.pack_marlin_codes(codes, weight.scheme.bits),
            "s": layouts.marlin_scales_to_file(half_scales(weight), weight.groups > 1),
        }

    def extensions(self, n: int, k: int, scheme: QuantScheme) -> list[str]:
        reasons = [
            f"{letter} = {size} is not a multiple of {multiple}"
            for letter, size, multiple in (("k", k, 128), ("n", n, 256))
            if size % multiple
        ]
        if scheme.bits != 4:
            reasons.append("dense Marlin files of others are 4 bit only")
        if scheme.group_size not in (None, 128):
            reasons.append(f"group size {scheme.group_size} is neither 128 nor per column")
        return reasons

    def config(self, layers: Mapping[str, LayerFacts], ignore: Sequence[str]) -> dict[str, Any]:
        return {**gptq_config(layers, ignore, "marlin"), "is_marlin_format": True}
