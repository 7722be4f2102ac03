"""Run the fuzz campaign: `python tests/fuzz/campaign.py --seconds 60`, or `make fuzz`.

Two ways to find inputs. `mutate`: structure-aware mutation of the seeds and of a pool of inputs that were taken for
good or brought a new message. `atheris`: the same mutations, steered by the branches that an input reaches (libFuzzer
under the hood; needs the package atheris). Every execution is watched: only a SpearfishError may come out, within
SECONDS, nothing outside the sandbox may be opened, nothing may be executed, and memory must stay flat.

A finding is written to tests/fuzz/corpus/ and named; `--replay FILE` runs one input again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
CORPUS = HERE / "corpus"
SECONDS = 5.0  # for one input of at most 64 KiB
GROWTH = 256 << 20  # bytes that a whole process may grow beyond its size after the seeds


class TooSlow(BaseException):
    """The time of one input is over. No Exception, so that no reader can swallow it."""


class Forbidden(BaseException):
    """A reader opened or executed what it must not."""


_FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class")


class Guard:
    """Audit hook and timer around one execution."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.active = False
        places = {sys.prefix, sys.base_prefix, *filter(None, sys.path)}
        sys.dont_write_bytecode = True  # or a first import inside of an execution would write
        self.libraries = tuple(str(Path(path).resolve()) for path in places)
        sys.addaudithook(self._hook)
        signal.signal(signal.SIGALRM, self._alarm)

    def _alarm(self, *_: Any) -> None:
        raise TooSlow

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.fsdecode(arguments[0])
            if path.startswith("/proc/"):
                return
            real = os.path.realpath(path)
            if not (real.startswith(self.root) and "forbidden" not in real) and not self._library(real, arguments):
                raise Forbidden(f"opened {path}")
        elif event in _FORBIDDEN or event.startswith("socket."):
            raise Forbidden(f"{event} {arguments!r}")

    def _library(self, real: str, arguments: tuple[Any, ...]) -> bool:
        _, mode, flags = arguments
        writing = set(str(mode or "")) & set("wax+") or int(flags or 0) & (os.O_WRONLY | os.O_RDWR)
        return not writing and real.startswith(self.libraries)

    @contextlib.contextmanager
    def watch(self) -> Any:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        self.active = True
        try:
            yield
        finally:
            self.active = False
            signal.setitimer(signal.ITIMER_REAL, 0)


class Runner:
    """Executes inputs and keeps the books."""

    def __init__(self, only: str | None = None) -> None:
        import targets
        import torch

        from spearfish.errors import SpearfishError

        torch.set_num_threads(1)
        self.ours = SpearfishError
        self.box = targets.Sandbox()
        self.targets = [t for t in targets.make_targets(self.box) if only is None or t.name.startswith(only)]
        self.guard = Guard(self.box.root)
        self.counts: dict[str, Counter[str]] = {t.name: Counter() for t in self.targets}
        self.slowest: dict[str, float] = {}
        self.findings: dict[str, str] = {}
        self.last = ""
        for target in self.targets:
            for seed in target.seeds:
                if self.execute(target, seed) != "accepted" and target.name not in ("cache", "text"):
                    self.counts[target.name]["bad seeds"] += 1
        self.start_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def execute(self, target: Any, data: bytes) -> str:
        """One input: "accepted", "refused" or "finding"."""
        begin = time.process_time()  # on a busy machine the clock tells of the others
        try:
            with self.guard.watch():
                outcome = "accepted" if target.run(data) else "refused"
            self.last = outcome
        except self.ours as error:
            outcome = "refused"
            self.last = re.sub(r"[\d.e+-]+|'[^']*'", "#", str(error))[:120]
        except (Exception, TooSlow, Forbidden) as error:  # noqa: BLE001 (whatever else escapes is what we look for)
            outcome = "finding"
            self._note(target.name, data, error)
        took = time.process_time() - begin
        self.slowest[target.name] = max(self.slowest.get(target.name, 0), took)
        self.counts[target.name]["executions"] += 1
        self.counts[target.name][outcome] += 1
        return outcome

    def _note(self, name: str, data: bytes, error: BaseException) -> None:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "spearfish" in f.filename]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
        key = f"{name.partition('-')[0]} {type(error).__name__} {place}"
        if key not in self.findings:
            self.findings[key] = f"{type(error).__name__}: {str(error)[:200]}"
            CORPUS.mkdir(exist_ok=True)
            file = CORPUS / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
            file.write_bytes(data)
            print(f"FINDING {key}: {self.findings[key]} ({file.name})", flush=True)
            if os.environ.get("FUZZ_TRACE"):
                traceback.print_exception(error)

    def growth(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self.start_rss

    def summary(self, mode: str, seconds: float) -> dict[str, Any]:
        return {
            "mode": mode,
            "seconds": round(seconds),
            "cpu_seconds": round(time.process_time()),
            "executions": sum(c["executions"] for c in self.counts.values()),
            "findings": self.findings,
            "memory_growth_mib": round(self.growth() / 2**20),
            "slowest_cpu_ms": {name: round(1000 * took, 1) for name, took in self.slowest.items()},
            "targets": {name: dict(c) for name, c in self.counts.items()},
            "versions": versions(),
        }


def versions() -> dict[str, str]:
    import importlib.metadata as metadata

    found = {"python": platform.python_version()}
    for package in ("torch", "safetensors", "atheris", "spearfish"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def by_mutation(runner: Runner, seconds: float, runs: int, seed: int) -> None:
    """Structure-aware mutation; inputs that were accepted or brought a new message join a small pool."""
    from mutate import mutate

    rng = random.Random(seed)
    pools = {t.name: list(t.seeds) for t in runner.targets}
    seen: dict[str, set[str]] = {t.name: set() for t in runner.targets}
    weights = [t.weight for t in runner.targets]
    end, done = time.monotonic() + seconds, 0
    while time.monotonic() < end and done < runs:
        (target,) = rng.choices(runner.targets, weights)
        pool = pools[target.name]
        for _ in range(16):
            data = mutate(target, rng.choice(pool if rng.random() < 0.5 else target.seeds), rng)
            if runner.execute(target, data) != "finding" and runner.last not in seen[target.name]:
                seen[target.name].add(runner.last)
                pool.append(data) if len(pool) < 300 else pool.__setitem__(rng.randrange(300), data)
            done += 1


def by_coverage(runner: Runner, seconds: float, runs: int, seed: int, close: Callable[[], int]) -> None:
    """libFuzzer steers; our mutations stand in for its own half of the time."""
    import atheris
    from mutate import mutate

    (target,) = runner.targets
    corpus = runner.box.root / "atheris"
    corpus.mkdir()
    for i, data in enumerate(target.seeds):
        (corpus / f"seed-{i}").write_bytes(data)

    end = time.monotonic() + seconds

    def one(data: bytes) -> None:
        runner.execute(target, data)
        if time.monotonic() > end or runner.counts[target.name]["executions"] >= runs:
            code = close()  # libFuzzer would end the process without a word to Python
            sys.stdout.flush()
            os._exit(code)

    def custom(data: bytes, limit: int, number: int) -> bytes:
        rng = random.Random(number)
        changed = mutate(target, data, rng) if rng.random() < 0.7 else atheris.Mutate(data, limit)
        return changed[:limit]

    arguments = [sys.argv[0], str(corpus), f"-seed={seed}"]
    arguments += ["-max_len=65536", "-verbosity=0", "-rss_limit_mb=8192", "-print_final_stats=0"]
    atheris.Setup(arguments, one, custom_mutator=custom)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("mutate", "atheris"), default="mutate")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--runs", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", help="only targets whose name begins so; atheris needs exactly one")
    parser.add_argument("--log", type=Path, help="append the summary as one line of JSON")
    parser.add_argument("--replay", type=Path, nargs="+", help="run these inputs (TARGET-...) once")
    options = parser.parse_args()
    if options.mode == "atheris":
        import atheris

        with atheris.instrument_imports(include=["spearfish.checkpoint", "spearfish.formats", "spearfish.text"]):
            runner = Runner(options.target)
    else:
        runner = Runner(options.target)
    if options.replay:
        os.environ["FUZZ_TRACE"] = "1"
        for file in options.replay:
            name = file.name.rpartition("-")[0]
            for target in runner.targets:
                if target.name == name:
                    print(file.name, runner.execute(target, file.read_bytes()), runner.last)
        return bool(runner.findings)
    begin = time.monotonic()

    def close() -> int:
        summary = runner.summary(options.mode, time.monotonic() - begin)
        if options.log:
            with options.log.open("a") as log:
                log.write(json.dumps(summary) + "\n")
        print(
            f"{options.mode}: {summary['executions']} executions in {summary['seconds']} s,"
            f" {len(runner.findings)} findings"
        )
        runner.box.close()
        return bool(runner.findings) or runner.growth() > GROWTH

    if options.mode == "atheris":
        by_coverage(runner, options.seconds, options.runs, options.seed, close)
    by_mutation(runner, options.seconds, options.runs, options.seed)
    return close()


if __name__ == "__main__":
    sys.exit(main())
