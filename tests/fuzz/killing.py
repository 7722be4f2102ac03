"""Kill compress, convert and the kernel cache at random points, and fill their disk; then look what is left.

`python tests/fuzz/killing.py`, or `make kill`. Each point forks a process, ends it with SIGKILL at a random
moment or at a random file operation, and checks: the output folder is absent, the old one or complete; running again
gives the files of an undisturbed run byte for byte; nothing is left beside them. For a full disk the process may write
only files of a random size, and where the rights allow it there is a real file system of a random size too.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

# A first import inside of a job would count among its file operations, and under a limit leave half a .pyc behind.
sys.dont_write_bytecode = True

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.truncate", "shutil.rmtree")
TIME_VARIES = {"report.json"}  # holds seconds and bytes of memory


class Job:
    """Work that writes into a folder. `run(place)` does it all; `outputs(place)` are the files that count."""

    def __init__(self, name: str, place: Path, run: Callable[[Path], None], outputs: Callable[[Path], Any]) -> None:
        self.name, self.run, self.outputs = name, run, outputs
        self.place = place
        self.prepare: Callable[[Path], None] = lambda place: None
        self.whole: Callable[[Path], str | None] = lambda place: None  # what is wrong with what is there now


def digest(folder: Path) -> dict[str, str] | None:
    """The bytes of a folder's files, or None if it is not there."""
    if not folder.exists():
        return None
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name not in TIME_VARIES)
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def litter(place: Path, allowed: set[str]) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.name not in allowed)


def in_child(work: Callable[[], None], doom: Callable[[], None] | None = None) -> int:
    """Run in a fork; the exit status as of `os.waitstatus_to_exitcode`. 3: ours or the system's error; 4: others."""
    child = os.fork()
    if child == 0:
        code = 4
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            if doom is not None:
                os.dup2(null, 2)
                doom()
            work()
            code = 0
        except (OSError, Exception) as error:  # noqa: BLE001 (the child's status tells)
            from spearfish.errors import SpearfishError

            code = 3 if isinstance(error, OSError | SpearfishError) else 4
            if code == 4 or doom is None:
                traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def at_event(number: int) -> Callable[[], None]:
    """Death at the n-th file operation of Python's own."""

    def doom() -> None:
        left = number

        def hook(event: str, _: Any) -> None:
            nonlocal left
            if event in EVENTS:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)

    return doom


def after(seconds: float) -> Callable[[], None]:
    """Death after a time, by the kernel's own timer: SIGALRM without a handler ends the process on the spot."""

    def doom() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(1e-4, seconds))

    return doom


def file_limit(nbytes: int) -> Callable[[], None]:
    """No file may grow beyond so many bytes; a write there fails, as on a full disk."""

    def doom() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))

    return doom


def count_events(job: Job, place: Path) -> tuple[int, float]:
    """File operations and seconds of an undisturbed run."""
    counter = place.parent / "events"

    def work() -> None:
        count = 0

        def hook(event: str, _: Any) -> None:
            nonlocal count
            count += event in EVENTS

        sys.addaudithook(hook)
        job.run(place)
        counter.write_text(str(count))

    start = time.perf_counter()
    if in_child(work) != 0:
        raise RuntimeError(f"{job.name}: the undisturbed run failed")
    return int(counter.read_text()), time.perf_counter() - start


def attack(job: Job, points: int, seed: int, kinds: tuple[str, ...] = ("event", "time", "limit")) -> Counter[str]:
    """Hit a job at random points. Returns what happened how often; raises AssertionError at the first thing lost."""
    rng, seen = random.Random(seed), Counter[str]()
    base = job.place / f"{job.name}-base"
    base.mkdir()
    job.prepare(base)
    allowed = {path.name for path in base.iterdir()}
    before = job.outputs(base)
    events, seconds = count_events(job, base)
    wanted = job.outputs(base)
    assert wanted is not None and wanted != before
    allowed |= {path.name for path in base.iterdir()}
    largest = max(file.stat().st_size for file in base.rglob("*") if file.is_file())
    for point in range(points):
        kind = kinds[point % len(kinds)]
        place = job.place / f"{job.name}-{point}"
        place.mkdir()
        job.prepare(place)
        doom = {
            "event": lambda: at_event(rng.randint(1, events)),
            "time": lambda: after(rng.uniform(0, 1.02 * seconds)),
            "limit": lambda: file_limit(int(largest * rng.random() ** 2)),
        }[kind]()
        code = in_child(lambda place=place: job.run(place), doom)
        assert code != 4, f"{job.name} {kind}: ended in an error that is neither ours nor the system's"
        left = job.outputs(place)
        outcome = "complete" if left == wanted else "absent or old" if left == before else "partial"
        wrong = job.whole(place)
        assert wrong is None, f"{job.name} {kind} point {point}: {wrong}"
        assert outcome != "partial" or job.name == "cache", f"{job.name} {kind} point {point}: {left}"
        assert in_child(lambda place=place: job.run(place)) == 0, f"{job.name} {kind} {point}: does not go on"
        assert job.outputs(place) == wanted, f"{job.name} {kind} point {point}: not equal to an undisturbed run"
        assert not litter(place, allowed), f"{job.name} {kind} point {point}: left {litter(place, allowed)}"
        ended = "killed" if code < 0 else "error" if code == 3 else "ran through"
        seen[f"{kind}: {ended}, {outcome}"] += 1
        shutil.rmtree(place)
    return seen


# ------------------------------------------------------------------------------------------------ the jobs


def compress_job(place: Path, replacing: bool = False) -> Job:
    """A whole compression of a random two-block Llama, into a new folder or over an old one."""
    import tiny
    from spearfish.checkpoint import verify
    from spearfish.compress import Recipe, compress

    dense = place / "dense"
    if not dense.exists():
        tiny.llama(hidden_size=64, intermediate_size=64, num_key_value_heads=4).save_pretrained(dense)
        tiny.save_tokenizer(dense)
        words = tiny.PROSE.split() * 40
        (place / "text.txt").write_text(" ".join(words))
    recipe = Recipe(group_size=64, method="joint", num_samples=4, seq_len=16, calibration=str(place / "text.txt"))

    def run(folder: Path) -> None:
        torch.set_num_threads(1)
        compress(dense, folder / "out", recipe, fast=False, overwrite=(folder / "out").exists())

    name = "compress-over-old" if replacing else "compress"
    job = Job(name, place, run, lambda folder: digest(folder / "out"))
    if replacing:
        old = place / "old"
        if not old.exists():
            compress(
                dense, old, Recipe(**{**recipe.to_dict(), "seed": 5, "ignore": (), "dense_layers": ()}), fast=False
            )
        job.prepare = lambda folder: shutil.copytree(old, folder / "out") and None

    def whole(folder: Path) -> str | None:
        out = folder / "out"
        if replacing and not out.exists():
            return "the old folder is gone and the new one not there"
        return None if not out.exists() or verify(out).ok else "the folder is there but not whole"

    job.whole = whole
    return job


def convert_job(place: Path) -> Job:
    """A conversion from values to codes."""
    from spearfish import sparse24
    from spearfish.checkpoint import CheckpointWriter, convert, verify
    from spearfish.formats import transforms

    source = place / "values"
    with CheckpointWriter(source, config={"model_type": "llama"}, format="dense") as writer:
        for i in range(12):
            dense = torch.randn(128, 256, generator=torch.manual_seed(i))
            dense = dense * sparse24.magnitude_mask(dense.abs())
            writer.add_weight(f"model.layers.{i}.q_proj", transforms.sparse_values(dense.half()))
    (source / "tokenizer.json").write_text("{}")

    def run(folder: Path) -> None:
        torch.set_num_threads(1)
        convert(source, folder / "out", "marlin_24", overwrite=(folder / "out").exists())

    job = Job("convert", place, run, lambda folder: digest(folder / "out"))
    job.whole = lambda folder: None if not (folder / "out").exists() or verify(folder / "out").ok else "not whole"
    return job


def cache_job(place: Path) -> Job:
    """The kernel cache, cold: three small kernels compiled, kept, and read back."""
    from spearfish.cache import cache_folder
    from spearfish.kernels import jit
    from spearfish.kernels.unpack import FAMILY

    variants = FAMILY.variants("sm_90")[:3]
    jit._need_cuda_core()

    def use(folder: Path) -> list[jit.Binary]:
        os.environ["SPEARFISH_CACHE_DIR"] = str(folder / "cache")
        jit._cache.cache_clear()
        return [jit.compile_variant(variant) for variant in variants]

    def kept(folder: Path) -> Any:
        """What the cache gives: every entry either absent or right."""
        if not (folder / "cache").exists():
            return None
        os.environ["SPEARFISH_CACHE_DIR"] = str(folder / "cache")
        jit._cache.cache_clear()
        cache = jit._cache(str(cache_folder() / "kernels"))
        found = [jit._from_cache(cache, jit._digest(variant), variant) for variant in variants] if cache else []
        return [None if b is None else (hashlib.sha256(b.cubin).hexdigest(), b.resources) for b in found]

    def run(folder: Path) -> None:
        use(folder)

    job = Job("cache", place, run, kept)
    truth = {str(v): jit.compile_variant(v, use_cache=False) for v in variants}
    wanted = [(hashlib.sha256(truth[str(v)].cubin).hexdigest(), truth[str(v)].resources) for v in variants]

    def whole(folder: Path) -> str | None:
        found = kept(folder) or []
        return None if all(a is None or a == b for a, b in zip(found, wanted, strict=False)) else "a wrong binary"

    job.whole = whole
    return job


def full_disk(place: Path, points: int, seed: int) -> Counter[str] | str:
    """compress and convert on a real file system that is too small. Needs the right to mount; says if it lacks it."""
    libc, seen, rng = ctypes.CDLL(None, use_errno=True), Counter[str](), random.Random(seed)
    for job in (compress_job(place / "c"), convert_job(place / "v")):
        base = job.place / "base"
        base.mkdir()
        job.run(base)
        need = sum(file.stat().st_size for file in base.rglob("*") if file.is_file())
        wanted = job.outputs(base)
        for _ in range(points):
            disk = job.place / "disk"
            disk.mkdir(exist_ok=True)
            size = max(8192, int(2.5 * need * rng.random()))
            if libc.mount(b"tmpfs", os.fsencode(disk), b"tmpfs", 0, f"size={size}".encode()) != 0:
                return f"not run: {os.strerror(ctypes.get_errno())}"
            try:
                code = in_child(lambda job=job, disk=disk: job.run(disk), lambda: None)
                assert code in (0, 3), f"{job.name}: an error that is neither ours nor the system's"
                assert job.whole(disk) is None and job.outputs(disk) in (None, wanted), f"{job.name}: a partial folder"
                flags, remount = 0x20, f"size={64 << 20}".encode()  # MS_REMOUNT: room is made
                libc.mount(b"tmpfs", os.fsencode(disk), b"tmpfs", flags, remount)
                assert in_child(lambda job=job, disk=disk: job.run(disk)) == 0
                assert job.outputs(disk) == wanted, f"{job.name}: not equal to an undisturbed run"
                assert not litter(disk, {"out"}), litter(disk, {"out"})
            finally:
                libc.umount(os.fsencode(disk))
            seen[f"{job.name}: {'ran through' if code == 0 else 'error, then resumed'}"] += 1
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=120, help="over all jobs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="append the counts as one line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: dict[str, Any] = {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for part in ("c", "v", "k", "d/c", "d/v"):
            (place / part).mkdir(parents=True)
        jobs = [
            compress_job(place / "c"),
            compress_job(place / "c", True),
            convert_job(place / "v"),
            cache_job(place / "k"),
        ]
        for job in jobs:
            counts[job.name] = dict(attack(job, -(-options.points // len(jobs)), options.seed))
            print(job.name, counts[job.name], flush=True)
        found = full_disk(place / "d", 5, options.seed)
        counts["full disk"] = dict(found) if isinstance(found, Counter) else found
        print("full disk", counts["full disk"])
    if options.log:
        with options.log.open("a") as log:
            log.write(json.dumps({"seconds": round(time.monotonic() - start), "counts": counts}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
