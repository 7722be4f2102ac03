"""The rivals: each takes part if it is installed or its library is given, and is called as its own users call it.

`--peer-lib` loads a library of torch operators, such as vLLM's `_C_stable_libtorch.abi3.so`, without importing vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from spearfish import layouts
from spearfish.bench.implementations import Implementation, Prepared, WeightKind
from spearfish.bench.problems import Point, Weights
from spearfish.errors import UnsupportedError
from spearfish.formats import FORMATS
from spearfish.scheme import QuantWeight


def load_libraries(paths: Sequence[Path]) -> dict[str, str]:
    """Load libraries of torch operators; returns their names with the start of their SHA-256, to say which they were.

    Raises UnsupportedError that names the one which does not load.
    """
    found = {}
    for path in paths:
        try:
            torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            raise UnsupportedError(
                f"{path} does not load into torch {torch.__version__} (it must be built for this torch): {error}"
            ) from error
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    return found


def all_peers() -> list[Implementation]:
    """Every rival, present or not; `why_not` tells."""
    return [Marlin(), Machete(), Marlin24(), Humming(), TinyGemm(), CuSparseLt(), GemLite()]


def _operator(name: str) -> Any | None:
    """torch.ops._C.`name`, or None if no loaded library has it."""
    return getattr(torch.ops._C, name, None)


def _scalar_type(bits: int) -> int:
    """vLLM's number for unsigned codes of `bits` bits with zero point 2**(bits - 1): mantissa bits from bit 8 up, the
    bias from bit 17 up, and from bit 50 up a 1 that stands for ordinary NaNs."""
    return bits << 8 | (1 << (bits - 1)) << 17 | 1 << 50


def _common(point: Point, bits: tuple[int, ...], sparse: bool | None = None) -> str | None:
    scheme = point.scheme
    if scheme.bits not in bits:
        return f"takes {' and '.join(map(str, bits))} bit codes"
    if not scheme.symmetric:
        return "the adapter passes no zero points"
    if sparse and not scheme.is_sparse:
        return "takes 2:4 weights only"
    return None


def _group(weight: QuantWeight) -> int:
    return -1 if weight.scheme.group_size is None else weight.scheme.group_size


def _scales(weight: QuantWeight) -> torch.Tensor:
    """Scales [n, groups] of a weight that has them."""
    if weight.scales is None:
        raise UnsupportedError("a 16-bit weight has no scales")
    return weight.scales


def _nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Marlin:
    """vLLM's Marlin: dense int4 and int8, repacked by its own operator from GPTQ's layout."""

    name = "marlin"
    takes: WeightKind = "codes"

    def why_not(self, point: Point) -> str | None:
        if _operator("marlin_gemm") is None or _operator("gptq_marlin_repack") is None:
            return "no library with marlin_gemm was given (--peer-lib)"
        return _common(point, (4, 8))

    def prepare(self, weights: Weights) -> Prepared:
        weight, bits = weights.codes, weights.scheme.bits
        packed = FORMATS["gptq"].encode(weight)["qweight"]
        no_order = torch.empty(0, dtype=torch.int32, device=weights.device)
        codes = torch.ops._C.gptq_marlin_repack(packed, no_order, weights.k, weights.n, bits, False)
        scales = layouts.marlin_scales_to_file(_scales(weight), weight.groups > 1)
        multiprocessors = torch.cuda.get_device_properties(weights.device).multi_processor_count
        locks = torch.zeros(multiprocessors, dtype=torch.int32, device=weights.device)
        kind, n, k = _scalar_type(bits), weights.n, weights.k

        def call(x: torch.Tensor) -> torch.Tensor:
            none = (None, None, None, None, None)  # scales of x, global scale, zero points, group index, permutation
            y: torch.Tensor = torch.ops._C.marlin_gemm(
                *(x, None, codes, None, scales, *none, locks, kind, x.shape[0], n, k, True, False, True, False)
            )
            return y

        return Prepared(call, _nbytes(codes, scales))


class Machete:
    """vLLM's Machete (Hopper): dense int4 and int8, prepacked by its own operator from GPTQ's layout."""

    name = "machete"
    takes: WeightKind = "codes"

    def why_not(self, point: Point) -> str | None:
        if _operator("machete_mm") is None or _operator("machete_prepack_B") is None:
            return "no library with machete_mm was given (--peer-lib)"
        return _common(point, (4, 8))

    def prepare(self, weights: Weights) -> Prepared:
        weight, kind = weights.codes, _scalar_type(weights.scheme.bits)
        packed = FORMATS["gptq"].encode(weight)["qweight"]
        # The operator wants [k / 8, n] with k running fastest in memory.
        columns = packed.T.contiguous().T
        codes = torch.ops._C.machete_prepack_B(columns, weights.dtype, kind, weights.dtype)
        scales = _scales(weight).T.contiguous()
        group = _group(weight)

        def call(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.ops._C.machete_mm(x, codes, kind, None, scales, None, group, None, None, None)
            return y

        return Prepared(call, _nbytes(codes, scales))


class Marlin24:
    """The 2024 kernel whose format this project reads, in libraries of vLLM up to 0.14."""

    name = "marlin_24 (2024)"
    takes: WeightKind = "own"

    def why_not(self, point: Point) -> str | None:
        if _operator("gptq_marlin_24_gemm") is None:
            return "no library with gptq_marlin_24_gemm was given (--peer-lib)"
        return "takes float16" if point.dtype != "fp16" else _common(point, (4, 8), sparse=True)

    def prepare(self, weights: Weights) -> Prepared:
        file = FORMATS["marlin_24"].encode(weights.own)
        codes, positions, scales = file["B_24"], file["B_meta"], file["s"]
        kind, n, k = _scalar_type(weights.scheme.bits), weights.n, weights.k
        locks = torch.zeros(n // 128 * 64, dtype=torch.int32, device=weights.device)

        def call(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.ops._C.gptq_marlin_24_gemm(
                x, codes, positions, scales, locks, kind, x.shape[0], n, k
            )
            return y

        return Prepared(call, _nbytes(codes, positions, scales))


class Humming:
    """humming-kernels: dense int4 and int8, compiled at first use."""

    name = "humming"
    takes: WeightKind = "codes"

    def why_not(self, point: Point) -> str | None:
        if find_spec("humming") is None:
            return "humming-kernels is not installed"
        return _common(point, (4, 8))

    def prepare(self, weights: Weights) -> Prepared:
        make = import_module("humming.layer").HummingLayer
        weight = weights.codes
        file = FORMATS["gptq"].encode(weight)
        group = weights.k if weight.scheme.group_size is None else weight.scheme.group_size
        config = {"quant_method": "gptq", "bits": weight.scheme.bits, "group_size": group}
        with torch.cuda.device(weights.device):
            layer = make(shape_n=weights.n, shape_k=weights.k, weight_config=config, torch_dtype=weights.dtype)
            layer = layer.to(weights.device)
            layer.load_from_tensors({name: file[name] for name in ("qweight", "scales", "qzeros")})
            layer.transform()
        held = sum(_nbytes(parameter.data) for parameter in layer.parameters())
        return Prepared(partial(_without_grad, layer), held)


class TinyGemm:
    """torch's own int4 product (the kernel of gpt-fast): dense int4, bfloat16."""

    name = "tinygemm"
    takes: WeightKind = "codes"

    def why_not(self, point: Point) -> str | None:
        if point.dtype != "bf16":
            return "takes bfloat16"
        if point.scheme.group_size not in (32, 64, 128, 256):
            return "takes groups of 32, 64, 128 or 256"
        if point.m > 512:
            return "is made for few tokens: at m > 512 one call takes milliseconds"
        return _common(point, (4,))

    def prepare(self, weights: Weights) -> Prepared:
        weight = weights.codes
        # Two codes a byte, the even one in the high half; the scheme's zero point of 8 is its own as well.
        packed = weight.codes[:, ::2] << 4 | weight.codes[:, 1::2]
        codes = torch.ops.aten._convert_weight_to_int4pack(packed, 8)
        scales = _scales(weight).T
        with_zeros = torch.stack((scales, torch.zeros_like(scales)), dim=-1).contiguous()
        group = _group(weight)

        def call(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.ops.aten._weight_int4pack_mm(x, codes, group, with_zeros)
            return y

        return Prepared(call, _nbytes(codes, with_zeros))


class CuSparseLt:
    """cuSPARSELt through torch, for 16-bit 2:4 weights; y comes transposed, which costs it nothing."""

    name = "cusparselt"
    takes: WeightKind = "own"

    def why_not(self, point: Point) -> str | None:
        if point.scheme.bits != 16:
            return "takes 16-bit 2:4 weights"
        if point.m % 8:
            return "takes multiples of 8 tokens"
        return None if torch.backends.cusparselt.is_available() else "this torch has no cuSPARSELt"

    def prepare(self, weights: Weights) -> Prepared:
        dense = torch.cat(
            [weights.exact("own", slice(i, i + 1024)).to(weights.dtype) for i in range(0, weights.n, 1024)]
        )
        stored = torch._cslt_compress(dense)
        best: dict[int, int] = {}

        def call(x: torch.Tensor) -> torch.Tensor:
            # Its search for the fastest algorithm runs in the first call, which is not timed.
            if x.shape[0] not in best:
                best[x.shape[0]] = torch._cslt_sparse_mm_search(stored, x.T)
            return torch._cslt_sparse_mm(stored, x.T, alg_id=best[x.shape[0]]).T

        return Prepared(call, stored.nbytes)


class GemLite:
    """gemlite's Triton kernels: dense int4 and int8; tunes itself in the first call."""

    name = "gemlite"
    takes: WeightKind = "codes"

    def why_not(self, point: Point) -> str | None:
        if find_spec("gemlite") is None:
            return "gemlite is not installed"
        return _common(point, (4, 8))

    def prepare(self, weights: Weights) -> Prepared:
        gemlite = import_module("gemlite")
        weight = weights.codes
        dtype = gemlite.DType.FP16 if weights.dtype == torch.float16 else gemlite.DType.BF16
        layer = gemlite.GemLiteLinear(
            weights.scheme.bits,
            group_size=weights.k if weight.scheme.group_size is None else weight.scheme.group_size,
            in_features=weights.k,
            out_features=weights.n,
            input_dtype=dtype,
            output_dtype=dtype,
        )
        layer.pack(weight.codes, _scales(weight), weight.scheme.zero_point, None)
        held = sum(_nbytes(tensor) for tensor in layer.state_dict().values())
        return Prepared(partial(_without_grad, layer), held)


def _without_grad(layer: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y: torch.Tensor = layer(x)
    return y
