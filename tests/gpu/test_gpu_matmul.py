"""The kernels on a GPU against the float64 reference: every kind of weight, many shapes, every way to be called."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gpu_reference import check, random_weight
from torch import nn

from spearfish import reference
from spearfish.errors import UnsupportedError
from spearfish.kernels.choose import families
from spearfish.kernels.config import Family, Problem, chip_of
from spearfish.kernels.matmul import matmul, prepare
from spearfish.kernels.prepare import PreparedWeight, from_stream, to_stream
from spearfish.nn import QuantLinear, replace_linears
from spearfish.scheme import QuantScheme, QuantWeight

DTYPES = (torch.float16, torch.bfloat16)
TOKENS = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 128, 257, 1000, 4096)
SCHEMES = [
    QuantScheme(bits, group, symmetric, sparsity)
    for bits, sparsity in itertools.product((4, 8), ("2:4", "dense"))
    for group, symmetric in ((128, True), (None, True), (32, True), (64, False), (96, True), (None, False))
] + [QuantScheme(16)]
# Shapes that crashed somebody's kernel: n or k of one tile, n below 64, k that no tile divides, very wide, very deep.
HARD = [
    (128, 128),
    (8, 5120),
    (24, 5120),
    (48, 896),
    (960, 576),
    (1152, 896),
    (2304, 768),
    (768, 4096),
    (512, 7392),
    (896, 18944),
    (1024, 29568),
    (200, 1004),
]
REAL = [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (59136, 8192)]


def inputs(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    make = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn((m, k), generator=make, device="cuda").to(dtype)


def poisoned(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((m, n), float("nan"), dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_number_of_tokens(scheme: QuantScheme, dtype: torch.dtype) -> None:
    n, k = 328, 1056
    weight = random_weight(scheme, n, k, dtype)
    prepared = prepare(weight, dtype=dtype)
    assert prepared.stream is not None, prepared.path
    bias = torch.randn(n, device="cuda").to(dtype)
    for m in TOKENS:
        x, y = inputs(m, k, dtype, m), poisoned(m, n, dtype)
        matmul(x, prepared, bias, out=y)
        check(y, x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "scheme", [QuantScheme(4, 128), QuantScheme(8), QuantScheme(16), QuantScheme(4, 128, True, "dense")], ids=str
)
@pytest.mark.parametrize(("n", "k"), HARD)
def test_hard_shapes(n: int, k: int, scheme: QuantScheme, dtype: torch.dtype) -> None:
    weight = random_weight(scheme, n, k, dtype)
    prepared = prepare(weight, dtype=dtype)
    for m in (1, 2, 8, 9, 16, 17, 31, 33, 64, 65, 100, 257, 1000):
        x, y = inputs(m, k, dtype, m), poisoned(m, n, dtype)
        check(matmul(x, prepared, out=y), x, weight)


@pytest.mark.parametrize("scheme", [QuantScheme(4, 128), QuantScheme(8, 64)], ids=str)
@pytest.mark.parametrize(("n", "k"), REAL)
def test_real_shapes(n: int, k: int, scheme: QuantScheme) -> None:
    weight = random_weight(scheme, n, k, torch.float16)
    prepared = prepare(weight)
    for m in (1, 16, 64, 300):
        x, y = inputs(m, k, torch.float16, m), poisoned(m, n, torch.float16)
        check(matmul(x, prepared, out=y), x, weight)


@pytest.mark.parametrize("family", [family.name for family in families()])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "scheme",
    [
        QuantScheme(4, 128),
        QuantScheme(8),
        QuantScheme(16),
        QuantScheme(4, 32, False, "dense"),
        QuantScheme(8, 128, True, "dense"),
    ],
    ids=str,
)
def test_every_configuration(family: str, scheme: QuantScheme, dtype: torch.dtype) -> None:
    """Each candidate of each family, also those that the chooser would not take."""
    chosen = next(f for f in families() if f.name == family)
    n, k, m = 448, 2944, 77
    weight = random_weight(scheme, n, k, dtype)
    prepared, x = prepare(weight, dtype=dtype), inputs(m, k, dtype)
    chip = chip_of(torch.cuda.current_device())
    problem = Problem(prepared.kind, dtype == torch.bfloat16, m, n, k, prepared.granules, prepared.has_zeros)
    for config in chosen.candidates(problem, chip):
        if chosen.why_not(config, problem, chip) is None:
            y = poisoned(m, n, dtype)
            bound = chosen.bind(config, problem, torch.cuda.current_device())
            bound(x, prepared.stream, prepared.column_scale, None, y)
            try:
                check(y, x, weight)
            except AssertionError as error:
                raise AssertionError(f"{config}: {error}") from error


def right_and_the_same_three_times(
    family: Family,
    way: Any,
    problem: Problem,
    x: torch.Tensor,
    weight: QuantWeight,
    prepared: PreparedWeight,
    bias: torch.Tensor,
) -> None:
    """`way` of `family` gives the right product, and the same bits whenever it is asked."""
    assert prepared.stream is not None
    bound, results = family.bind(way, problem, torch.cuda.current_device()), []
    for _ in range(3):
        results.append(poisoned(problem.m, problem.n, x.dtype))
        bound(x, prepared.stream, prepared.column_scale, bias, results[-1])
    check(results[0], x, weight, bias)
    assert torch.equal(results[0], results[1]), way
    assert torch.equal(results[0], results[2]), way


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", [QuantScheme(4, 128), QuantScheme(4, 32), QuantScheme(8), QuantScheme(16)], ids=str)
@pytest.mark.parametrize("n", [4600, 9208])
def test_extra_blocks(n: int, scheme: QuantScheme, dtype: torch.dtype) -> None:
    """Layers that leave multiprocessors free, which the shapes of the other tests do not."""
    (family,) = (f for f in families() if f.name == "hopper")
    k, device, count = 4160, torch.cuda.current_device(), 0
    weight = random_weight(scheme, n, k, dtype)
    prepared, bias = prepare(weight, dtype=dtype), torch.randn(n, device="cuda").to(dtype)
    for m in (20, 32, 50, 64, 100):
        x = inputs(m, k, dtype, m)
        problem = Problem(prepared.kind, dtype == torch.bfloat16, m, n, k, prepared.granules, prepared.has_zeros)
        ways = [way for way in family.candidates(problem, chip_of(device)) if way.extras]
        ways = [way for way in ways if family.why_not(way, problem, chip_of(device)) is None]
        count += len(ways)
        for way in ways:
            right_and_the_same_three_times(family, way, problem, x, weight, prepared, bias)
    assert count or chip_of(device).capability != 90


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("n", "k", "m"),
    [
        (448, 1216, 300),  # an output for dozens of blocks
        (4600, 4160, 1000),  # more than one block, fewer than two
        (4100, 640, 513),  # rows of y not aligned
        (12680, 1152, 513),  # more than one output for each block
        (25344, 128, 257),  # two for each, nothing left to share out
        (12800, 256, 2000),  # some whole, then shares
    ],
)
def test_wide_blocks(n: int, k: int, m: int, dtype: torch.dtype) -> None:
    (family,) = (f for f in families() if f.name == "hopper")
    device = torch.cuda.current_device()
    weight = random_weight(QuantScheme(16), n, k, dtype)
    prepared, bias, x = prepare(weight, dtype=dtype), torch.randn(n, device="cuda").to(dtype), inputs(m, k, dtype)
    problem = Problem(prepared.kind, dtype == torch.bfloat16, m, n, k, prepared.granules, prepared.has_zeros)
    ways = [way for way in family.candidates(problem, chip_of(device)) if way.shape.is_wide]
    assert ways or chip_of(device).capability != 90
    for way in ways:
        right_and_the_same_three_times(family, way, problem, x, weight, prepared, bias)


def test_extreme_codes_and_outliers() -> None:
    for scheme, dtype in itertools.product((QuantScheme(4, 128, False), QuantScheme(8, 32, False)), DTYPES):
        weight = random_weight(scheme, 256, 512, dtype, extreme=True)
        x = inputs(33, 512, dtype)
        x[:, ::97] *= 300
        check(matmul(x, prepare(weight, dtype=dtype)), x, weight)


def test_sums_beyond_float16_are_infinite_and_those_within_are_not() -> None:
    """Per column the scale comes after the sum: unscaled sums of 8-bit codes go far beyond float16, results do not."""
    weight = random_weight(QuantScheme(8), 128, 4096, torch.float16, extreme=True)
    x = inputs(16, 4096, torch.float16) * 3000
    truth = reference.matmul(x, weight)
    y = matmul(x, prepare(weight))
    large = truth.abs() > 65520  # half way to the next number that float16 would have
    close = (truth.abs() - 65520).abs() < 200
    assert large.any()
    assert not large.all()
    assert torch.equal(y.isinf() | close, large | close)


def test_x_may_be_any_view() -> None:
    weight = random_weight(QuantScheme(4, 128), 320, 1024, torch.float16)
    prepared = prepare(weight)
    big = inputs(60, 2048, torch.float16)
    for x in (
        big[:, :1024],
        big[:, 3:1027],
        big[:, ::2],
        big[::3, 1024:],
        inputs(1024, 60, torch.float16).T,
        big[:48, :1024].reshape(4, 12, 1024).transpose(0, 1),
        big[:1, :1024].expand(17, 1024),
        big[0, :1024],
    ):
        check(matmul(x, prepared), x, weight)
        assert matmul(x, prepared).shape == (*x.shape[:-1], 320)


def test_y_larger_than_two_to_the_31() -> None:
    n, m = 70000, 31000
    weight = random_weight(QuantScheme(4), n, 64, torch.float16)
    x = inputs(m, 64, torch.float16)
    y = matmul(x, prepare(weight))
    assert y.numel() > 2**31
    for rows in (slice(0, 3), slice(m - 3, m)):
        check(y[rows], x[rows], weight)


def test_the_stream_made_on_the_gpu_is_that_of_the_cpu() -> None:
    for scheme in SCHEMES:
        weight = random_weight(scheme, 200, 300, torch.float16)
        there, here = to_stream(weight, "cuda", torch.float16), to_stream(weight.to("cpu"), "cpu", torch.float16)
        assert torch.equal(there.stream.cpu(), here.stream)
        assert torch.equal(
            reference.dequantize(from_stream(there), torch.float64), reference.dequantize(weight, torch.float64)
        )


def test_memory_after_prepare() -> None:
    weight = random_weight(QuantScheme(4, 128), 4096, 4096, torch.float16).to("cpu")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    prepared = prepare(weight, "cuda")
    held = torch.cuda.memory_allocated() - before
    assert held < 6.8e6
    assert held - prepared.nbytes < 4096


@pytest.mark.parametrize("m", [1, 16, 64, 300])
def test_the_same_bits_in_a_hundred_runs_and_on_two_streams(m: int) -> None:
    weight = random_weight(QuantScheme(4, 128), 4096, 4096, torch.float16)
    prepared, x = prepare(weight), inputs(m, 4096, torch.float16)
    first = matmul(x, prepared)
    for _ in range(100):
        assert torch.equal(matmul(x, prepared), first)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for turn in range(40):
        with torch.cuda.stream(streams[turn % 2]):
            results.append(matmul(x, prepared))
    torch.cuda.synchronize()
    assert all(torch.equal(y, first) for y in results)


def test_threads_with_streams_of_their_own() -> None:
    """Launches from several threads share bound launches and must not share anything else."""
    weight = random_weight(QuantScheme(4, 128), 1024, 4096, torch.float16)
    prepared = prepare(weight)
    xs = [inputs(m, 4096, torch.float16, m) for m in (3, 16, 16, 40)]
    wanted = [matmul(x, prepared) for x in xs]
    torch.cuda.synchronize()

    def work(index: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [matmul(xs[index], prepared) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        return all(torch.equal(y, wanted[index]) for y in results)

    with ThreadPoolExecutor(4) as workers:
        assert all(workers.map(work, range(4)))


@pytest.mark.parametrize("scheme", [QuantScheme(4, 128), QuantScheme(8)], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1024, 4096), (4096, 4096)])
def test_batch_invariant_rows(n: int, k: int, scheme: QuantScheme) -> None:
    weight = random_weight(scheme, n, k, torch.float16)
    prepared = prepare(weight, batch_invariant=True)
    x = inputs(300, k, torch.float16)
    whole = matmul(x, prepared)
    check(whole, x, weight)
    for m in (1, 2, 8, 16, 17, 33, 64, 65, 128):
        assert torch.equal(matmul(x[:m], prepared), whole[:m]), m
        assert torch.equal(matmul(x[300 - m :], prepared), whole[300 - m :]), m


@pytest.mark.parametrize("m", [1, 16, 128])
def test_graphs_replay_with_new_inputs(m: int) -> None:
    weight = random_weight(QuantScheme(4, 128), 2048, 4096, torch.float16)
    prepared, x = prepare(weight), inputs(m, 4096, torch.float16)
    matmul(x, prepared)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = matmul(x, prepared)
        z = matmul(x * 2, prepared)
    for seed in range(5):
        x.copy_(inputs(m, 4096, torch.float16, seed + 1))
        y.fill_(float("nan"))
        graph.replay()
        check(y, x, weight)
        check(z, x * 2, weight)


def test_a_first_call_may_be_inside_a_graph() -> None:
    weight = random_weight(QuantScheme(8, 32), 192, 384, torch.bfloat16)
    prepared, x = prepare(weight, dtype=torch.bfloat16), inputs(3, 384, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = matmul(x, prepared)
    graph.replay()
    check(y, x, weight)


def test_compile_has_no_graph_break() -> None:
    layer = QuantLinear(random_weight(QuantScheme(4, 128), 256, 512, torch.float16), torch.randn(256).half().cuda())
    layer.prepare()
    model = nn.Sequential(layer, nn.GELU())
    x = inputs(5, 512, torch.float16)
    compiled = torch.compile(model, fullgraph=True)
    assert torch.allclose(compiled(x), model(x), atol=2e-3, rtol=2e-3)


def test_the_op_obeys_the_rules_of_torch() -> None:
    prepared = prepare(random_weight(QuantScheme(4, 128), 256, 512, torch.float16))
    x = inputs(5, 512, torch.float16).requires_grad_()
    bias = torch.randn(256, device="cuda", dtype=torch.float16, requires_grad=True)
    facts = (prepared.kind, prepared.n, prepared.k, prepared.granules, prepared.has_zeros, False)
    torch.library.opcheck(torch.ops.spearfish.matmul.default, (x, prepared.stream, None, bias, *facts))


def test_gradients() -> None:
    for scheme in (QuantScheme(4, 128), QuantScheme(8), QuantScheme(16), QuantScheme(4, 32, False, "dense")):
        weight = random_weight(scheme, 256, 512, torch.float16)
        prepared = prepare(weight)
        x = inputs(9, 512, torch.float16).requires_grad_()
        bias = torch.zeros(256, device="cuda", dtype=torch.float16, requires_grad=True)
        seed = inputs(9, 256, torch.float16, 5)
        matmul(x, prepared, bias).backward(seed)
        truth = seed.double() @ reference.dequantize(weight, torch.float64)
        assert float((x.grad.double() - truth).norm() / truth.norm()) < 1e-3
        assert float((bias.grad.double() - seed.double().sum(0)).norm() / seed.double().sum(0).norm()) < 1e-3


def test_what_no_kernel_takes_runs_dense_and_says_why() -> None:
    weight = random_weight(QuantScheme(4, 48), 128, 480, torch.float16)
    prepared = prepare(weight)
    assert prepared.path == "dense: group 48 is not a multiple of 32"
    x = inputs(5, 480, torch.float16)
    check(matmul(x, prepared), x, weight)
    with pytest.raises(UnsupportedError, match="batch_invariant"):
        prepare(weight, batch_invariant=True)


def test_a_layer_moves_between_devices() -> None:
    model = nn.Sequential(nn.Linear(256, 128))
    weight = random_weight(QuantScheme(4, 128), 128, 256, torch.float16)
    replace_linears(model, {"0": weight.to("cpu")})
    x = inputs(5, 256, torch.float16)
    model.half().cuda()
    check(model(x), x, weight, model[0].bias)
    moved = model.cpu().cuda()
    check(moved(x), x, weight, model[0].bias)
    assert torch.equal(model[0].weight.codes, weight.codes)


def test_every_gpu_of_the_process() -> None:
    """Each device has its own module and stream, also when another one is current."""
    weight = random_weight(QuantScheme(4, 128), 256, 512, torch.float16)
    x = inputs(5, 512, torch.float16)
    for index in range(torch.cuda.device_count()):
        device = f"cuda:{index}"
        y = matmul(x.to(device), prepare(weight, device))
        assert y.device == torch.device(device)
        check(y.to(x.device), x, weight)
