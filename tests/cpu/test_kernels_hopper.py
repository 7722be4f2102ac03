"""The Hopper family without a GPU: what is legal, how memory is laid out, and the machine code of every variant."""

from __future__ import annotations

import csv
import importlib.util
import re
import subprocess
from dataclasses import astuple
from pathlib import Path

import pytest

from spearfish.errors import UnsupportedError
from spearfish.kernels import jit
from spearfish.kernels.choose import choose
from spearfish.kernels.config import CHIPS, Problem
from spearfish.kernels.hopper import FAMILY, HopperConfig, HopperShape, plan, shapes

H200 = CHIPS["sm_90"]
TOKENS = (1, 7, 8, 9, 16, 17, 33, 64, 65, 100, 129, 4096)


def problem(m: int, n: int, k: int, kind: str = "int4_24", granules: int = 1, **more: bool) -> Problem:
    return Problem(kind, False, m, n, k, granules, more.get("has_zeros", False), more.get("batch_invariant", False))


@pytest.mark.parametrize("kind", ["int4_24", "int8_24", "f16_24"])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (8, 576), (1152, 896), (4096, 4096), (57344, 8192), (8192, 28672)])
def test_every_problem_has_a_configuration_that_fits(kind: str, n: int, k: int) -> None:
    for m in TOKENS:
        asked = problem(m, n, k, kind, 0 if kind == "f16_24" else 4)
        legal = [way for way in FAMILY.candidates(asked, H200) if FAMILY.why_not(way, asked, H200) is None]
        assert legal or asked.k_tiles < 2, (m, n, k)
        for way in legal:
            found = FAMILY._plan(way, asked, H200)
            assert found is not None
            assert found.bytes <= H200.shared_per_block
            assert 4 * way.shape.tokens >= min(m, 128)
            assert asked.k_tiles // way.split >= way.shape.groups
            assert 0 < FAMILY.microseconds(way, asked, H200) < 1e6


def test_what_arrives_from_neighbours_never_lies_on_what_is_sent() -> None:
    """Ring, own sums and received sums: apart where they fit, else over the ring but never over the own sums."""
    for shape in shapes("int4_24"):
        for split in (2, 4, 8):
            found = plan(HopperConfig(shape, split), 3200, 64, H200.shared_per_block)
            if found is None:
                continue
            piece = shape.tokens * (shape.block_n // split + 4) * 4
            # The groups of a block add up first, where they can share out the tokens.
            parts = 1 if shape.shares_tokens else shape.groups
            own, received = parts * split * piece, (split - 1) * parts * piece
            ring = found.stages * shape.stage_bytes(3200)
            assert found.received >= own
            assert found.overlaid == (found.received < ring)
            assert found.bytes >= 1024 + max(ring, found.received + received)
            assert found.received % 16 == 0  # bulk copies


def test_more_room_never_means_a_shallower_ring() -> None:
    shape = HopperShape(8, 1, 1, 4, 2)
    depths = [
        found.stages
        for room in range(60 << 10, 228 << 10, 4 << 10)
        if (found := plan(HopperConfig(shape), 3200, 224, room))
    ]
    assert depths == sorted(depths)
    assert depths[-1] > depths[0] >= 2


def test_it_refuses_what_it_cannot_do() -> None:
    way = FAMILY.candidates(problem(1, 4096, 4096), H200)[0]
    assert FAMILY.why_not(way, problem(1, 4096, 4096), H200) is None
    assert "symmetric 2:4" in str(FAMILY.why_not(way, problem(1, 4096, 4096, "int4"), H200))
    assert "symmetric 2:4" in str(FAMILY.why_not(way, problem(1, 4096, 4096, has_zeros=True), H200))
    assert "batch-invariant" in str(FAMILY.why_not(way, problem(1, 4096, 4096, batch_invariant=True), H200))
    assert "multiples of 64 k, not 4104" in str(FAMILY.why_not(way, problem(1, 4096, 4104), H200))
    assert "no Hopper GPU" in str(FAMILY.why_not(way, problem(1, 4096, 4096), CHIPS["sm_80"]))
    assert "without a k tile" in str(FAMILY.why_not(HopperConfig(way.shape, 8), problem(1, 64, 512), H200))
    assert FAMILY.candidates(problem(1, 4096, 4096), CHIPS["sm_100"]) == []


@pytest.mark.parametrize("m", [1, 16, 64, 300, 4096])
def test_it_is_taken_on_hopper_alone(m: int) -> None:
    asked = problem(m, 4096, 4096)
    assert choose(asked, H200)[0].name == "hopper"
    assert choose(asked, CHIPS["sm_80"])[0].name != "hopper"
    assert choose(problem(m, 4096, 4096, has_zeros=True), H200)[0].name != "hopper"
    with pytest.raises(UnsupportedError, match="symmetric 2:4"):
        choose(problem(16, 4096, 4096, has_zeros=True), H200, "hopper")


# ------------------------------------------------------------------------------------------ machine code


def _nvdisasm() -> str:
    places = importlib.util.find_spec("nvidia.cu13").submodule_search_locations  # type: ignore[union-attr]
    return str(next(found for place in places or () if (found := Path(place) / "bin" / "nvdisasm").exists()))


def _instructions(cubin: bytes, folder: Path) -> list[str]:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    text = subprocess.run([_nvdisasm(), "-c", str(path)], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?(.*?)\s*;", text, re.MULTILINE)
    return [re.sub(r"\.reuse", "", line) for line in found]


def overwritten(instructions: list[str]) -> list[tuple[str, str]]:
    """Pairs (wgmma, instruction) where the instruction writes a register that the wgmma, still under way, reads: its A
    fragment or its metadata. In the order of the code, which is also the order of execution inside the main loop."""
    groups: list[list[tuple[str, set[int]]]] = []
    current: list[tuple[str, set[int]]] = []
    found = []
    for line in instructions:
        name, _, rest = line.partition(" ")
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", rest)]
        if name.startswith("HGMMA"):
            # The sums, a and b, the sums again, metadata; a matrix in shared memory is not among the registers.
            first = registers[1]
            reads = set() if rest.count("gdesc") == 2 else {first, first + 1, first + 2, first + 3}
            reads |= {registers[-1]} if ".SP" in name else set()
            current.append((line, reads))
            if "gsb0" in rest:
                groups.append(current)
                current = []
        elif name.startswith("WARPGROUP.DEPBAR"):
            left = int(rest.split(",")[1], 16)
            groups = groups[len(groups) - left :] if left else []
        elif re.match(r"(?:P\d+, )?R\d+\b", rest) and not name.startswith(("ST", "RED", "SYNCS", "BAR", "R2UR")):
            width = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
            writes = set(range(registers[0], registers[0] + width))
            found += [(wgmma, line) for group in (*groups, current) for wgmma, reads in group if reads & writes]
    return found


def test_the_search_finds_what_it_is_for() -> None:
    """Seen once from ptxas 13.0: the next metadata loaded over those of a wgmma that is still running."""
    bad = [
        "HGMMA.SP.64x128x32.F32 R88, R156, gdesc[UR16], R88, R168, 0x0",
        "HGMMA.SP.64x128x32.F32 R88, R152, gdesc[UR16], R88, R169, 0x1, gsb0",
        "LDS.64 R168, [R5+UR5]",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",
        "LDS.64 R168, [R5+UR5]",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
        "LDS.64 R168, [R5+UR5]",
    ]
    assert len(overwritten(bad)) == 4
    assert not overwritten([*bad[:2], "WARPGROUP.DEPBAR.LE gsb0, 0x0", bad[2]])
    assert overwritten([*bad[:2], "HADD2 R159, R1, -1032, -1032"])
    both_in_memory = ["HGMMA.SP.64x128x32.F32 R24, gdesc[UR12], R24, R153, 0x1, gsb0", "LDS R153, [R5]"]
    assert overwritten(both_in_memory)
    assert not overwritten([both_in_memory[0], "LDS R152, [R5]"])


@pytest.mark.parametrize("kind", ["int4_24", "int8_24", "f16_24"])
def test_no_register_of_a_running_wgmma_is_overwritten(
    kind: str, tmp_path: Path, kernels_of_this_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEARFISH_CACHE_DIR", str(kernels_of_this_run))
    variants = [
        v for v in FAMILY.variants("sm_90a") if v.source in ("hopper.cu", "hopper_wide.cu") and _kind(v) == kind
    ]
    assert variants
    for variant in variants:
        binary = jit.compile_variant(variant)
        instructions = _instructions(binary.cubin, tmp_path)
        assert sum(line.startswith("HGMMA.SP") for line in instructions) >= 8
        assert not overwritten(instructions), variant


def _kind(variant: jit.Variant) -> str:
    return {4: "int4_24", 8: "int8_24", 16: "f16_24"}[int(dict(variant.macros)["BITS"])]


# ------------------------------------------------------------------------------------------ the chooser


Points = dict[tuple[int, int, int], dict[HopperConfig, float]]


def _launches(name: str) -> Points:
    """Measured microseconds of each problem (k, n, m), by configuration."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "hopper" / name
    found: Points = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            cut = [int(row[name]) for name in ("tokens", "n_tiles", "m_tiles", "groups")]
            every = (*shapes("int4_24"), *shapes("f16_24"))
            shape = next(shape for shape in every if astuple(shape)[:4] == tuple(cut))
            split, blocks, extras = int(row["split"]), int(row["blocks"]), int(row.get("extras") or 0)
            way = HopperConfig(shape, split, blocks, row["even"] == "True", extras)
            found.setdefault((int(row["k"]), int(row["n"]), int(row["m"])), {})[way] = float(row["us"])
    return found


def test_the_chooser_takes_what_was_measured_to_be_fast() -> None:
    losses = []
    for (k, n, m), times in _launches("launches.csv").items():
        family, way = choose(problem(m, n, k), H200)
        assert family is FAMILY, (k, n, m)
        losses.append(times[way] / min(times.values()))
        assert 0.75 < family.microseconds(way, problem(m, n, k), H200) / times[way] < 1.25, (k, n, m)
    assert len(losses) == 81
    assert max(losses) < 1.15
    assert sum(losses) / len(losses) < 1.015


@pytest.mark.parametrize(
    ("kind", "granules", "file", "points", "worst"),
    [("int8_24", 1, "int8.csv", 54, 1.08), ("f16_24", 0, "wide.csv", 36, 1.12)],
)
def test_the_chooser_takes_what_was_fast_with_more_bits(
    kind: str, granules: int, file: str, points: int, worst: float
) -> None:
    losses = []
    for (k, n, m), times in _launches(file).items():
        asked = problem(m, n, k, kind, granules)
        _, way = choose(asked, H200)
        losses.append(times[way] / min(times.values()))
        assert 0.75 < FAMILY.microseconds(way, asked, H200) / times[way] < 1.25, (k, n, m)
    assert len(losses) == points
    assert max(losses) < worst
    assert sum(losses) / len(losses) < 1.02


def test_wide_blocks_are_for_16_bits_and_many_tokens() -> None:
    wide = next(shape for shape in shapes("f16_24") if shape.is_wide)
    for kind in ("int4_24", "int8_24"):
        assert not any(shape.is_wide for shape in shapes(kind))
        assert "for 16-bit weights" in str(
            FAMILY.why_not(HopperConfig(wide, even=True), problem(512, 64, 128, kind), H200)
        )
    for m, n, k in ((129, 64, 64), (4096, 57344, 8192)):
        asked = problem(m, n, k, "f16_24", 0)
        (way,) = (way for way in FAMILY.candidates(asked, H200) if way.shape.is_wide)
        assert FAMILY.why_not(way, asked, H200) is None
    assert not any(way.shape.is_wide for way in FAMILY.candidates(problem(128, 64, 64, "f16_24", 0), H200))


def test_extra_blocks_are_chosen_where_they_help() -> None:
    losses, gains = [], []
    for (k, n, m), times in _launches("extras.csv").items():
        _, way = choose(problem(m, n, k), H200)
        losses.append(times[way] / min(times.values()))
        if way.extras:
            gains.append(min(time for other, time in times.items() if not other.extras) / times[way])
    assert len(losses) == 44
    assert max(losses) < 1.15
    assert sum(losses) / len(losses) < 1.03
    assert len(gains) > 15
    assert min(gains) > 0.95
    assert sum(gains) / len(gains) > 1.1


@pytest.mark.parametrize("kind", ["int4_24", "int8_24", "f16_24"])
@pytest.mark.parametrize("m", [20, 64, 100])
@pytest.mark.parametrize(("n", "k"), [(9216, 7168), (5120, 27648), (4600, 4160), (10240, 256)])
def test_extra_blocks_have_work_and_room(kind: str, m: int, n: int, k: int) -> None:
    asked = problem(m, n, k, kind)
    found = [way for way in FAMILY.candidates(asked, H200) if way.extras]
    assert found
    for way in found:
        outputs = -(-n // way.shape.block_n)
        assert outputs * way.split + way.extras <= H200.multiprocessors
        assert way.extras <= outputs  # each has an output
        assert way.extras % way.split == 0  # whole clusters
        if FAMILY.why_not(way, asked, H200) is None:
            piece = FAMILY._piece(way, asked, H200)
            assert piece % way.shape.groups == 0  # a stage of the ring is always the same group's
            assert way.shape.groups <= piece < asked.k_tiles
        else:
            assert k < 7168
    assert not any(way.extras for way in FAMILY.candidates(problem(1, n, k, kind), H200))
