"""The rivals' adapters, called with stand-ins that have the real operators' schemas and decode what they are given."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spearfish import layouts, reference
from spearfish.bench import check
from spearfish.bench.implementations import Implementation
from spearfish.bench.peers import (
    CuSparseLt,
    GemLite,
    Humming,
    Machete,
    Marlin,
    Marlin24,
    TinyGemm,
    _scalar_type,
    all_peers,
    load_libraries,
)
from spearfish.bench.problems import Point, Weights, parse_scheme
from spearfish.errors import UnsupportedError
from spearfish.formats import FORMATS, Declared

K, N = 256, 256
CPU = torch.device("cpu")
# As the library of vLLM 0.26.0 and, for the last, of 0.14 declares them.
SCHEMAS = (
    "gptq_marlin_repack(Tensor b_q_weight, Tensor perm, SymInt size_k, SymInt size_n, int num_bits, bool is_a_8bit)"
    " -> Tensor",
    "marlin_gemm(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none,Tensor b_scales,"
    " Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor? g_idx_or_none, Tensor? perm_or_none,"
    " Tensor workspace, int b_type_id, SymInt size_m, SymInt size_n, SymInt size_k, bool is_k_full,"
    " bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> Tensor",
    "machete_prepack_B(Tensor B, ScalarType a_type, int b_type, ScalarType? group_scales_type) -> Tensor",
    "machete_mm(Tensor A, Tensor B, int b_type, ScalarType? out_type, Tensor? group_scales, Tensor? group_zeros,"
    " int? group_size, Tensor? channel_scales, Tensor? token_scales, str? schedule) -> Tensor",
    "gptq_marlin_24_gemm(Tensor a, Tensor b_q_weight, Tensor b_meta, Tensor b_scales, Tensor workspace, int b_q_type,"
    " SymInt size_m, SymInt size_n, SymInt size_k) -> Tensor",
)


def times(a: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    return (a.double() @ dense.double().T).to(a.dtype)


def bits_of(kind: int) -> int:
    return kind >> 8 & 255


def repack(packed, perm, k, n, bits, eight):  # type: ignore[no-untyped-def]
    assert perm.numel() == 0
    assert not eight
    return layouts.pack_marlin_codes(layouts.unpack_fields(packed.T, bits, k), bits)


def marlin(a, c, codes, bias, scales, *rest):  # type: ignore[no-untyped-def]
    *none, locks, kind, m, n, k, full, atomic, wide, _ = rest
    assert none == [None] * 5
    assert c is None
    assert bias is None
    assert locks.dtype == torch.int32
    assert (m, n, k) == (a.shape[0], N, K)
    assert (full, atomic, wide) == (True, False, True)
    bits, groups = bits_of(kind), scales.shape[0]
    unpacked = layouts.unpack_marlin_codes(codes, bits).double()
    table = layouts.marlin_scales_from_file(scales, groups > 1).double()
    return times(a, (unpacked - (kind >> 17 & 255)) * table.repeat_interleave(k // groups, 1))


def prepack(packed, dtype, kind, scales_dtype):  # type: ignore[no-untyped-def]
    assert packed.stride(0) == 1, "Machete wants k to run fastest"
    assert dtype == scales_dtype
    return packed


def machete(a, codes, kind, out, scales, zeros, group, *none):  # type: ignore[no-untyped-def]
    assert (out, zeros, *none) == (None,) * 5
    unpacked = layouts.unpack_fields(codes.T, bits_of(kind), K).double()
    size = K if group == -1 else group
    return times(a, (unpacked - (kind >> 17 & 255)) * scales.T.double().repeat_interleave(size, 1))


def marlin_24(a, codes, positions, scales, locks, kind, m, n, k):  # type: ignore[no-untyped-def]
    assert locks.numel() == n // 128 * 64
    file = {"B_24": codes, "B_meta": positions, "s": scales}
    size = None if scales.shape[0] == 1 else k // scales.shape[0]
    weight = FORMATS["marlin_24"].decode(file, Declared(bits=bits_of(kind), group_size=size or -1))
    return times(a, reference.dequantize(weight, torch.float64))


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in zip(SCHEMAS, (repack, marlin, prepack, machete, marlin_24), strict=True):
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CPU")
    yield
    library._destroy()


@pytest.fixture
def multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=7))


def error_of(one: Implementation, scheme: str, dtype: torch.dtype, m: int = 5) -> float:
    weights = Weights(K, N, parse_scheme(scheme), dtype, CPU)
    x = torch.randn((m, K), generator=torch.Generator().manual_seed(3)).to(dtype)
    prepared = one.prepare(weights)
    assert prepared.nbytes > 0
    return check.error(prepared.call(x), check.truth(x, weights, one.takes)) / check.TOLERANCE[dtype]


def test_the_number_of_a_scalar_type() -> None:
    assert _scalar_type(4) == 1125899907892224  # vLLM's uint4b8


@pytest.mark.parametrize("scheme", ["int4-g128", "int4-channel", "int8-g64", "dense-int4-g128"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("one", [Marlin(), Machete()], ids=lambda one: one.name)
def test_dense_rivals_get_the_dense_weight(
    one: Implementation, scheme: str, dtype: torch.dtype, multiprocessors: None
) -> None:
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    assert one.why_not(Point(K, N, 5, name, parse_scheme(scheme))) is None
    assert error_of(one, scheme, dtype) < 0.2


@pytest.mark.parametrize("scheme", ["int4-g128", "int4-channel", "int8-g128", "int8-channel"])
def test_the_kernel_of_2024_gets_its_own_format(scheme: str) -> None:
    assert Marlin24().why_not(Point(K, N, 5, "fp16", parse_scheme(scheme))) is None
    assert error_of(Marlin24(), scheme, torch.float16) < 0.2


def write_package(folder: Path, name: str, files: dict[str, str]) -> None:
    for file, text in files.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / file).write_text(text)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins for humming-kernels 0.1.20 and gemlite 0.6 with the parts of their interfaces that are used."""
    humming = """
import torch
class HummingLayer(torch.nn.Module):
    def __init__(self, shape_n, shape_k, weight_config, torch_dtype):
        super().__init__()
        self.config, self.k, self.n, self.dtype = weight_config, shape_k, shape_n, torch_dtype
        assert weight_config["quant_method"] == "gptq"
    def load_from_tensors(self, tensors):
        assert tensors["qweight"].shape == (self.k * self.config["bits"] // 32, self.n)
        assert tensors["scales"].shape == (self.k // self.config["group_size"], self.n)
        self.tensors = tensors
    def transform(self):
        from spearfish import layouts
        bits = self.config["bits"]
        codes = layouts.unpack_fields(self.tensors["qweight"].T, bits, self.k).double() - (1 << bits - 1)
        scales = self.tensors["scales"].T.double().repeat_interleave(self.config["group_size"], 1)
        self.weight = torch.nn.Parameter(codes * scales, requires_grad=False)
    def forward(self, x):
        return (x.double() @ self.weight.T).to(self.dtype)
"""
    gemlite = """
import torch
class DType:
    FP16, BF16 = torch.float16, torch.bfloat16
class GemLiteLinear(torch.nn.Module):
    def __init__(self, W_nbits, group_size, in_features, out_features, input_dtype, output_dtype):
        super().__init__()
        self.group, self.dtype = group_size, output_dtype
    def pack(self, W_q, scales, zeros, bias):
        table = scales.double().repeat_interleave(self.group, 1)
        self.register_buffer("W", (W_q.double() - zeros) * table)
    def forward(self, x):
        return (x.double() @ self.W.T).to(self.dtype)
"""
    write_package(tmp_path, "humming", {"__init__.py": "", "layer.py": humming})
    write_package(tmp_path, "gemlite", {"__init__.py": gemlite})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    yield
    for name in ("humming", "humming.layer", "gemlite"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("scheme", ["int4-g128", "int8-channel"])
@pytest.mark.parametrize("one", [Humming(), GemLite()], ids=lambda one: one.name)
def test_rivals_that_are_packages(one: Implementation, scheme: str, packages: None) -> None:
    assert one.why_not(Point(K, N, 5, "bf16", parse_scheme(scheme))) is None
    assert error_of(one, scheme, torch.bfloat16) < 0.2


@pytest.mark.parametrize(
    ("one", "word", "dtype", "m", "why"),
    [
        (TinyGemm(), "int4-g128", "fp16", 1, "takes bfloat16"),
        (TinyGemm(), "int4-channel", "bf16", 1, "groups of 32"),
        (TinyGemm(), "int8-g128", "bf16", 1, "takes 4 bit"),
        (TinyGemm(), "int4-g128", "bf16", 1024, "few tokens"),
        (Marlin24(), "int4-g128", "bf16", 1, "takes float16"),
        (Marlin24(), "dense-int4-g128", "fp16", 1, "2:4 weights only"),
        (CuSparseLt(), "int4-g128", "fp16", 8, "takes 16-bit"),
        (CuSparseLt(), "f16", "fp16", 9, "multiples of 8"),
        (Marlin(), "f16", "fp16", 1, "takes 4 and 8 bit"),
        (Machete(), "int4-g128-asym", "fp16", 1, "no zero points"),
        (Humming(), "int4-g128", "fp16", 1, "not installed"),
        (GemLite(), "int4-g128", "fp16", 1, "not installed"),
    ],
)
def test_a_rival_says_why_it_takes_no_part(one: Implementation, word: str, dtype: str, m: int, why: str) -> None:
    assert why in (one.why_not(Point(K, N, m, dtype, parse_scheme(word))) or "")


def test_without_a_library_its_operators_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spearfish.bench.peers._operator", lambda name: None)
    point = Point(K, N, 8, "fp16", parse_scheme("int4-g128"))
    reasons = {one.name: one.why_not(point) for one in all_peers()}
    for name in ("marlin", "machete", "marlin_24 (2024)"):
        assert "--peer-lib" in (reasons[name] or "")
    assert all(reasons.values()), "no rival runs on a machine that has none"


def test_a_library_that_does_not_load_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(b"no library")
    with pytest.raises(UnsupportedError, match=r"lib\.so does not load into torch"):
        load_libraries([path])


def test_a_library_is_remembered_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(b"some library")
    monkeypatch.setattr(torch.ops, "load_library", lambda name: None)
    assert load_libraries([path]) == {"lib.so": hashlib.sha256(b"some library").hexdigest()[:12]}
