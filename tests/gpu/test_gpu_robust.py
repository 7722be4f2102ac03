"""What must not disturb a product: dirty memory, graphs beside eager calls, no room, threads, other processes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from gpu_reference import check, random_weight
from soak import inside_nan, poison

from spearfish.errors import OutOfMemoryError, SpearfishError
from spearfish.kernels import matmul as product
from spearfish.kernels.choose import families
from spearfish.kernels.config import Problem, chip_of
from spearfish.kernels.matmul import matmul, prepare
from spearfish.nn import QuantLinear
from spearfish.scheme import QuantScheme

pytestmark = pytest.mark.usefixtures("compiled")

G128 = QuantScheme(4, 128)
HALF = torch.float16
# How a kernel is asked for; every one of them on every chip that has it.
KERNELS = ["auto", *(family.name for family in families())]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """SPEARFISH_KERNEL asks for it."""
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        return "auto"
    monkeypatch.setenv("SPEARFISH_KERNEL", request.param)
    monkeypatch.setattr(product, "_bound", {})  # what was chosen before
    return str(request.param)


def tokens_of(kernel: str) -> tuple[int, ...]:
    return (65, 100, 300) if kernel == "unpack" else (1, 9, 16, 33, 100, 300)


def inputs(m: int, k: int, seed: int = 0) -> torch.Tensor:
    make = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn((m, k), generator=make, device="cuda").to(HALF)


@pytest.mark.parametrize("k", [4104, 4160])  # the second for kernels that take multiples of 64
@pytest.mark.parametrize("scheme", [G128, QuantScheme(8), QuantScheme(16), QuantScheme(4, 32)], ids=str)
def test_scratch_memory_full_of_nan(scheme: QuantScheme, k: int) -> None:
    """Every configuration of every family that shares out k most, and with x and y surrounded by NaN."""
    n = 200
    weight = random_weight(scheme, n, k, HALF)
    prepared, chip = prepare(weight), chip_of(0)
    streams = [torch.cuda.current_stream()]
    for m in (1, 16, 33, 100):
        problem = Problem(prepared.kind, False, m, n, k, prepared.granules, prepared.has_zeros)
        x = inside_nan(torch.Generator(device="cuda").manual_seed(m), m, k, HALF)
        for family in families():
            by_shape = {
                getattr(config, "shape", config): config
                for config in family.candidates(problem, chip)
                if family.why_not(config, problem, chip) is None
            }
            for config in by_shape.values():
                around = torch.full((m + 2, n), float("nan"), dtype=HALF, device="cuda")
                y = around[1 : m + 1]
                poison(streams)
                family.bind(config, problem, 0)(x, prepared.stream, prepared.column_scale, None, y)
                try:
                    check(y, x, weight)
                    assert around[[0, -1]].isnan().all(), "something was written beyond y"
                except AssertionError as error:
                    raise AssertionError(f"{family.name}, {config}, m = {m}: {error}") from None


def test_a_thousand_replays_between_eager_calls(kernel: str) -> None:
    """The graph and eager calls share weight, launches and streams, and disturb each other in no bit."""
    weight = random_weight(G128, 1024, 4096, HALF)
    prepared, many = prepare(weight), (tokens_of(kernel)[0], 100)
    xs = [inputs(m, 4096, m) for m in many]
    truths = [matmul(x, prepared) for x in xs]
    for x, truth in zip(xs, truths, strict=True):
        check(truth, x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = [matmul(x, prepared) for x in xs]
    other = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(1000):
        for y in replayed:
            y.fill_(float("nan"))
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):  # beside the graph
            beside = matmul(xs[turn % 2], prepared)
        graph.replay()
        after = matmul(xs[turn % 2], prepared)
        torch.cuda.current_stream().wait_stream(other)
        for y, truth in (*zip(replayed, truths, strict=True), (beside, truths[turn % 2]), (after, truths[turn % 2])):
            wrong += (y != truth).any()
    assert int(wrong) == 0, f"{int(wrong)} of 4000 results differ from the first"
    for x in xs:  # a graph reads what is in x when it is replayed
        x.copy_(inputs(*x.shape, seed=77))
    graph.replay()
    for x, y in zip(xs, replayed, strict=True):
        check(y, x, weight)


@contextmanager
def room(nbytes: int) -> Iterator[None]:
    """At most so many bytes more than now."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    filler = []
    try:
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        for size in (64 << 20, 4 << 20):  # what the allocator holds and could still give away
            with suppress(torch.OutOfMemoryError):
                while True:
                    filler.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / total)
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_out_of_memory_is_a_clear_error_and_the_process_goes_on(kernel: str) -> None:
    n, k, m = 57344, 512, 4096
    small, wide, big = (random_weight(G128, *shape, HALF) for shape in ((256, k), (n, k), (n, 8192)))
    big, x, few = big.to("cpu"), inputs(m, k), inputs(tokens_of(kernel)[0], k)
    prepared, there = prepare(small), prepare(wide)
    layer, before = QuantLinear(big, torch.zeros(n, dtype=HALF)), matmul(few, prepared)
    check(before, few, small)
    with room(100 << 20):  # y takes 470 MB, the stream of `big` 184 MB
        for grad in (False, True):  # past torch's dispatcher, and through it
            asked = x.clone().requires_grad_(grad)
            with pytest.raises(
                OutOfMemoryError, match=rf"CUDA out of memory .* x \[{m}, {k}\] .* fewer tokens"
            ) as caught:
                matmul(asked, there)
            assert isinstance(caught.value, SpearfishError)
            assert isinstance(caught.value, RuntimeError)
        with pytest.raises(OutOfMemoryError, match=rf"out of memory .* preparing a weight \[n={n}, k=8192\]"):
            prepare(big, "cuda")
        with pytest.raises(OutOfMemoryError, match="preparing"):
            layer.prepare("cuda")
        assert layer.prepared is None
        assert torch.equal(matmul(few, prepared), before)
        assert torch.equal(matmul(few, prepare(small)), before)
    assert matmul(x, there).isfinite().all()
    assert layer.prepare("cuda")(inputs(tokens_of(kernel)[0], 8192)).isfinite().all()


def test_threads_and_streams_through_one_layer(kernel: str) -> None:
    """A new layer and eight threads, each on a stream of its own, some with the same number of tokens."""
    weight, bias = random_weight(G128, 1024, 2048, HALF), inputs(1, 1024)[0]
    prepared = prepare(weight)
    many = tokens_of(kernel)
    xs = [inputs(many[i % len(many)], 2048, i) for i in range(8)]
    wanted = [matmul(x, prepared, bias) for x in xs]
    for x, y in zip(xs, wanted, strict=True):
        check(y, x, weight, bias)
    product._bound.clear()
    layer, start = QuantLinear(weight, bias.float().cpu()), threading.Barrier(8)
    torch.cuda.synchronize()

    def work(index: int) -> int:
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            wrong = sum((layer(xs[index]) != wanted[index]).any() for _ in range(100))
            return int(wrong)

    with ThreadPoolExecutor(8) as workers:
        assert sum(workers.map(work, range(8))) == 0


def test_a_thread_that_has_not_used_cuda_yet(kernel: str) -> None:
    """Nothing of torch has made the device current there, before a launch and before a kernel is loaded."""
    weight = random_weight(G128, 320, 1024, HALF)
    prepared, m = prepare(weight), tokens_of(kernel)[-1]
    x, y = inputs(m, 1024), torch.full((m, 320), float("nan"), dtype=HALF, device="cuda")
    for known in (False, True):
        if known:
            matmul(x, prepared)
        y.fill_(float("nan"))
        torch.cuda.synchronize()
        with ThreadPoolExecutor(1) as worker:
            worker.submit(matmul, x, prepared, out=y).result()
        torch.cuda.synchronize()
        check(y, x, weight)


def test_arguments_that_kernels_cannot_take_as_they_are(kernel: str) -> None:
    n, k = 320, 1024
    weight = random_weight(G128, n, k, HALF)
    prepared = prepare(weight)
    for m in tokens_of(kernel):
        x = inputs(m, k, m)
        strided = inputs(n, 2)[:, 1]
        check(matmul(x, prepared, strided), x, weight, strided)
        same = x[:1].expand(m, k)  # rows that lie on each other
        check(matmul(same, prepared), same, weight)
        buffer = torch.full((m * n + 2,), float("nan"), dtype=HALF, device="cuda")
        y = buffer[1:-1].view(m, n)  # two bytes beside what a wide store wants
        assert matmul(x, prepared, out=y) is y
        check(y, x, weight)
        assert buffer[[0, -1]].isnan().all()
        with_gradient = x.clone().requires_grad_()
        matmul(with_gradient, prepared, out=y)
        check(y, x, weight)
        assert matmul(x[:0], prepared).shape == (0, n)


# ------------------------------------------------------------------------------------------------ processes


def test_the_compilers_own_cache_is_not_asked(tmp_path: Path) -> None:
    """NVRTC keeps results on disk, and what it finds there comes without the log that tells registers and spills."""
    program = (
        "from spearfish.kernels import jit, portable\n"
        "made = jit.compile_variant(portable.FAMILY.variants('sm_80')[0], use_cache=False)\n"
        "print(made.resources.registers)"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env={**os.environ, "CUDA_CACHE_PATH": str(tmp_path)},
        )
        for _ in range(2)
    ]
    assert [each.returncode for each in said] == [0, 0], said[-1].stderr
    assert said[0].stdout == said[1].stdout


PROCESS = """
import ctypes, hashlib, os, sys
import torch
from cuda.core.utils import FileStreamProgramCache
from gpu_reference import check, random_weight
from spearfish import reference
from spearfish.kernels import jit
from spearfish.kernels.matmul import matmul, prepare
from spearfish.kernels.portable import FAMILY
from spearfish.scheme import QuantScheme

def product(dtype):
    weight = random_weight(QuantScheme(4, 128), 256, 1024, dtype)
    x = torch.ones((3, 1024), dtype=dtype, device="cuda")
    y = matmul(x, prepare(weight, dtype=dtype))
    check(y, x, weight)
    return hashlib.sha256(y.float().cpu().numpy().tobytes()).hexdigest()

compiled = []
run_compiler = jit._run_compiler
jit._run_compiler = lambda variant: compiled.append(variant) or run_compiler(variant)
reader = sys.argv[1] == "reader"
jit._need_cuda_core()
weight, x = random_weight(QuantScheme(4, 128), 256, 1024, torch.float16), torch.ones((3, 1024), device="cuda").half()
check(reference.matmul(x, weight).half(), x, weight)
if reader:  # loads what it needs, then is somebody else, who may write nothing
    jit.compile_variant(FAMILY.variants("sm_80")[0], use_cache=False)
    compiled.clear()
print("ready", flush=True)
sys.stdin.readline()
if reader and os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE, or it could not look into its own /proc
first = product(torch.float16)
if reader:
    assert compiled == [], compiled
    product(torch.bfloat16)
    assert len(compiled) == 1, compiled
print(first, flush=True)
"""


def start(kind: str, cache: str) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    paths = [str(here.parents[1] / "src"), str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    # A forced kernel would have to be there on every chip.
    environment = {
        **os.environ,
        "SPEARFISH_CACHE_DIR": cache,
        "SPEARFISH_KERNEL": "portable",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PROCESS, kind]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def test_eight_processes_at_a_cold_cache_and_one_that_cannot_write_it() -> None:
    with tempfile.TemporaryDirectory() as cache:  # pytest's own folders are closed to other users
        processes = [start("writer", cache) for _ in range(8)] + [start("reader", cache)]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n", process.communicate()[1]
            *writers, reader = processes
            said = [results(process) for process in send(writers)]
            entries = [path for path in Path(cache).rglob("*") if path.is_file() and path.stat().st_size > 1000]
            assert len(entries) == 1, entries
            for path in (Path(cache), *Path(cache).rglob("*")):
                path.chmod(0o555 if path.is_dir() else 0o444)
            said += [results(process) for process in send([reader])]
            assert len(set(said)) == 1, said
        finally:
            for process in processes:
                process.kill()
            for path in (Path(cache), *Path(cache).rglob("*")):
                path.chmod(0o755)


def send(processes: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return processes


def results(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    return out
