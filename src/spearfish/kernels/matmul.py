"""The product itself: prepare a weight once, multiply with it many times, on a CPU or a GPU.

    prepared = prepare(weight, "cuda")
    y = matmul(x, prepared, bias)

On a GPU the tile stream of `prepare.py` feeds the kernels; what no kernel takes (and every CPU) gets the weight
dequantised once into the compute dtype and the library's own product. `PreparedWeight.path` says which, and why.
"""

from __future__ import annotations

import os

import torch
from torch.nn import functional

from spearfish import reference
from spearfish.errors import ShapeError, UnsupportedError
from spearfish.kernels.prepare import PreparedWeight, to_stream, why_no_stream
from spearfish.scheme import QuantWeight

# Values dequantised at a time, so that the float32 intermediates stay small beside the result.
_DENSE_CHUNK = 1 << 24

KERNEL_CHOICES = ("auto", "dense", "portable", "hopper")


def kernel_choice() -> str:
    """What SPEARFISH_KERNEL asks for; "auto" when it is not set. Raises UnsupportedError for an unknown word."""
    choice = os.environ.get("SPEARFISH_KERNEL", "auto") or "auto"
    if choice not in KERNEL_CHOICES:
        raise UnsupportedError(f"SPEARFISH_KERNEL is {choice!r}; it may be one of {', '.join(KERNEL_CHOICES)}")
    return choice


def prepare(
    weight: QuantWeight,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float16,
    batch_invariant: bool = False,
) -> PreparedWeight:
    """A new object that `matmul` can multiply activations of `dtype` with on `device` (default: where `weight` is).

    batch_invariant: row r of the product has the same bits whatever other rows stand beside it, for a little speed.
    `weight` is not changed and not kept. Raises UnsupportedError for a dtype that is no float.
    """
    device = torch.device(device) if device is not None else weight.device
    if not dtype.is_floating_point:
        raise UnsupportedError(f"activations must be a float dtype, got {dtype}")
    reason = _why_no_kernel(weight, device, dtype)
    if reason is None:
        return to_stream(weight, device, dtype, batch_invariant, path="tile stream: " + _kernel_words(device))
    if batch_invariant and device.type == "cuda":
        raise UnsupportedError(f"batch_invariant needs one of the kernels, and none takes this weight: {reason}")
    dense = _dequantize_in_chunks(weight, device, dtype)
    return PreparedWeight(weight.scheme, weight.n, weight.k, dtype, f"dense: {reason}", batch_invariant, dense=dense)


def _why_no_kernel(weight: QuantWeight, device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"the device is {device.type}"
    if kernel_choice() == "dense":
        return "SPEARFISH_KERNEL=dense"
    major, minor = torch.cuda.get_device_capability(device)
    reasons = [] if major >= 8 else [f"{torch.cuda.get_device_name(device)} has capability {major}.{minor}, not 8.0"]
    reason = why_no_stream(weight, dtype)
    return "; ".join(reasons + ([reason] if reason else [])) or None


def _kernel_words(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"kernels for capability {major}.{minor}"


def _dequantize_in_chunks(weight: QuantWeight, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Dense [n, k] in `dtype` on `device`, a few rows at a time."""
    dense = torch.empty((weight.n, weight.k), dtype=dtype, device=device)
    step = max(1, _DENSE_CHUNK // max(1, weight.k))
    for first in range(0, weight.n, step):
        rows = slice(first, first + step)
        fields = {
            name: (tensor if name == "group_index" else tensor[rows]).to(device)
            for name, tensor in weight.tensors().items()
        }
        dense[rows] = reference.dequantize(QuantWeight(weight.scheme, **fields), dtype)
    return dense


def matmul(
    x: torch.Tensor,
    prepared: PreparedWeight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., k] times weightᵀ plus bias [n]: [..., n] in the dtype of x, which is the one `prepare` was told.

    x may have any strides. With `out` (contiguous, [..., n]) the result is written there and no gradient is kept.
    Differentiable with respect to x. Raises ShapeError if x, bias or out do not fit the weight.
    """
    _check(x, prepared, bias, out)
    if prepared.dense is None:
        raise UnsupportedError("the GPU kernels are not part of this build")
    y = functional.linear(x, prepared.dense, bias)
    return y if out is None else out.copy_(y)


def _check(x: torch.Tensor, prepared: PreparedWeight, bias: torch.Tensor | None, out: torch.Tensor | None) -> None:
    if x.dim() < 1 or x.shape[-1] != prepared.k:
        raise ShapeError(f"x {list(x.shape)} does not fit a weight [n={prepared.n}, k={prepared.k}]: want [..., k]")
    if x.dtype != prepared.dtype:
        raise ShapeError(f"x is {x.dtype}, the weight was prepared for {prepared.dtype}; prepare(…, dtype={x.dtype})")
    if x.device != prepared.device:
        raise ShapeError(f"x is on {x.device}, the weight on {prepared.device}")
    if bias is not None and (tuple(bias.shape) != (prepared.n,) or bias.dtype != x.dtype or bias.device != x.device):
        raise ShapeError(
            f"bias is {bias.dtype} {list(bias.shape)} on {bias.device}, want {x.dtype} [{prepared.n}] on {x.device}"
        )
    if out is not None:
        wanted = (*x.shape[:-1], prepared.n)
        if tuple(out.shape) != wanted or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
            raise ShapeError(
                f"out is {out.dtype} {list(out.shape)} on {out.device}, want contiguous {x.dtype} {list(wanted)}"
            )
