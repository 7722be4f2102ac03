"""The slow truth: what a `QuantWeight` means, in plain torch. Every fast path is tested against this file."""

from __future__ import annotations

import torch

from spearfish import sparse24
from spearfish.scheme import QuantWeight


def dequantize(weight: QuantWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Dense [n, k] in `dtype`: scale * (code - zero) computed in `dtype`'s own or at least float32 precision, exact
    zeros where nothing was kept."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    if weight.scales is None:
        values = weight.codes.to(compute)
    else:
        group = weight.group_of_k()
        scales, zeros = weight.scales.to(compute), weight.zeros
        if weight.positions is None:
            index = group.expand(weight.n, -1)
        else:
            index = group[sparse24.kept_columns(weight.positions)]
        zero = weight.scheme.zero_point if zeros is None else zeros.to(compute).gather(1, index)
        values = (weight.codes.to(compute) - zero) * scales.gather(1, index)
    if weight.positions is not None:
        values = sparse24.expand(values, weight.positions)
    return values.to(dtype)


def matmul(x: torch.Tensor, weight: QuantWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., k] times weightᵀ, plus bias [n]: float64 [..., n]."""
    y = x.double() @ dequantize(weight, torch.float64).T
    return y if bias is None else y + bias.double()
