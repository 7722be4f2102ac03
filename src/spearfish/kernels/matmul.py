"""The product itself: prepare a weight once, multiply with it many times, on a CPU or a GPU.

    prepared = prepare(weight, "cuda")
    y = matmul(x, prepared, bias)

On a GPU the tile stream of `prepare.py` feeds the kernels; what no kernel takes (and every CPU) gets the weight
dequantised once into the compute dtype and the library's own product. `PreparedWeight.path` says which, and why.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import torch
from torch.nn import functional

from spearfish import reference
from spearfish.errors import OutOfMemoryError, ShapeError, UnsupportedError
from spearfish.kernels import jit
from spearfish.kernels.choose import FAMILY_MODULES, choose
from spearfish.kernels.config import Bound, Problem, chip_of
from spearfish.kernels.prepare import TILE_K, Facts, PreparedWeight, from_stream, to_stream, why_no_stream
from spearfish.kernels.unpack import dense_weight
from spearfish.scheme import QuantScheme, QuantWeight

log = logging.getLogger("spearfish")

# Values dequantised at a time, so that the float32 intermediates stay small beside the result.
_DENSE_CHUNK = 1 << 24

KERNEL_CHOICES = ("auto", "dense", *FAMILY_MODULES)


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
    plain: bool = False,
) -> PreparedWeight:
    """A new object that `matmul` can multiply activations of `dtype` with on `device` (default: where `weight` is).

    batch_invariant: row r of the product has the same bits whatever other rows stand beside it, for a little speed.
    plain: dequantise once and use the library's product, though a kernel may exist.
    Scales of groups are rounded to `dtype` if they have another; a scale per row stays float32.
    `weight` is not changed and not kept. Raises UnsupportedError for a dtype that is no float, OutOfMemoryError if the
    GPU has no room.
    """
    device = torch.device(device) if device is not None else weight.device
    if not dtype.is_floating_point:
        raise UnsupportedError(f"activations must be a float dtype, got {dtype}")
    try:
        return _prepare(weight, device, dtype, batch_invariant, plain)
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(f"preparing a weight [n={weight.n}, k={weight.k}]", device, error) from error


def _prepare(
    weight: QuantWeight, device: torch.device, dtype: torch.dtype, batch_invariant: bool, plain: bool
) -> PreparedWeight:
    reason = "the plain path was asked for" if plain else _why_no_kernel(weight, device, dtype)
    if reason is None:
        prepared = to_stream(weight, device, dtype, batch_invariant, path="tile stream: " + _kernel_words(device))
        # Kernels begin to read weights before the kernel in front of them has ended, and may run on other streams.
        torch.cuda.current_stream(device).synchronize()
        return prepared
    if batch_invariant and device.type == "cuda":
        raise UnsupportedError(f"batch_invariant needs one of the kernels, and none takes this weight: {reason}")
    dense = _dequantize_in_chunks(weight, device, dtype)
    if device.type == "cuda":
        log.info("%s [%d, %d] runs dense, in %d bytes: %s", weight.scheme, weight.n, weight.k, dense.nbytes, reason)
    return PreparedWeight(weight.scheme, weight.n, weight.k, dtype, f"dense: {reason}", batch_invariant, dense=dense)


def _why_no_kernel(weight: QuantWeight, device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"the device is {device.type}"
    if kernel_choice() == "dense":
        return "SPEARFISH_KERNEL=dense"
    reasons = [jit.why_not(), why_no_stream(weight, dtype)]
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        reasons.append(f"{torch.cuda.get_device_name(device)} has capability {major}.{minor}, the kernels begin at 8.0")
    return "; ".join(reason for reason in reasons if reason) or None


def _out_of_memory(what: str, device: torch.device, error: Exception, advice: str = "") -> OutOfMemoryError:
    words = str(error).partition("\n")[0]
    return OutOfMemoryError(f"CUDA out of memory on {device} while {what}; free some{advice}. torch: {words}")


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

    x may have any strides. With `out` (contiguous, [..., n], sharing no memory with x) the result is written there and
    no gradient is kept. Differentiable with respect to x. Raises ShapeError if x, bias or out do not fit the weight,
    OutOfMemoryError if the GPU has no room.
    """
    stream = prepared.stream
    if stream is not None and out is None and _is_plain_call(x, bias):
        # The same as the op below without torch's dispatcher, which takes several times as long as the launch.
        if bias is not None or x.dim() != 2 or x.size(1) != prepared.k or x.dtype is not prepared.dtype:
            _check(x, prepared, bias, out)
        return _product(x, stream, prepared.column_scale, bias, prepared.facts)
    _check(x, prepared, bias, out)
    if stream is None:
        y = functional.linear(x, prepared.dense, bias)  # type: ignore[arg-type]  # one of the two is always there
        return y if out is None else out.copy_(y)
    if out is None:
        return _op(x, stream, prepared.column_scale, bias, *prepared.facts)  # type: ignore[no-any-return]
    try:
        # The kernels store up to 16 bytes at once.
        result = torch.empty_like(out) if out.data_ptr() % 16 else out
        x = x.detach() if x.requires_grad else x
        bias = bias.detach() if bias is not None and bias.requires_grad else bias
        _run(x, stream, prepared.column_scale, bias, result, prepared.facts)
    except torch.OutOfMemoryError as error:
        raise _no_room_for(x, prepared.facts, error) from error
    return out if result is out else out.copy_(result)


def _no_room_for(x: torch.Tensor, facts: Facts, error: Exception) -> OutOfMemoryError:
    what = f"multiplying x {list(x.shape)} with a weight [n={facts[1]}, k={facts[2]}]"
    return _out_of_memory(what, x.device, error, ", or send fewer tokens at a time")


def _is_plain_call(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """No compiler is tracing, no gradient is wanted, no mode or subclass wants to see the op."""
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or not x.is_cuda:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.peek_interpreter_stack() is None


# --------------------------------------------------------------------------------------------------- the torch op

_FACTS = "str kind, int n, int k, int granules, bool has_zeros, bool batch_invariant"
_DTYPES = {torch.float16: False, torch.bfloat16: True}

_library = torch.library.Library("spearfish", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    f"matmul(Tensor x, Tensor stream, Tensor? column_scale, Tensor? bias, {_FACTS}) -> Tensor"
)
_library.define(  # type: ignore[no-untyped-call]
    f"dequantize(Tensor like, Tensor stream, Tensor? column_scale, {_FACTS}) -> Tensor"
)

# Bound launches by everything that they depend on. Serving meets many m; the oldest are let go.
_bound: dict[tuple[object, ...], Bound] = {}
_bound_lock = threading.Lock()  # for changes; one thread's look-up needs none
_BOUND_MOST = 4096
# Launches count rows in 32 bits, a block of them further than they go.
_MOST_ROWS = (1 << 31) - (1 << 10)


def _product(
    x: torch.Tensor, stream: torch.Tensor, column_scale: torch.Tensor | None, bias: torch.Tensor | None, facts: Facts
) -> torch.Tensor:
    """A new [..., n]. Raises OutOfMemoryError."""
    try:
        result = x.new_empty((x.size(0), facts[1]) if x.dim() == 2 else (*x.shape[:-1], facts[1]))
        _run(x, stream, column_scale, bias, result, facts)
    except torch.OutOfMemoryError as error:
        raise _no_room_for(x, facts, error) from error
    return result


def _run(
    x: torch.Tensor,
    stream: torch.Tensor,
    column_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    facts: Facts,
) -> None:
    """Enqueue x · weightᵀ + bias into `out` on torch's current stream of the device."""
    k = facts[2]
    if x.dim() != 2:
        x = x.reshape(-1, k)
    m, device = x.size(0), x.get_device()
    if m == 0:
        return
    if m > _MOST_ROWS:
        raise ShapeError(f"x has {m} rows, one product takes {_MOST_ROWS} at most: send it in parts")
    if k % 8:
        x = functional.pad(x, (0, -k % 8))
    elif (
        # Rows must not overlap, as those of an expanded x do: the copy engine refuses that.
        not (x.is_contiguous() or (x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.stride(0) >= k)) or x.data_ptr() % 16
    ):
        x = x.clone(memory_format=torch.contiguous_format)
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    if device != stream.get_device():
        raise ShapeError(f"x is on {x.device}, the weight on {stream.device}")
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            _run(x, stream, column_scale, bias, out, facts)
        return
    key = (m, device, x.dtype, facts)
    bound = _bound.get(key)
    if bound is None:
        problem = Problem(facts[0], _DTYPES[x.dtype], m, *facts[1:])
        family, config = choose(problem, chip_of(device), kernel_choice())
        bound = family.bind(config, problem, device)
        with _bound_lock:
            while len(_bound) >= _BOUND_MOST:
                del _bound[next(iter(_bound))]
            _bound[key] = bound
    bound(x, stream, column_scale, bias, out)


@torch.library.impl(_library, "matmul", "CUDA")
def _matmul_cuda(
    x: torch.Tensor, stream: torch.Tensor, column_scale: torch.Tensor | None, bias: torch.Tensor | None, *facts: object
) -> torch.Tensor:
    known: Facts = facts  # type: ignore[assignment]  # the schema says so
    return _product(x, stream, column_scale, bias, known)


@torch.library.register_fake("spearfish::matmul", lib=_library)  # type: ignore[untyped-decorator]
def _matmul_fake(
    x: torch.Tensor, stream: torch.Tensor, column_scale: torch.Tensor | None, bias: torch.Tensor | None, *facts: object
) -> torch.Tensor:
    n: int = facts[1]  # type: ignore[assignment]  # facts is a Facts
    return x.new_empty((*x.shape[:-1], n))


@torch.library.impl(_library, "matmul", "CPU")
def _matmul_cpu(
    x: torch.Tensor, stream: torch.Tensor, column_scale: torch.Tensor | None, bias: torch.Tensor | None, *facts: object
) -> torch.Tensor:
    """The same product the slow way, from the same stream: what tests on a CPU compare with."""
    weight = _weight_of(x.dtype, stream, column_scale, *facts)  # type: ignore[arg-type]  # facts is a Facts
    return functional.linear(x, _dequantize_in_chunks(weight, x.device, x.dtype), bias)


@torch.library.impl(_library, "dequantize", "CUDA")
def _dequantize_cuda(
    like: torch.Tensor, stream: torch.Tensor, column_scale: torch.Tensor | None, *facts: object
) -> torch.Tensor:
    known: Facts = facts  # type: ignore[assignment]  # the schema says so
    try:
        return dense_weight(Problem(known[0], _DTYPES[like.dtype], 1, *known[1:]), stream, column_scale, like)
    except torch.OutOfMemoryError as error:
        what = f"expanding a weight [n={known[1]}, k={known[2]}] for a gradient"
        raise _out_of_memory(what, like.device, error) from error


@torch.library.impl(_library, "dequantize", "CPU")
def _dequantize(
    like: torch.Tensor, stream: torch.Tensor, column_scale: torch.Tensor | None, *facts: object
) -> torch.Tensor:
    """Dense [n, k] in the dtype of `like`, for the gradient with respect to x."""
    weight = _weight_of(like.dtype, stream, column_scale, *facts)  # type: ignore[arg-type]  # facts is a Facts
    return _dequantize_in_chunks(weight, like.device, like.dtype)


def _weight_of(
    dtype: torch.dtype,
    stream: torch.Tensor,
    column_scale: torch.Tensor | None,
    kind: str,
    n: int,
    k: int,
    granules: int,
    has_zeros: bool,
    batch_invariant: bool,
) -> QuantWeight:
    """The neutral weight of a stream, with one group for every granule."""
    bits = {"int4": 4, "int8": 8, "f16": 16}[kind.removesuffix("_24")]
    group = TILE_K // granules if granules else None
    scheme = QuantScheme(bits, group, not has_zeros, "2:4" if kind.endswith("_24") else "dense")
    return from_stream(
        PreparedWeight(
            scheme,
            n,
            k,
            dtype,
            "",
            batch_invariant,
            stream=stream,
            column_scale=column_scale,
            granules=granules,
            has_zeros=has_zeros,
        )
    )


@torch.library.register_fake("spearfish::dequantize", lib=_library)  # type: ignore[untyped-decorator]
def _dequantize_fake(
    like: torch.Tensor, stream: torch.Tensor, column_scale: torch.Tensor | None, *facts: object
) -> torch.Tensor:
    _, n, k, *_ = facts
    return like.new_empty((n, k))  # type: ignore[arg-type]  # facts is a Facts


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, stream, column_scale, bias, *facts = inputs
    ctx.save_for_backward(x, stream, column_scale)
    ctx.facts, ctx.has_bias = facts, bias is not None


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, stream, column_scale = ctx.saved_tensors
    if ctx.needs_input_grad[2]:
        raise UnsupportedError("the weight of a quantised layer is frozen: its scales cannot have a gradient")
    to_x = to_bias = None
    if ctx.needs_input_grad[0]:
        to_x = gradient @ torch.ops.spearfish.dequantize(x, stream, column_scale, *ctx.facts)
    if ctx.has_bias and ctx.needs_input_grad[3]:
        to_bias = gradient.flatten(0, -2).sum(0) if gradient.dim() > 1 else gradient
    return (to_x, None, None, to_bias, *(None for _ in ctx.facts))


torch.library.register_autograd("spearfish::matmul", _backward, setup_context=_remember, lib=_library)
_op = torch.ops.spearfish.matmul.default


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
