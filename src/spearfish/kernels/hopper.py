"""The Hopper kernels (sm_90a) as a family: cuda/hopper_decode.cu for few tokens, cuda/hopper.cu for more, and
cuda/hopper_wide.cu for 16-bit weights and hundreds.

They run symmetric 2:4 weights with k a multiple of 64; the rest is the portable kernel's.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from spearfish.kernels import config as cut
from spearfish.kernels import jit
from spearfish.kernels.config import Bound, Chip, Problem
from spearfish.kernels.prepare import KINDS, TILE_K, TILE_N
from spearfish.kernels.scratch import next_ticket, workspace

ARCH = "sm_90a"
_BARRIERS = 1024  # bytes of shared memory in front of the ring
_MOST_STAGES = 32
_STAGED_TOKENS = 32  # tokens that the epilogue of hopper.cu turns at a time

# struct Params: the tensor map, six pointers and a ticket, twenty ints; an alignment of 64 makes it 320 bytes.
_MAP_BYTES = 128
_POINTERS = struct.Struct("<7Q")
_INTS = struct.Struct("<20i")
_PARAMS_BYTES = 320


@dataclass(frozen=True)
class HopperShape:
    """How a block is cut; the macros of the sources.

    `n_tiles` warpgroups side by side times `groups` behind one another along k; each owns `m_tiles` weight tiles of 64
    rows. `blocks` is the number of blocks for which the registers of a multiprocessor must suffice. A stage of the ring
    has a k tile for every group (decode), or one, which the groups take in turn.
    """

    tokens: int
    n_tiles: int
    m_tiles: int
    groups: int
    blocks: int = 1

    @property
    def is_decode(self) -> bool:
        return self.tokens <= 16

    @property
    def is_wide(self) -> bool:
        return self.tokens > 128

    @property
    def block_n(self) -> int:
        return TILE_N * self.n_tiles * self.m_tiles

    @property
    def threads(self) -> int:
        return 128 * self.n_tiles * self.groups + (32 if self.is_decode else 128)

    def stage_bytes(self, weight_tile_bytes: int) -> int:
        """Shared memory of one stage: weights and x."""
        return self.stage_tiles * (self.tokens * TILE_K * 2 + self.n_tiles * self.m_tiles * weight_tile_bytes)

    @property
    def shares_tokens(self) -> bool:
        """Whether the groups add up their sums among themselves, each for its share of the tokens."""
        return not self.is_decode and self.groups > 1

    @property
    def may_be_even(self) -> bool:
        """Whether blocks may run from one output into the next."""
        return not self.is_decode and not self.is_wide and self.groups == 1

    @property
    def stage_tiles(self) -> int:
        """k tiles of a stage."""
        return self.groups if self.is_decode else 1

    @property
    def least_stages(self) -> int:
        """The shallowest ring that does not lock up. hopper.cu waits for a group's next stage before it gives back the
        one behind (one m tile), or with more than two groups or several m tiles only the one at hand."""
        return 2 if self.is_decode else self.groups * (3 if self.m_tiles == 1 and self.groups <= 2 else 2)


@dataclass(frozen=True)
class HopperConfig:
    """A shape; `split` blocks of a cluster share out k, `blocks` find room on a multiprocessor. `even`: all k tiles of
    all outputs are shared out among as many blocks as there are multiprocessors; sums pass through global memory (with
    a wide shape the blocks do whole outputs while there are two for each). `extras`: so many more blocks do the last k
    tiles of every output; their sums pass through global memory, too."""

    shape: HopperShape
    split: int = 1
    blocks: int = 1
    even: bool = False
    extras: int = 0

    def __str__(self) -> str:
        s = self.shape
        kernel = "decode" if s.is_decode else "wgmma"
        ways = f"{s.groups} along k, k " + ("shared out evenly" if self.even else f"in {self.split}")
        ways += f" with {self.extras} extra blocks" if self.extras else ""
        return f"{kernel} {s.tokens} x {s.block_n} tokens x rows, {ways}, {self.blocks} on a multiprocessor"


# What 4-bit weights may use, and others in part (see `shapes`).
_SHAPES = (
    HopperShape(8, 1, 1, 4, 2),
    HopperShape(8, 1, 2, 2, 2),
    HopperShape(8, 1, 1, 2, 2),
    HopperShape(16, 1, 2, 2, 2),
    HopperShape(16, 1, 1, 2, 2),
    HopperShape(16, 1, 1, 4),
    HopperShape(32, 2, 1, 2),
    HopperShape(32, 1, 1, 2),
    HopperShape(32, 1, 1, 4),
    HopperShape(32, 4, 1, 1),
    HopperShape(64, 2, 1, 2),
    HopperShape(64, 1, 1, 2),
    HopperShape(64, 4, 1, 1),
    HopperShape(128, 2, 1, 1),
    HopperShape(128, 1, 1, 2),
    HopperShape(128, 2, 2, 1),
)
# hopper_wide.cu: the two halves of its tokens side by side
_WIDE = HopperShape(256, 3, 1, 1)
_KINDS = ("int4_24", "int8_24", "f16_24")

# us that the sums of extra blocks take: the extra blocks for each output, and the others (fitted to extras.csv)
_LEAVE_PIECE, _ADD_PIECE = 1.5, 2.3

# By bits: ns of a multiprocessor for a weight tile (64 x 128) times so many tokens, and for each k tile besides. Wider
# weights take more of shared memory, those of 16 bits pass it twice (fitted to launches.csv, int8.csv and wide.csv).
_NANOSECONDS_4 = {8: (46.5, 56.2), 16: (80.1, 35.1), 32: (108.9, 0.0), 64: (148.6, 2.1), 128: (180.7, 85.8)}
_NANOSECONDS = {
    4: _NANOSECONDS_4,
    8: _NANOSECONDS_4 | {32: (119.8, 20.0), 64: (148.6, 2.1), 128: (216.8, 20.0)},
    16: _NANOSECONDS_4 | {64: (182.0, 2.1), 128: (232.0, 85.0)},
}
# us of a launch with the wide shape, of a multiprocessor for a weight tile times 128 tokens, and for each block that
# shares an output where there are fewer of them than multiprocessors.
_WIDE_LAUNCH, _WIDE_TILE, _WIDE_FEW = 9.0, 0.255, 4.0


def shapes(kind: str) -> tuple[HopperShape, ...]:
    """The shapes compiled for a kind of weight."""
    if kind not in _KINDS:
        return ()
    if kind == "int4_24":
        return _SHAPES
    # The wider of the two for many tokens: it reads x half as often. With 16 bits the other is better where outputs are
    # few.
    first: dict[int, HopperShape] = {}
    for shape in _SHAPES:
        if shape.tokens == 128 or shape.tokens not in first:
            first[shape.tokens] = shape
    if kind == "int8_24":
        return tuple(shape for shape in _SHAPES if not shape.is_decode or shape in first.values())
    return (*first.values(), *((HopperShape(128, 2, 1, 1), _WIDE) if kind == "f16_24" else ()))


@dataclass(frozen=True)
class Plan:
    """Shared memory of a launch: stages of the ring, bytes in all, where sums from neighbours arrive (from the start
    of the ring) and whether that place belongs to the ring."""

    stages: int
    bytes: int
    received: int
    overlaid: bool


@lru_cache(maxsize=1024)
def plan(config: HopperConfig, weight_tile_bytes: int, k_tiles: int, room: int) -> Plan | None:
    """The deepest ring that fits `room` bytes beside the partial sums; None if too few stages fit."""
    shape = config.shape
    stage = shape.stage_bytes(weight_tile_bytes)
    if shape.is_wide:  # four half stages, the metadata of one more, three of the epilogue
        total = _BARRIERS + 2 * stage + shape.n_tiles * (TILE_K * TILE_N // 8 + _STAGED_TOKENS * (TILE_N + 8) * 2)
        return Plan(4, total, 0, False) if total <= room else None
    sums = shape.groups * config.split > 1 or config.extras > 0
    parts = 1 if shape.shares_tokens else shape.groups
    piece = shape.tokens * (shape.block_n // config.split + 4) * 4
    mine = parts * config.split * piece if sums else 0
    gifts = (shape.groups - 1) * shape.tokens * shape.block_n * 4 if shape.shares_tokens else 0
    received = (config.split - 1) * parts * piece
    out = 0 if shape.is_decode or sums else 128 + shape.n_tiles * _STAGED_TOKENS * (TILE_N * shape.m_tiles + 8) * 2
    steps = -(-(k_tiles // config.split) // shape.stage_tiles) + 1

    def layout(stages: int) -> Plan:
        ring = stages * stage
        apart = max(ring, mine + gifts)
        if not received or _BARRIERS + apart + received <= room:
            return Plan(stages, _BARRIERS + apart + received + out, apart, False)
        return Plan(stages, _BARRIERS + max(ring, mine + max(gifts, received)), mine, True)

    # hopper.cu: a stage is always the same group's, so that a parity bit is enough to tell its turns apart.
    least, multiple = shape.least_stages, 1 if shape.is_decode else shape.groups
    stages_wanted = range(least, max(least, min(_MOST_STAGES, steps)) + 1, multiple)
    fitting = [found for stages in stages_wanted if (found := layout(stages)).bytes <= room]
    return fitting[-1] if fitting else None


class HopperFamily:
    """mma.sp and wgmma.sp kernels with bulk copies, clusters and dependent launch."""

    name = "hopper"

    def candidates(self, problem: Problem, chip: Chip) -> Sequence[HopperConfig]:
        if chip.capability != 90:
            return []
        # All tokens in one block, or in two or four narrower ones.
        wanted = next((t for t in (8, 16, 32, 64) if problem.m <= t), 128)
        found = []
        for shape in shapes(problem.kind):
            if shape.is_wide and problem.m > 128:
                found.append(HopperConfig(shape, even=True))
            if shape.is_decode != (wanted <= 16) or shape.tokens > wanted:
                continue
            if shape.tokens < wanted and (shape.is_decode or problem.m > 4 * shape.tokens):
                continue
            splits = (1, 2, 4, 8) if shape.is_decode else (1, 2, 4)
            found += [HopperConfig(shape, split, blocks) for split in splits for blocks in range(1, shape.blocks + 1)]
            # Where whole outputs leave multiprocessors idle in the last turn. Not with more than two blocks of tokens:
            # these read the same weights, and no longer at the same time.
            outputs = _outputs(shape, problem)
            uneven = outputs % chip.multiprocessors and chip.multiprocessors < outputs < 4 * chip.multiprocessors
            uneven = uneven and problem.m <= 2 * shape.tokens
            if uneven and shape.may_be_even:
                found.append(HopperConfig(shape, even=True))
            # Not with wide tiles or several blocks of tokens: it takes as long as it saves.
            if not shape.is_decode and shape.m_tiles == 1 and problem.m <= shape.tokens:
                found += [
                    HopperConfig(shape, split, extras=extras)
                    for split in (1, 2)
                    if (extras := _extras(outputs, split, chip))
                ]
        return found

    def why_not(self, config: HopperConfig, problem: Problem, chip: Chip) -> str | None:
        if chip.capability != 90:
            return f"{chip.arch} is no Hopper GPU (sm_90)"
        if problem.kind not in _KINDS or problem.has_zeros:
            return "it runs symmetric 2:4 weights only"
        if problem.batch_invariant:
            return "it has no batch-invariant mode"
        if problem.k % 64:
            return f"it takes multiples of 64 k, not {problem.k}"
        if problem.k_tiles // config.split < config.shape.groups:
            return f"{config} leaves a warpgroup without a k tile of {problem.k_tiles}"
        if config.extras:
            piece = self._piece(config, problem, chip)
            if min(piece, (problem.k_tiles - piece) // config.split) < config.shape.groups:
                return f"{config}: {problem.k_tiles} k tiles are too few to share with extra blocks"
        if config.shape.is_wide and problem.kind != "f16_24":
            return f"{config} is for 16-bit weights"
        if config.shape.may_be_even and config.even and _outputs(config.shape, problem) < chip.multiprocessors:
            return f"{config}: less than one output for each of {chip.multiprocessors} multiprocessors"
        if self._plan(config, problem, chip) is None:
            return f"{config} does not fit {chip.shared_per_block} bytes of shared memory"
        return None

    def _plan(self, config: HopperConfig, problem: Problem, chip: Chip) -> Plan | None:
        # Two on a multiprocessor: more at work where there are many, and the next launch can begin while this one ends.
        # But of few, the two of a cluster may land on one multiprocessor and leave another idle.
        room = min(chip.shared_per_block, chip.shared_per_multiprocessor // config.blocks - 1024)
        return plan(config, problem.tile_bytes, problem.k_tiles, room)

    def microseconds(self, config: HopperConfig, problem: Problem, chip: Chip) -> float:
        """Estimated time. The constants are a fit to 1 527 launches on an H200 (9 % off on average, and what it picks
        takes 0.6 % longer than the best; docs/facts.md). A k tile takes the slowest of three: the consumers, the
        memory's share of a multiprocessor, what a multiprocessor can take in."""
        shape, split, blocks = config.shape, config.split, config.blocks
        outputs = _outputs(shape, problem)
        if shape.is_wide:
            tiles = outputs * shape.n_tiles * (shape.tokens // 128) * problem.k_tiles
            few = _WIDE_FEW * chip.multiprocessors / outputs if outputs < chip.multiprocessors else 0.0
            return _WIDE_LAUNCH + _WIDE_TILE * tiles / chip.multiprocessors + few
        waves = outputs * split / chip.multiprocessors
        tile = self._k_tile(config, problem, chip)
        step = tile * -(-problem.k_tiles // split)
        fill = 2.38 + 0.0145 * shape.tokens
        if config.extras:
            own = problem.k_tiles - self._piece(config, problem, chip)
            return fill + tile * own / split + _ADD_PIECE + _sums(config, problem)
        if config.even:
            return fill + step * outputs / chip.multiprocessors + 4.77 * shape.tokens * shape.block_n / 16384
        if shape.groups == split == 1 and not shape.is_decode:  # persistent: the next output's tiles follow at once
            return fill + -(-outputs // chip.multiprocessors) * step
        if split > 2 and not (split == 4 and blocks == 2):
            # Clusters of more than two that fill a multiprocessor each leave some of the uneven GPCs idle.
            waves *= chip.multiprocessors / (chip.multiprocessors // 12 * 11 - 1)
        waves /= blocks
        turns = max(1.0, 0.42 * waves + 0.58 * math.ceil(waves)) if blocks == 2 else math.ceil(waves)
        return turns * (fill + step) + _sums(config, problem)

    def _k_tile(self, config: HopperConfig, problem: Problem, chip: Chip) -> float:
        """Microseconds of a multiprocessor for a k tile of all its blocks."""
        shape, split, blocks = config.shape, config.split, config.blocks
        waves = (_outputs(shape, problem) * split + config.extras) / chip.multiprocessors
        # Of a cluster, two blocks that find room on one multiprocessor land there.
        resident = 2 if blocks == 2 and split > 1 else min(blocks, math.ceil(waves))
        tiles = shape.n_tiles * shape.m_tiles
        weights = resident * tiles * problem.tile_bytes
        busy = min(1.0, waves / (resident if split > 1 else 1))
        readers = min(
            -(-problem.m // shape.tokens), max(1.0, chip.multiprocessors * blocks * shape.block_n / problem.n)
        )
        unpack, wait = _NANOSECONDS[problem.bits][shape.tokens]
        times = (
            resident * tiles * unpack + wait,
            weights * busy * chip.multiprocessors / (1.01 * chip.bandwidth) / readers,
            (weights + resident * shape.tokens * TILE_K * 2) / 109,
        )
        return math.pow(sum(time**5.3 for time in times), 1 / 5.3) / 1e3

    def _piece(self, config: HopperConfig, problem: Problem, chip: Chip) -> int:
        """k tiles of a piece, so that extra blocks and the others are done at about the same time."""
        step, split, groups = self._k_tile(config, problem, chip), config.split, config.shape.groups
        rounds = -(-_outputs(config.shape, problem) // config.extras)
        piece = (problem.k_tiles / split - rounds * _LEAVE_PIECE / step) / (rounds + 1 / split)
        return int(piece) // groups * groups

    def bind(self, config: HopperConfig, problem: Problem, device: int) -> Bound:
        shape, chip = config.shape, cut.chip_of(device)
        found = self._plan(config, problem, chip)
        if found is None:  # why_not has said so
            raise ValueError(f"{config} does not fit")
        variant = jit.Variant(*_source(shape), ARCH, _macros(shape, problem))
        n_blocks = -(-problem.n_tiles // (shape.n_tiles * shape.m_tiles))
        token_blocks, cluster = -(-problem.m // shape.tokens), config.split
        units = spare = whole = flag_bytes = work_bytes = 0
        outputs, own = n_blocks * token_blocks, problem.k_tiles
        if shape.is_decode:
            grid = (n_blocks * cluster, token_blocks, 1)
        elif cluster * shape.groups > 1 or config.extras:  # partial sums: one output for each cluster
            grid = (outputs * cluster + config.extras, 1, 1)
            if config.extras:
                own -= self._piece(config, problem, chip)
                flag_bytes = -(-8 * outputs * cluster // 128) * 128
                work_bytes = flag_bytes + 4 * outputs * shape.groups * shape.block_n * shape.tokens
        elif config.even:
            grid = (chip.multiprocessors, 1, 1)
            if shape.is_wide:
                turns, rest = divmod(outputs, chip.multiprocessors)
                whole = turns - 1 if turns and rest else turns
            units, spare = divmod((outputs - whole * chip.multiprocessors) * problem.k_tiles, chip.multiprocessors)
            flag_bytes = -(-8 * chip.multiprocessors // 128) * 128
            work_bytes = flag_bytes + 4 * chip.multiprocessors * shape.block_n * shape.tokens
        else:
            grid = (min(n_blocks * token_blocks, chip.multiprocessors), 1, 1)
        # More than half, so that there is no second beside it.
        alone = chip.shared_per_multiprocessor // 2 if config.blocks == 1 else 0
        launcher = jit.load(variant, device).launcher(
            grid,
            shape.threads,
            max(found.bytes, alone),
            _PARAMS_BYTES,
            (cluster, 1, 1) if cluster > 1 else None,
            balanced=cluster > 2,  # or clusters of four find room on nine tenths of the multiprocessors alone
            dependent=True,
        )
        band = 8 if problem.m >= 4096 and not shape.is_wide else 4  # token blocks
        _INTS.pack_into(
            launcher.params,
            _MAP_BYTES + _POINTERS.size,
            *(problem.m, problem.n, problem.n_tiles, problem.k_tiles, n_blocks, token_blocks, problem.tile_bytes),
            *(problem.granules, config.split, found.stages, 2, band),
            *(found.received, int(found.overlaid), units, spare, config.extras, own, 0, whole),
        )
        params, lock, launch, pack = launcher.params, launcher.lock, launcher.launch, _POINTERS.pack_into
        current_stream = torch._C._cuda_getCurrentRawStream
        box, k, m = (1 if shape.is_wide else shape.stage_tiles * TILE_K // 64, shape.tokens), problem.k, problem.m
        tensor_map = lru_cache(maxsize=64)(
            lambda pointer, stride: jit.tensor_map(pointer, m, k, 2 * stride, box, problem.bf16)
        )

        def run(
            x: torch.Tensor,
            stream: torch.Tensor,
            column_scale: torch.Tensor | None,
            bias: torch.Tensor | None,
            out: torch.Tensor,
        ) -> None:
            x_map = tensor_map(x.data_ptr(), x.stride(0) if m > 1 else k)
            on = current_stream(device)
            # As in the portable kernel: alive until the launch is enqueued, then protected by the order of the stream.
            work = workspace(device, work_bytes, on) if work_bytes else None
            flags = 0 if work is None else work.data_ptr()
            with lock:
                params[:_MAP_BYTES] = x_map
                pack(
                    params,
                    _MAP_BYTES,
                    stream.data_ptr(),
                    0 if column_scale is None else column_scale.data_ptr(),
                    0 if bias is None else bias.data_ptr(),
                    out.data_ptr(),
                    flags + flag_bytes,
                    flags,
                    next_ticket(),
                )
                launch(on)

        return run

    def variants(self, arch: str) -> list[jit.Variant]:
        if arch != ARCH:
            return []
        return [
            jit.Variant(*_source(shape), ARCH, _macros(shape, Problem(kind, bf16, 1, 1, 1, 0, False)))
            for kind in KINDS
            for bf16 in (False, True)
            for shape in shapes(kind)
        ]


def _extras(outputs: int, split: int, chip: Chip) -> int:
    """How many extra blocks find a free multiprocessor and something to do; 0 where there are few."""
    free = chip.multiprocessors - outputs * split
    if not chip.multiprocessors / 7 <= free < outputs * split:
        return 0
    rounds = -(-outputs // (free // split * split))
    return -(-outputs // rounds // split) * split


def _sums(config: HopperConfig, problem: Problem) -> float:
    """Microseconds for adding up what groups and clusters have."""
    shape, split, total = config.shape, config.split, 0.0
    sums = min(shape.tokens, -(-problem.m // 8) * 8) * shape.block_n / 8192
    if split > 1:
        total += 0.27 + 0.093 * sums * (1 if shape.shares_tokens else shape.groups) * math.sqrt(split)
    if shape.groups > 1:
        total -= 0.83 * sums  # what the other constants have too much for them
    return total


def _outputs(shape: HopperShape, problem: Problem) -> int:
    """Output tiles of a problem."""
    return -(-problem.n // shape.block_n) * -(-problem.m // shape.tokens)


def _source(shape: HopperShape) -> tuple[str, str]:
    name = "hopper_decode" if shape.is_decode else "hopper_wide" if shape.is_wide else "hopper"
    return f"{name}.cu", name


def _macros(shape: HopperShape, problem: Problem) -> tuple[tuple[str, int], ...]:
    return (
        *problem.weight_macros,
        ("TOKENS", shape.tokens // 2 if shape.is_wide else shape.tokens),
        ("N_TILES", shape.n_tiles),
        ("M_TILES", shape.m_tiles),
        ("GROUPS", shape.groups),
        *((("BLOCKS_PER_SM", shape.blocks),) if shape.is_decode else ()),
    )


FAMILY = HopperFamily()
