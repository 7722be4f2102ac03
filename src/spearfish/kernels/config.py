"""What a kernel is asked to do, on which chip, and how it may be cut: plain frozen facts, no CUDA.

`Problem` and `Chip` are shared by every family of kernels. A family offers what `Family` lists; `choose.py` picks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch

from spearfish.kernels.jit import Variant, architecture
from spearfish.kernels.prepare import TILE_K, TILE_N, tile_bytes


@dataclass(frozen=True)
class Chip:
    """A GPU as the kernels see it. Shared memory in bytes; bandwidth in GB/s, rate in dense TFLOP/s of mma.sync and the
    library's product as a multiple of it, all as sustained and needed only to weigh one configuration against another.
    Measured on the H200, elsewhere set from data sheets."""

    arch: str
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    bandwidth: float
    rate: float
    library: float = 0.9

    @property
    def capability(self) -> int:
        """80 for sm_80, 90 for sm_90a."""
        return int(self.arch.removeprefix("sm_").rstrip("af"))


# One chip for each architecture that is compiled ahead of time: A100, A10, RTX 4090, H200, B200, RTX 5090. The last
# four numbers of a chip at hand are read off it, but for bandwidth and rate.
CHIPS = {
    chip.arch: chip
    for chip in (
        Chip("sm_80", 108, 163 << 10, 164 << 10, 1400, 260),
        Chip("sm_86", 72, 99 << 10, 100 << 10, 520, 110),
        Chip("sm_89", 128, 99 << 10, 100 << 10, 900, 280),
        Chip("sm_90", 132, 227 << 10, 228 << 10, 4300, 600, 1.2),
        Chip("sm_100", 148, 227 << 10, 228 << 10, 6500, 800, 1.8),
        Chip("sm_120", 170, 99 << 10, 100 << 10, 1600, 380),
    )
}


@lru_cache(maxsize=64)
def chip_of(device: int) -> Chip:
    """The chip of a CUDA device."""
    arch = architecture(device)
    facts = torch.cuda.get_device_properties(device)
    known = CHIPS.get(arch) or CHIPS[max((a for a in CHIPS if _number(a) <= _number(arch)), key=_number)]
    share = facts.multi_processor_count / known.multiprocessors
    return Chip(
        arch,
        facts.multi_processor_count,
        getattr(facts, "shared_memory_per_block_optin", known.shared_per_block),
        getattr(facts, "shared_memory_per_multiprocessor", known.shared_per_multiprocessor),
        known.bandwidth * share,
        known.rate * share,
        known.library,
    )


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_"))


@dataclass(frozen=True)
class Problem:
    """One product: m tokens with a weight [n, k] of some kind, as its tile stream has it."""

    kind: str
    bf16: bool
    m: int
    n: int
    k: int
    granules: int
    has_zeros: bool
    batch_invariant: bool = False

    @property
    def is_sparse(self) -> bool:
        return self.kind.endswith("_24")

    @property
    def bits(self) -> int:
        return {"int4": 4, "int8": 8, "f16": 16}[self.kind.removesuffix("_24")]

    @property
    def n_tiles(self) -> int:
        return -(-self.n // TILE_N)

    @property
    def k_tiles(self) -> int:
        return -(-self.k // TILE_K)

    @property
    def tile_bytes(self) -> int:
        return tile_bytes(self.kind, self.granules, self.has_zeros)

    @property
    def weight_macros(self) -> tuple[tuple[str, int], ...]:
        """The macros of common.cuh."""
        return (("BITS", self.bits), ("SPARSE", int(self.is_sparse)), ("BF16", int(self.bf16)))


# x [m, k] with unit stride along k, tile stream, scale per column, bias, y [m, n] contiguous: enqueue the product.
Bound = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor], None]


class Runner(Protocol):
    """What can run a problem as some configuration of its own says; those are frozen, hashable and print well."""

    name: str

    def microseconds(self, config: Any, problem: Problem, chip: Chip) -> float:
        """Estimated time."""

    def bind(self, config: Any, problem: Problem, device: int) -> Bound:
        """Compile (or find) and load what it takes, and bind all that does not change from call to call."""


class Family(Runner, Protocol):
    """A kernel with its configurations."""

    def candidates(self, problem: Problem, chip: Chip) -> Sequence[Any]:
        """Every configuration worth weighing for this problem, legal or not."""

    def why_not(self, config: Any, problem: Problem, chip: Chip) -> str | None:
        """Why `config` cannot run `problem` on `chip`, or None."""

    def variants(self, arch: str) -> Sequence[Variant]:
        """All variants that may be used on `arch`, to compile ahead of time."""


@dataclass(frozen=True)
class Shape:
    """How a block of the portable kernels is cut; the macros of portable.cu.

    A warp has 16 * slices rows of n and block_m / warps_m tokens; warps_k layers of warps share out k. Up to `stages`
    stages of warps_k k tiles are in flight, with room for `blocks` blocks on a multiprocessor. `wide` shapes are those
    of portable_wide.cu.
    """

    block_m: int
    slices: int
    warps_n: int
    warps_m: int
    warps_k: int
    stages: int
    blocks: int
    wide: bool = False

    @property
    def block_n(self) -> int:
        return 16 * self.slices * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_m * self.warps_k

    def stage_bytes(self, weight_tile_bytes: int) -> int:
        """Shared memory of one stage: weights and x."""
        return self.warps_k * (self.block_n // TILE_N * weight_tile_bytes + self.block_m * TILE_K * 2)

    def shared_bytes(self, weight_tile_bytes: int) -> int:
        """Shared memory of a block: the ring, which the sums of the layers reuse at the end."""
        sums = (self.warps_k - 1) * self.block_n * self.block_m * 4
        return max(self.stages * self.stage_bytes(weight_tile_bytes) + self.barrier_bytes, sums)

    @property
    def barrier_bytes(self) -> int:
        """Shared memory in front of the ring, where warps of a wide shape meet."""
        return 128 if self.wide else 0


@dataclass(frozen=True)
class KernelConfig:
    """A shape, and the number of blocks that share out the k of one tile of y."""

    shape: Shape
    splits: int = 1

    def __str__(self) -> str:
        s = self.shape
        return (
            f"{s.block_m} x {s.block_n} tokens x rows, warps {s.warps_m} x {s.warps_n} x {s.warps_k}"
            f" (m, n, k){', wide' if s.wide else ''}, {s.stages} stages, k in {self.splits}"
        )


# block_m, slices, warps_n, warps_m, warps_k, stages, blocks, wide. The number of stages is a wish: `shapes` takes what
# fits. Two or four blocks of few warps on a multiprocessor beat one of many: while one waits at its barrier, another
# works. Wide shapes have warps that hardly wait, so of them the one of many is as good and has less to fetch.
_SPARSE_SHAPES = (
    Shape(8, 1, 4, 1, 2, 6, 4),
    Shape(16, 2, 4, 1, 2, 4, 2),
    Shape(32, 2, 4, 1, 2, 4, 2),
    Shape(64, 4, 2, 1, 2, 3, 2),
    Shape(64, 4, 4, 1, 1, 3, 2),
    Shape(64, 4, 4, 1, 1, 3, 2, True),
    Shape(64, 4, 8, 1, 1, 5, 1, True),
)
# The twin that runs dense weights; fewer, since it is there for compatibility.
_DENSE_SHAPES = (
    Shape(16, 2, 4, 1, 2, 4, 2),
    Shape(32, 2, 4, 1, 2, 4, 2),
    Shape(64, 2, 4, 1, 2, 4, 1),
)
# Shapes that sum over k in the same order as one another, whatever their block_m.
_INVARIANT_WARPS_K = 2


def widest_tile(kind: str, shape: Shape) -> int:
    """Bytes of the largest tile of a kind that a shape runs: four rows of scales and of zero points; wide, one row."""
    if kind.startswith("f16"):
        return tile_bytes(kind, 0, False)
    return tile_bytes(kind, 1, False) if shape.wide else tile_bytes(kind, 4, True)


@lru_cache(maxsize=256)
def shapes(kind: str, chip: Chip) -> tuple[Shape, ...]:
    """The shapes of a kind of weight on a chip, with the most blocks on a multiprocessor that leave each two stages
    of its shared memory, and as many stages as fit then; a shape that cannot have two stages is left out."""
    fitting = []
    for shape in _SPARSE_SHAPES if kind.endswith("_24") else _DENSE_SHAPES:
        if shape.wide and kind == "f16_24":
            continue
        for blocks in range(shape.blocks, 0, -1):
            # The system keeps a kilobyte of every block.
            room = min(chip.shared_per_block, chip.shared_per_multiprocessor // blocks - 1024) - shape.barrier_bytes
            stages = min(shape.stages, room // shape.stage_bytes(widest_tile(kind, shape)))
            if stages >= 2:
                fitting.append(replace(shape, stages=stages, blocks=blocks))
                break
    return tuple(fitting)


def candidates(problem: Problem, chip: Chip) -> list[KernelConfig]:
    """All ways to cut `problem`: every shape, and k in powers of two and a few more parts while the chip has room."""
    found = []
    for shape in shapes(problem.kind, chip):
        if problem.batch_invariant and shape.warps_k != _INVARIANT_WARPS_K:
            continue
        steps = -(-problem.k_tiles // shape.warps_k)
        tiles = -(-problem.n // shape.block_n) * -(-problem.m // shape.block_m)
        most = min(32, steps, max(1, 3 * chip.multiprocessors * shape.blocks // tiles))
        if problem.batch_invariant:
            parts = {invariant_splits(problem, chip)}
        else:
            parts = {s for s in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32) if s <= most}
        found += [KernelConfig(shape, splits) for splits in sorted(parts)]
    return found


def invariant_splits(problem: Problem, chip: Chip) -> int:
    """The split of k of a batch-invariant product: a function of n and k alone, about two blocks of 128 rows for each
    multiprocessor at few tokens."""
    blocks = -(-problem.n // 128)
    return max(1, min(8, problem.k_tiles // 4, 2 * chip.multiprocessors // blocks))


def why_not(config: KernelConfig, problem: Problem, chip: Chip) -> str | None:
    """Why the portable kernel cannot run `problem` as `config` on `chip`, or None."""
    shape, shared = config.shape, config.shape.shared_bytes(problem.tile_bytes)
    if chip.capability < 80:
        return f"{chip.arch} is older than sm_80, which brought the sparse tensor cores and asynchronous copies"
    if shared > chip.shared_per_block:
        return f"{config} needs {shared} bytes of shared memory, {chip.arch} has {chip.shared_per_block}"
    if shape.wide and (problem.has_zeros or problem.granules > 1):
        return f"{config} takes symmetric weights with at most one scale for 128 k"
    if config.splits > problem.k_tiles:
        return f"{config} splits {problem.k_tiles} k tiles into {config.splits}"
    if problem.batch_invariant and (
        shape.warps_k != _INVARIANT_WARPS_K or config.splits != invariant_splits(problem, chip)
    ):
        return f"{config} sums over k in another order than the batch-invariant mode"
    return None


def macros(shape: Shape, problem: Problem) -> tuple[tuple[str, int], ...]:
    """All macros of portable.cu."""
    return (
        *problem.weight_macros,
        ("BLOCK_M", shape.block_m),
        ("SLICES", shape.slices),
        ("WARPS_N", shape.warps_n),
        ("WARPS_M", shape.warps_m),
        ("WARPS_K", shape.warps_k),
        ("STAGES", shape.stages),
        ("MIN_BLOCKS", shape.blocks),
    )
