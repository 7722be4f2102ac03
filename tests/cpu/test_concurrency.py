"""Several at once: processes at one cold kernel cache, two runs into one folder, threads in one layer."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from spearfish import nn, reference
from spearfish.checkpoint import CheckpointWriter, convert, open_checkpoint
from spearfish.checkpoint.lock import Lock
from spearfish.compress import Recipe, compress
from spearfish.errors import SpearfishError
from spearfish.kernels import jit, matmul
from spearfish.kernels.matmul import prepare
from spearfish.kernels.prepare import PreparedWeight
from spearfish.kernels.unpack import FAMILY
from spearfish.nn import QuantLinear

# ------------------------------------------------------------------------------------------------ the kernel cache

# Forks after the imports, so that eight processes reach the cache within milliseconds of each other.
EIGHT = """
import hashlib, logging, os, sys
from spearfish.kernels import jit, matmul
from spearfish.kernels.unpack import FAMILY
jit._need_cuda_core()
variants = FAMILY.variants("sm_90")[:3]
ready, go = os.pipe(), os.pipe()
for i in range(8):
    if os.fork() == 0:
        code = 1
        try:
            os.read(go[0], 1)
            logging.basicConfig(stream=sys.stdout, format="%(message)s")
            order = variants[i % 3 :] + variants[: i % 3]
            found = {str(v): jit.compile_variant(v) for v in order}
            digests = [hashlib.sha256(found[str(v)].cubin).hexdigest() + str(found[str(v)].resources) for v in variants]
            os.write(1, ("|".join(digests) + "\\n").encode())
            code = 0
        finally:
            os._exit(code)
os.write(go[1], b"x" * 8)
for _ in range(8):
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
print([jit.compile_variant(v).seconds for v in variants])
"""


def eight(cache: Path) -> list[str]:
    environment = {**os.environ, "SPEARFISH_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", EIGHT]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def test_eight_processes_at_a_cold_cache(tmp_path: Path) -> None:
    *lines, seconds = eight(tmp_path)
    assert len(lines) == 8 and len(set(lines)) == 1, lines
    assert seconds == "[0.0, 0.0, 0.0]", "all three kernels are in the cache afterwards"
    left = [path for path in (tmp_path / "kernels").rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert len(left) == 3


# A superuser may write anywhere, so it steps down first, when everything that it needs is loaded.
READ_ONLY = """
import os
from cuda.core.utils import FileStreamProgramCache
from spearfish.kernels import jit, matmul
from spearfish.kernels.unpack import FAMILY
first, second = FAMILY.variants("sm_90")[:2]
jit.compile_variant(second, use_cache=False)
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for variant in (first, second, second):
    binary = jit.compile_variant(variant)
    print(len(binary.cubin), binary.seconds > 0)
"""


def test_a_cache_that_is_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that somebody else has filled serves; what it lacks is compiled, and nothing fails."""
    first, second = FAMILY.variants("sm_90")[:2]
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        monkeypatch.setenv("SPEARFISH_CACHE_DIR", name)
        sizes = [len(jit.compile_variant(first).cubin), len(jit.compile_variant(second, use_cache=False).cubin)]
        jit._cache.cache_clear()
        folders = [Path(name), *(path for path in Path(name).rglob("*") if path.is_dir())]
        for folder in folders:
            folder.chmod(0o555)
        for file in Path(name).rglob("*"):
            if file.is_file():
                file.chmod(0o444)  # cuda-core makes entries for their owner alone
        before = sorted(Path(name).rglob("*"))
        result = subprocess.run([sys.executable, "-c", READ_ONLY], capture_output=True, text=True, timeout=200)
        for folder in folders:
            folder.chmod(0o755)
        assert sorted(Path(name).rglob("*")) == before
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [int(size) for size, _ in lines] == [sizes[0], sizes[1], sizes[1]]
    assert [compiled for _, compiled in lines] == ["False", "True", "True"]


# ------------------------------------------------------------------------------------------------ one folder


def values_folder(out: Path) -> Path:
    weight = tiny.round_to_nearest(torch.randn(64, 128, generator=torch.manual_seed(0)))
    with CheckpointWriter(out, config={"model_type": "llama"}, format="marlin_24") as writer:
        writer.add_weight("model.layers.0.q_proj", weight)
    return out


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    source, out = values_folder(tmp_path / "a"), tmp_path / "out"
    with CheckpointWriter(out, config={}, format="dense") as writer:
        writer.add_tensor("x", torch.ones(1))
        with pytest.raises(SpearfishError, match=r"out is being written by another process; wait for it"):
            convert(source, out, "gptq")
    assert open_checkpoint(out).tensor_names == ["x"], "the first writer was not disturbed"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "out"], "the lock went with it"


def test_a_folder_that_appeared_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    """By another program, which knows nothing of the lock."""
    writer = CheckpointWriter(tmp_path / "out", config={})
    with pytest.raises(SpearfishError, match="exists; choose another name"), writer:
        writer.add_tensor("x", torch.ones(1))
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("years of work")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_compressions_into_one_folder(tmp_path: Path) -> None:
    tiny.llama(hidden_size=64, intermediate_size=64, num_key_value_heads=4).save_pretrained(tmp_path / "dense")
    tiny.save_tokenizer(tmp_path / "dense")
    (tmp_path / "text.txt").write_text(" ".join(tiny.PROSE.split() * 40))
    recipe = Recipe(group_size=64, method="joint", num_samples=4, seq_len=16, calibration=str(tmp_path / "text.txt"))
    refused = []

    def second(stage: str, done: int, total: int, note: str) -> None:
        if stage == "blocks" and done == 1:
            with pytest.raises(SpearfishError, match=r"out\.work is in use by another process") as caught:
                compress(tmp_path / "dense", tmp_path / "out", recipe, fast=False)
            refused.append(caught.value)

    compress(tmp_path / "dense", tmp_path / "out", recipe, fast=False, progress=second)
    assert len(refused) == 1
    assert len(open_checkpoint(tmp_path / "out").linears) == 14
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out", "text.txt"]


def test_a_lock_outlives_no_process(tmp_path: Path) -> None:
    """Held by a process, refused to others, and free at its death by SIGKILL although the file stays."""
    file = tmp_path / "lock"
    program = (
        "import sys; from pathlib import Path; from spearfish.checkpoint.lock import Lock\n"
        "lock = Lock(Path(sys.argv[1]), 'busy'); lock.acquire(); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(SpearfishError, match="busy"):
            Lock(file, "busy").acquire()
        holder.kill()
        holder.wait()
    assert file.exists()
    lock = Lock(file, "busy")
    lock.acquire()
    lock.release()
    lock.release()
    assert not file.exists()


def test_only_one_thread_ever_holds_a_lock(tmp_path: Path) -> None:
    """Locks that are taken and removed all the time: the window between opening and locking is hit often."""
    inside, taken, most = 0, 0, 0
    guard = threading.Lock()

    def work(_: int) -> None:
        nonlocal inside, taken, most
        for _ in range(300):
            lock = Lock(tmp_path / "lock", "busy")
            try:
                lock.acquire()
            except SpearfishError:
                continue
            with guard:
                inside, taken = inside + 1, taken + 1
                most = max(most, inside)
            with guard:
                inside -= 1
            lock.release()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert most == 1 and taken > 100


def test_where_nothing_can_be_locked_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    values_folder(tmp_path / "out")
    assert "cannot be locked" in caplog.text
    assert open_checkpoint(tmp_path / "out").linears


# ------------------------------------------------------------------------------------------------ one layer


def test_threads_prepare_a_new_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = QuantLinear(tiny.round_to_nearest(torch.randn(64, 128)))
    prepared = []

    def slowly(*arguments: Any) -> PreparedWeight:
        prepared.append(threading.get_ident())
        time.sleep(0.2)
        return prepare(*arguments)

    monkeypatch.setattr(nn, "prepare", slowly)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: layer(torch.ones(1, 128)), range(6)))
    assert len(prepared) == 1


def test_threads_share_a_layer() -> None:
    weight = tiny.round_to_nearest(torch.randn(96, 256, generator=torch.manual_seed(0)))
    layer = QuantLinear(weight, bias=torch.randn(96, generator=torch.manual_seed(1)))
    start = threading.Barrier(8)

    def work(i: int) -> None:
        x = torch.randn(1 + i % 5, 256, generator=torch.Generator().manual_seed(i))
        truth = reference.matmul(x.double(), weight, layer.bias.double())
        start.wait()
        results = [layer(x) for _ in range(40)]
        assert all(torch.equal(result, results[0]) for result in results)
        torch.testing.assert_close(results[0].double(), truth, rtol=2e-3, atol=2e-3 * float(truth.abs().max()))

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, i) for i in range(8)]:
            future.result(timeout=100)


def test_a_layer_that_could_not_be_prepared_is_as_before() -> None:
    """Other threads go by `prepared`, so it appears when the bias, too, is where and what it should be."""
    weight = tiny.round_to_nearest(torch.randn(64, 128, generator=torch.manual_seed(0)))
    layer, bias = QuantLinear(weight, torch.randn(64)), torch.randn(64)
    layer.bias = torch.nn.Parameter(bias.to("meta"), requires_grad=False)  # as good as one there is no room for
    with pytest.raises(NotImplementedError, match="meta"):
        layer(torch.ones(1, 128))
    assert layer.prepared is None and layer.weight is weight
    layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    assert torch.equal(layer(torch.zeros(1, 128))[0], bias)


class OneForAll:
    """A family whose kernels do nothing."""

    def bind(self, *_: object) -> Any:
        return lambda *_: None


def test_threads_that_meet_ever_new_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest bound launches are let go while others look, add and let go."""
    for name, value in (("choose", lambda *_: (OneForAll(), None)), ("chip_of", lambda _: None), ("_BOUND_MOST", 3)):
        monkeypatch.setattr(matmul, name, value)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)  # what a tensor on the CPU says, too
    monkeypatch.setattr(matmul, "_bound", {})
    stream = torch.empty(0)
    xs = [torch.empty((m, 8), dtype=torch.float16) for m in range(1, 60)]

    def work(i: int) -> None:
        for turn in range(3000):
            matmul._run(xs[(turn + i * 7) % 59], stream, None, None, stream, ("int4_24", 8, 8, 1, False, False))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert len(matmul._bound) == 3


def test_more_rows_than_a_launch_can_count_are_refused() -> None:
    x = torch.empty((1, 8), dtype=torch.float16).expand(1 << 31, 8)
    with pytest.raises(SpearfishError, match=r"x has 2147483648 rows.*send it in parts"):
        matmul._run(x, x, None, None, x, ("int4_24", 8, 8, 1, False, False))
