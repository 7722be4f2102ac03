"""The scripts of tests/gpu that are too long to be tests, as far as they go without a GPU: tables, verdicts, draws."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import sanitize
import sanitizer_set
import soak
from gpu_reference import random_weight

from spearfish.kernels import config, hopper, jit, portable
from spearfish.kernels.prepare import TILE_K, TILE_N, kind_of, to_stream

HALF = torch.float16
CLEAN = '{"cases": 9, "of": 9, "launches": {"portable": 40}, "seconds": 3.1}\n========= ERROR SUMMARY: 0 errors\n'


@pytest.mark.parametrize(
    ("status", "output", "wanted"),
    [
        (0, "========= COMPUTE-SANITIZER\n" + CLEAN, "clean"),
        (0, CLEAN.replace('"of": 9', '"of": 486'), "clean, but only 9 of 486 cases in the time"),
        (9, "========= Invalid read\n" + CLEAN.replace(": 0 errors", ": 3 errors"), "3 reports"),
        (0, CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 1 hazard displayed (1 error)"), "1 reports"),
        (
            1,
            "Traceback\n  x\nAssertionError: 1 of 2 wrong\n========= ERROR SUMMARY: 0 errors",
            "failed: AssertionError",
        ),
        (None, "", "out of time"),
        (0, "========= Device not supported", "the tool gave no summary"),
    ],
)
def test_a_run_of_a_tool_is_clean_only_if_it_looked_and_found_nothing(
    status: int | None, output: str, wanted: str
) -> None:
    verdict = sanitize.verdict({"status": status, **sanitize.summary(output)})
    assert verdict == wanted or (wanted.startswith("failed") and verdict.startswith(wanted))


def test_the_table_meets_every_kernel() -> None:
    """Every variant of both families that a Hopper GPU may use, and n and k on either side of a tile."""
    chip, cases, met = config.CHIPS["sm_90"], sanitizer_set.table(few=False), set()
    prepared = {
        (scheme, n, k): to_stream(random_weight(scheme, n, k, HALF, device="cpu"), "cpu", HALF)
        for scheme, n, k in {(case.scheme, case.n, case.k) for case in cases}
    }
    for case in cases:
        problem = sanitizer_set.problem_of(case, prepared[case.scheme, case.n, case.k])
        if (case.n, case.k) not in sanitizer_set.OF_64:
            for way in sanitizer_set.ways(portable.FAMILY, problem, chip):
                met.add((portable.variant_of(way.shape, problem, "sm_90").entry, config.macros(way.shape, problem)))
        for way in sanitizer_set.ways(hopper.FAMILY, problem, chip):
            met.add((hopper._source(way.shape)[1], hopper._macros(way.shape, problem)))
    there = [*portable.FAMILY.variants("sm_90"), *hopper.FAMILY.variants("sm_90a")]
    assert {(variant.entry, variant.macros) for variant in there} == met
    assert {case.n - TILE_N for case in cases} >= {-1, 0, 1}
    assert {case.k - TILE_K for case in cases} >= {-4, 0, 4, 64}
    few = {case.scheme for case in sanitizer_set.table(few=True)}
    assert len(few) == 3
    options = {families: options for tool, families, options in sanitize.RUNS if tool == "racecheck"}
    assert options == {"portable": ("--few", "--every-lane"), "hopper": ("--few", "--every-lane")}


@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_the_planted_faults_compile(tool: str) -> None:
    core = jit._need_cuda_core()
    cubin = core.Program(sanitizer_set.PLANTED, "c++", options=core.ProgramOptions(arch="sm_90")).compile("cubin").code
    assert f".text.{tool}".encode() in bytes(cubin)


def test_a_turn_of_the_soak_can_be_repeated_and_fits_the_memory() -> None:
    turns = [soak.draw(random.Random(f"7:{index}"), index) for index in range(2000)]
    assert turns == [soak.draw(random.Random(f"7:{index}"), index) for index in range(2000)]
    assert all(turn.n >= 1 and turn.k >= 1 and turn.n * turn.k <= 1 << 26 for turn in turns)
    assert all(turn.k % 4 == 0 for turn in turns if turn.scheme.is_sparse)
    assert {turn.n % TILE_N for turn in turns} >= {0, 1, TILE_N - 1} and {turn.k % TILE_K for turn in turns} >= {0, 4}
    assert len({(kind_of(turn.scheme), turn.scheme.symmetric, turn.dtype) for turn in turns}) == 2 * (4 * 2 + 1)
