"""A plain safetensors model whose values happen to be 2:4.

    weight  any float dtype [n, k]   at most two non-zeros in every four along k; -0.0 is zero

Nothing in the file says so; the reader looks. fp8 values become fp16 and fp64 must fit fp32, both exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spearfish import sparse24
from spearfish.errors import FormatError, ShapeError
from spearfish.formats import transforms
from spearfish.formats.base import Declared, Description, Format, LayerFacts, Tensors, TensorSpec, need
from spearfish.scheme import VALUE_DTYPES, QuantScheme, QuantWeight


class Dense(Format):
    name = "dense"
    title = "plain safetensors"
    markers = frozenset({"weight"})

    def tensors(self, n: int, k: int, scheme: QuantScheme) -> tuple[TensorSpec, ...]:
        dtypes = (*VALUE_DTYPES, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
        return (TensorSpec("weight", (n, k), dtypes, n_dim=0, k_dim=1),)

    def describe(self, tensors: Tensors, declared: Declared | None = None, name: str = "weight") -> Description:
        n, k = need(tensors, "weight", 2, name).shape
        self.validate(tensors, self.tensors(n, k, QuantScheme(16)), name)
        return Description(n, k, QuantScheme(16), tensors["weight"].itemsize * 8)

    def decode(self, tensors: Tensors, declared: Declared | None = None, name: str = "weight") -> QuantWeight:
        self.describe(tensors, declared, name)
        dense = tensors["weight"]
        if dense.dtype.itemsize == 1:
            dense = dense.to(torch.float16)
        if not bool(dense.isfinite().all()):
            row, column = (int(i) for i in (~dense.isfinite()).nonzero()[0])
            raise FormatError(
                f"{name}: weight [{row}, {column}] is {float(dense[row, column])}"
                f" ({int((~dense.isfinite()).sum())} values are not finite)"
            )
        return transforms.sparse_values(dense, name)

    def refusals(self, weight: QuantWeight) -> list[str]:
        if weight.scheme.bits != 16:
            return ["its values are quantised: dequantise them first, which `convert` does"]
        return []

    def encode(self, weight: QuantWeight, name: str = "weight") -> dict[str, torch.Tensor]:
        self.require(weight, name)
        if weight.positions is None:
            raise ShapeError(f"{name}: not a 2:4 weight")
        return {"weight": sparse24.expand(weight.codes, weight.positions)}

    def config(self, layers: Mapping[str, LayerFacts], ignore: Sequence[str]) -> dict[str, Any]:
        return {}
