"""A table of products for compute-sanitizer: every kind of weight, both dtypes, one beside the tile, split and unsplit.

`make sanitize` (tests/gpu/sanitize.py) runs this file under every tool. Alone, without a tool, it is a quick test:

    PYTHONPATH=src python tests/gpu/sanitizer_set.py [--families portable hopper unpack] [--seconds 30]

What is not ours stays out, so that the tools have little to look at: weights are made, rounded and compared on the CPU,
and only the kernels themselves run. Torch's caching allocator is off: each tensor is an allocation of its own, and one
byte too far is seen. The order is random, so that a run that `--seconds` cuts off has met a bit of everything. Two
options are for racecheck: `--few`, since it is slow, the kinds that differ in more than how a register is unpacked; and
`--every-lane`, since it does not always see that the lanes of a warp have met before one of them gives a stage of the
ring back: then each lane says so itself. The last line is JSON: cases and launches.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

if __name__ == "__main__":  # before torch is imported
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from gpu_reference import ROUNDING, compile_all, expect, random_weight
from torch.nn import functional

from spearfish import reference
from spearfish.kernels import config as cut
from spearfish.kernels import hopper, jit
from spearfish.kernels.choose import families
from spearfish.kernels.config import Chip, Problem, chip_of
from spearfish.kernels.prepare import PreparedWeight, to_stream
from spearfish.kernels.unpack import unpack_rows
from spearfish.scheme import QuantScheme

KINDS = (
    QuantScheme(4, 128),
    QuantScheme(4),
    QuantScheme(4, 32),
    QuantScheme(4, 64, symmetric=False),
    QuantScheme(8, 128),
    QuantScheme(8),
    QuantScheme(16),
    QuantScheme(4, 128, sparsity="dense"),
    QuantScheme(8, 32, symmetric=False, sparsity="dense"),
)
# n and k of one tile (64 x 128) and one step beside it (4: what 2:4 allows; 64: what Hopper's kernels take), of many
# tiles with ragged edges, and deep enough for every way to share k; the last two for Hopper's kernels alone.
ONE_TILE = ((63, 124), (64, 128), (65, 132), (65, 192))
MANY_TILES = ((200, 1064), (129, 4100))
OF_64 = ((200, 1088), (129, 4160))
EXTRA_BLOCKS = (4600, 4160)  # leaves a third of an H200 free
# Around every block of tokens that a kernel has: 8, 16, 32, 64, 128.
TOKENS = (1, 7, 9, 16, 17, 33, 64, 65, 129)
FEW_KINDS = (QuantScheme(4, 128), QuantScheme(8), QuantScheme(8, 128, symmetric=False, sparsity="dense"))


@dataclass(frozen=True)
class Case:
    """One product; all families and the first and last way of each to cut each of its shapes run it."""

    scheme: QuantScheme
    dtype: torch.dtype
    n: int
    k: int
    m: int

    def __str__(self) -> str:
        return f"{self.scheme}, {self.dtype}, n = {self.n}, k = {self.k}, m = {self.m}"


def table(few: bool) -> list[Case]:
    """All cases, in an order that is random and always the same."""
    if few:
        cases = [Case(scheme, torch.float16, 136, 832, m) for scheme in FEW_KINDS for m in (1, 9, 20, 33, 70)]
        cases += [Case(KINDS[0], torch.float16, *EXTRA_BLOCKS, m) for m in (20, 50)]
    else:
        sizes = [(*size, m) for size in ONE_TILE for m in (1, 9, 65)]
        sizes += [(*size, m) for size in MANY_TILES for m in (1, 9, 17, 33, 65)]
        sizes += [(*size, m) for size in OF_64 for m in TOKENS]
        cases = [Case(scheme, dtype, *size) for scheme in KINDS for dtype in ROUNDING for size in sizes]
        cases += [Case(KINDS[0], torch.float16, *EXTRA_BLOCKS, m) for m in (20, 50, 100)]
    random.Random(0).shuffle(cases)
    return cases


def problem_of(case: Case, prepared: PreparedWeight) -> Problem:
    bf16 = case.dtype == torch.bfloat16
    return Problem(prepared.kind, bf16, case.m, case.n, case.k, prepared.granules, prepared.has_zeros)


def ways(family: Any, problem: Problem, chip: Chip) -> list[Any]:
    """Of each shape the first and the last legal configuration: k whole, and in the most parts."""
    by_shape: dict[Any, list[Any]] = {}
    for config in family.candidates(problem, chip):
        if family.why_not(config, problem, chip) is None:
            by_shape.setdefault(getattr(config, "shape", config), []).append(config)
    return [config for same in by_shape.values() for config in dict.fromkeys((same[0], same[-1]))]


@cache
def weight_of(scheme: QuantScheme, dtype: torch.dtype, n: int, k: int) -> tuple[torch.Tensor, PreparedWeight]:
    """Dense in float64 on the CPU, and the stream on the GPU."""
    weight = random_weight(scheme, n, k, dtype, device="cpu")
    made = to_stream(weight, "cpu", dtype)
    scale = None if made.column_scale is None else made.column_scale.cuda()
    return reference.dequantize(weight, torch.float64), replace(made, stream=made.stream.cuda(), column_scale=scale)


def run_case(case: Case, names: list[str]) -> Counter[str]:
    """Launches of each kernel. Raises AssertionError for a wrong result."""
    launches: Counter[str] = Counter()
    make = torch.Generator().manual_seed(case.m)
    dense, prepared = weight_of(case.scheme, case.dtype, case.n, case.k)
    problem, chip = problem_of(case, prepared), chip_of(0)
    mine = names if (case.n, case.k) not in (*OF_64, EXTRA_BLOCKS) else [name for name in names if name == "hopper"]
    gemms = [family for family in families() if family.name in mine and family.name != "unpack"]
    todo = [(family, config) for family in gemms for config in ways(family, problem, chip)]
    x = torch.randn((case.m, case.k), generator=make).to(case.dtype)
    bias = torch.randn(case.n, generator=make).to(case.dtype)
    if todo:
        expected = expect(x, dense, bias)
        there, there_bias = functional.pad(x, (0, -case.k % 8)).cuda(), bias.cuda()
    for family, config in todo:
        y = torch.full((case.m, case.n), float("nan"), dtype=case.dtype, device="cuda")
        family.bind(config, problem, 0)(there, prepared.stream, prepared.column_scale, there_bias, y)
        judge(lambda y=y: expected.check(y.cpu()), f"{case}, {family.name}, {config}")
        launches[family.name] += 1
    if "unpack" in mine:  # the kernel alone; the product that follows it is the library's
        shape = (problem.n_tiles * 64, problem.k_tiles * 128)
        there = torch.full(shape, float("nan"), dtype=case.dtype, device="cuda")
        unpack_rows(problem, prepared.stream, prepared.column_scale, 0, there)
        made = there.cpu()[: case.n, : case.k].double()
        right = (made - dense).abs() <= dense.abs() * 2.02 * ROUNDING[case.dtype] + 1e-7
        judge(lambda: check_all(right), f"{case}, unpack")
        launches["unpack"] += 1
    return launches


def check_all(right: torch.Tensor) -> None:
    assert right.all(), f"{int((~right).sum())} of {right.numel()} wrong"


def judge(check: Callable[[], None], what: str) -> None:
    try:
        check()
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


# A fault for each tool, so that it is known to look. `data` has `size` numbers, of which nothing is set.
PLANTED = """
struct Params { int* data; int size; };
extern "C" __global__ void memcheck(const __grid_constant__ Params p) { p.data[p.size + threadIdx.x] = 1; }
extern "C" __global__ void initcheck(const __grid_constant__ Params p) { p.data[threadIdx.x] += 1; }
extern "C" __global__ void synccheck(const __grid_constant__ Params p) {
  if (threadIdx.x < 48) __syncthreads();
  p.data[threadIdx.x] = 1;
}
extern "C" __global__ void racecheck(const __grid_constant__ Params p) {
  __shared__ int shared[128];
  shared[threadIdx.x] = threadIdx.x;
  p.data[threadIdx.x] = shared[127 - threadIdx.x];
}
"""


def plant(tool: str) -> None:
    """Run the fault that `tool` is there to find."""
    data = torch.empty(128, dtype=torch.int32, device="cuda")
    core, arch = jit._need_cuda_core(), jit.architecture(0)
    cubin = core.Program(PLANTED, "c++", options=core.ProgramOptions(arch=arch)).compile("cubin").code
    binary = jit.Binary(jit.Variant("planted", tool, arch), bytes(cubin), jit.Resources(32, 512, 0, 0, 0))
    launcher = jit.Function(binary, 0).launcher((1, 1, 1), 128, 0, 16)
    struct.pack_into("<Qi", launcher.params, 0, data.data_ptr(), data.numel())
    launcher.launch(jit.current_stream(0))
    torch.cuda.synchronize()


def let_every_lane_arrive() -> None:
    for module, name in ((hopper, "_macros"), (cut, "macros")):
        made = getattr(module, name)
        setattr(module, name, lambda *asked, made=made: (*made(*asked), ("EVERY_LANE_ARRIVES", 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [family.name for family in families()]
    parser.add_argument("--families", nargs="+", choices=names, default=names, help="whose kernels to run")
    parser.add_argument("--few", action="store_true", help="a few cases, for racecheck")
    parser.add_argument(
        "--every-lane", action="store_true", help="every lane of a warp arrives at mbarriers, for racecheck"
    )
    parser.add_argument("--seconds", type=float, default=30, help="begin no case after that time")
    parser.add_argument("--compile", action="store_true", help="only compile all kernels, before a tool slows it down")
    parser.add_argument("--plant", choices=("memcheck", "initcheck", "synccheck", "racecheck"), help="only a fault")
    arguments = parser.parse_args()
    if arguments.every_lane:
        let_every_lane_arrive()
    if arguments.compile:
        print(compile_all())
        return
    if arguments.plant:
        plant(arguments.plant)
        return
    torch.set_num_threads(2)  # several of these run at a time
    started, cases, done, launches = time.monotonic(), table(arguments.few), 0, Counter()
    for case in cases:
        if time.monotonic() - started > arguments.seconds:
            break
        launches += run_case(case, arguments.families)
        done += 1
    torch.cuda.synchronize()
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"cases": done, "of": len(cases), "launches": dict(launches), "seconds": seconds}))


if __name__ == "__main__":
    main()
