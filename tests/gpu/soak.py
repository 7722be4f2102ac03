"""Random products for as long as you like, each result checked against float64.

    PYTHONPATH=src python tests/gpu/soak.py --minutes 8 --seed 1        (or `make soak`)

One turn makes a random weight (kind, groups, sizes, dtype, batch-invariant or not), enqueues several products with it
on several streams at once (tokens, bias, kernel family and configuration at random, or what the library chooses), and
checks every element of every result with the tolerance of the GPU tests. Each x lies inside a larger matrix and each y
inside a longer array, both full of NaN: what is read beyond x spoils the result, what is written beyond y is seen.
Before each turn the memory that the allocator hands out next and the kernels' scratch memory are filled with NaN.

A failure prints one line that repeats its turn alone, and so does a turn that does not end. The last line is JSON with
the counts, which `--out` keeps in a file; exit status 1 if anything failed. Kernels are compiled first; that time does
not count.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_reference import ROUNDING, compile_all, expect, random_weight
from torch.nn import functional

from spearfish import reference
from spearfish.bench import results
from spearfish.errors import SpearfishError
from spearfish.kernels import scratch
from spearfish.kernels.choose import families
from spearfish.kernels.config import Problem, chip_of
from spearfish.kernels.matmul import matmul, prepare
from spearfish.kernels.prepare import PreparedWeight
from spearfish.scheme import QuantScheme

STREAMS = 4
GUARD = 256  # elements of NaN on either side of y; a multiple of the 16 bytes that y is aligned to
MOST_FAILURES = 20
SECONDS_OF_A_TURN = 20


@dataclass(frozen=True)
class Product:
    """y [m, n], by the library's own choice or by one family in one configuration, on one of the streams."""

    m: int
    bias: bool
    family: str
    config: Any
    stream: int

    def __str__(self) -> str:
        how = self.family if self.config is None else f"{self.family} ({self.config})"
        return f"m = {self.m}, {'bias, ' if self.bias else ''}{how}, stream {self.stream}"


@dataclass(frozen=True)
class Turn:
    """A weight and what is done with it; a function of seed and index alone."""

    index: int
    scheme: QuantScheme
    dtype: torch.dtype
    n: int
    k: int
    batch_invariant: bool

    def __str__(self) -> str:
        mode = ", batch-invariant" if self.batch_invariant else ""
        return f"turn {self.index}: {self.scheme}, {self.dtype}, n = {self.n}, k = {self.k}{mode}"


def size(choice: random.Random, most: int, step: int) -> int:
    """A multiple of `step`: mostly beside a multiple of 64, sometimes anything, small ones as often as large ones."""
    top = int(2 ** choice.uniform(3, choice.uniform(3, most.bit_length() - 1)))
    if choice.random() < 0.7:
        top = -(-top // 64) * 64 + choice.choice((-step, 0, 0, 0, 0, step))
    return max(step, top // step * step)


def draw(choice: random.Random, index: int) -> Turn:
    bits = choice.choice((4, 4, 4, 8, 8, 16))
    scheme = QuantScheme(16)
    if bits != 16:
        group = choice.choice((None, 32, 64, 96, 128, 128, 160, 256, 1024))
        scheme = QuantScheme(bits, group, choice.random() < 0.7, choice.choice(("2:4", "2:4", "dense")))
    step = 4 if scheme.is_sparse else 1
    n, k = size(choice, 16384, 1), size(choice, 32768, step)
    k = min(k, (1 << 26) // n // step * step)  # float64 copies of the weight take eight bytes each
    return Turn(index, scheme, choice.choice(tuple(ROUNDING)), n, k, choice.random() < 0.1)


def draw_products(choice: random.Random, turn: Turn, prepared: PreparedWeight) -> list[Product]:
    products: list[Product] = []
    while len(products) < 8:
        most = choice.choice((1, 16, 16, 128, 128, 512, 4096))
        m = choice.randint(1, max(1, min(most, (1 << 24) // max(turn.n, turn.k))))
        problem = problem_of(turn, prepared, m)
        family = choice.choice(("auto", *(family.name for family in families())))
        config = None
        if family != "auto":
            config = pick(choice, family, problem)
            if config is None:
                continue
        products.append(Product(m, choice.random() < 0.5, family, config, choice.randrange(STREAMS)))
    return products


def problem_of(turn: Turn, prepared: PreparedWeight, m: int) -> Problem:
    bf16 = turn.dtype == torch.bfloat16
    facts = prepared.granules, prepared.has_zeros, turn.batch_invariant
    return Problem(prepared.kind, bf16, m, turn.n, turn.k, *facts)


def pick(choice: random.Random, name: str, problem: Problem) -> Any:
    """A legal configuration of the family `name`, or None if it has none."""
    family = next(family for family in families() if family.name == name)
    chip = chip_of(0)
    legal = [config for config in family.candidates(problem, chip) if family.why_not(config, problem, chip) is None]
    return choice.choice(legal) if legal else None


def inside_nan(make: torch.Generator, m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """x [m, k] as a part of a matrix of NaN, its rows 16 bytes and more apart from one another."""
    wide = torch.full((m + 2, -(-k // 8) * 8 + 16), float("nan"), dtype=dtype, device="cuda")
    x = wide[1 : m + 1, 8 : k + 8]
    x.copy_(torch.randn((m, k), generator=make, device="cuda"))
    return x


def poison(streams: list[torch.cuda.Stream]) -> None:
    """NaN in the kernels' scratch memory, and in what the allocator hands out next on each stream."""
    for work in scratch._workspaces.values():
        work.view(torch.float32).fill_(float("nan"))
    for stream in streams:
        with torch.cuda.stream(stream):
            for nbytes in (1 << 12, 1 << 16, 1 << 20, 1 << 25):
                torch.empty(nbytes // 4, device="cuda").fill_(float("nan"))


def run_turn(
    seed: int, index: int, streams: list[torch.cuda.Stream], counts: Counter[str], apart: bool = False
) -> list[str]:
    """One turn; what was wrong with it. `apart`: announce each product and wait for it."""
    choice, make = random.Random(f"{seed}:{index}"), torch.Generator(device="cuda").manual_seed(index)
    turn = draw(choice, index)
    weight = random_weight(turn.scheme, turn.n, turn.k, turn.dtype, seed=index)
    prepared = prepare(weight, dtype=turn.dtype, batch_invariant=turn.batch_invariant)
    if prepared.stream is None:
        return [f"{turn}: runs as {prepared.path!r}"]
    products, cases = draw_products(choice, turn, prepared), []
    for product in products:
        x = inside_nan(make, product.m, turn.k, turn.dtype)
        bias = torch.randn(turn.n, generator=make, device="cuda").to(turn.dtype) if product.bias else None
        around = torch.full((product.m * turn.n + 2 * GUARD,), float("nan"), dtype=turn.dtype, device="cuda")
        cases.append((product, x, bias, around, around[GUARD:-GUARD].view(product.m, turn.n)))
    poison(streams)
    torch.cuda.synchronize()
    for product, x, bias, _, y in cases:
        if apart:
            torch.cuda.synchronize()
            print(f"{turn}; {product}", flush=True)
        with torch.cuda.stream(streams[product.stream]):
            if product.family == "auto":
                matmul(x, prepared, bias, out=y)
            else:
                family = next(family for family in families() if family.name == product.family)
                bound = family.bind(product.config, problem_of(turn, prepared, product.m), 0)
                aligned = functional.pad(x, (0, -turn.k % 8)) if turn.k % 8 else x
                bound(aligned, prepared.stream, prepared.column_scale, bias, y)
    torch.cuda.synchronize()
    dense, wrong = reference.dequantize(weight, torch.float64), []
    for product, x, bias, around, y in cases:
        try:
            expect(x, dense, bias).check(y)
            for guard in (around[:GUARD], around[-GUARD:]):
                assert guard.isnan().all(), "something was written beyond y"
        except AssertionError as error:
            wrong.append(f"{turn}; {product}: {error}")
        counts["products"] += 1
        counts["elements"] += y.numel()
        counts[f"by {product.family}"] += 1
    counts["turns"] += 1
    counts[f"{prepared.kind} {str(turn.dtype).removeprefix('torch.')}"] += 1
    return wrong


def repeat(seed: int, index: int) -> str:
    return f"repeat: python tests/gpu/soak.py --seed {seed} --only {index} --apart"


@contextmanager
def watched(seed: int, index: int) -> Iterator[None]:
    """Ends the process if what is inside does not end: nothing can be done about a kernel that hangs."""

    def give_up() -> None:
        print(f"FAILED turn {index} does not end\n  {repeat(seed, index)}", flush=True)
        os._exit(1)

    timer = threading.Timer(SECONDS_OF_A_TURN, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float)
    length.add_argument("--seconds", type=float)
    length.add_argument("--only", type=int, metavar="TURN", help="one turn, to repeat a failure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--apart", action="store_true", help="name each product and wait for it, to find the one at fault"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the last line there, too")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name(0)}: {compile_all()}", flush=True)
    # The sums of the unpack family are the library's, which may add parts in 16 bits if it is not told otherwise.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    counts: Counter[str] = Counter()
    failures: list[str] = []
    started = told = time.monotonic()
    if arguments.only is None:
        seconds = arguments.seconds if arguments.minutes is None else 60 * arguments.minutes
        first, last = 0, sys.maxsize
    else:
        seconds, first, last = float("inf"), arguments.only, arguments.only + 1
    for index in range(first, last):
        now = time.monotonic()
        if now - started > seconds or len(failures) >= MOST_FAILURES:
            break
        if now - told > 15:
            told = now
            print(f"{now - started:4.0f} s: {counts['turns']} turns, {counts['products']} products", flush=True)
        try:
            with watched(arguments.seed, index):
                wrong, broken = run_turn(arguments.seed, index, streams, counts, arguments.apart), False
        except (SpearfishError, RuntimeError) as error:
            # After most errors of the device nothing more can be run in this process.
            words = " ".join(str(error).split())[:300]
            wrong, broken = [f"turn {index}: {type(error).__name__}: {words}"], True
        for line in wrong:
            print(
                f"FAILED {line}\n  repeat: python tests/gpu/soak.py --seed {arguments.seed} --only {index}", flush=True
            )
        failures += wrong
        if broken:
            break
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": results._commit(),
        "sources": results._sources_digest(),
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - started, 1),
        "failures": len(failures),
        **{name: counts[name] for name in sorted(counts)},
    }
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
