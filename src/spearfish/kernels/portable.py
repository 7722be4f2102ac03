"""The portable kernels (cuda/portable.cu, cuda/portable_wide.cu) as a family: their cost, their launch."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch

from spearfish.kernels import config as cut
from spearfish.kernels import jit
from spearfish.kernels.config import Bound, Chip, KernelConfig, Problem, Shape
from spearfish.kernels.prepare import KINDS, TILE_K, TILE_N, scale_bytes
from spearfish.kernels.scratch import next_ticket, workspace

# struct Params: eight pointers and a ticket among them, the row stride of x, fourteen ints.
_PER_CALL = struct.Struct("<8Qq")
_FIXED = struct.Struct("<14i")


class PortableFamily:
    """mma.sync kernels for sm_80 and up."""

    name = "portable"

    def candidates(self, problem: Problem, chip: Chip) -> Sequence[KernelConfig]:
        return cut.candidates(problem, chip)

    def why_not(self, config: KernelConfig, problem: Problem, chip: Chip) -> str | None:
        return cut.why_not(config, problem, chip)

    def microseconds(self, config: KernelConfig, problem: Problem, chip: Chip) -> float:
        """A model with a dozen numbers, fitted to 255 launches on an H200 (root mean square error 6 %; where several
        ways were measured, the one it picks is on average half a per cent slower than the best).

        A stage takes as long as the slowest of memory, L2, tensor cores and latency, or a little longer if several are
        near; few warps do not keep the tensor cores busy. Blocks come in waves, of which a last partial one costs only
        in part its missing blocks.
        """
        shape = config.shape
        blocks = -(-problem.n // shape.block_n) * -(-problem.m // shape.block_m) * config.splits
        stages = math.ceil(math.ceil(problem.k_tiles / config.splits) / shape.warps_k)
        resident = min(shape.blocks, -(-blocks // chip.multiprocessors))
        waves = blocks / (chip.multiprocessors * resident)
        weight_bytes = shape.warps_k * shape.block_n // TILE_N * problem.tile_bytes
        x_bytes = shape.warps_k * min(problem.m, shape.block_m) * TILE_K * 2
        flops = 2 * shape.block_m * shape.block_n * shape.warps_k * TILE_K
        bandwidth = chip.bandwidth / chip.multiprocessors  # bytes per ns
        rate = chip.rate * (1.5 if problem.is_sparse else 1.0) * 1e3 / chip.multiprocessors  # flops per ns
        warps = resident * shape.threads / 128  # for each of the four tensor cores of a multiprocessor
        times = (
            resident * weight_bytes / bandwidth / 0.91,
            resident * (weight_bytes + x_bytes) / bandwidth / 1.58,
            resident * flops / rate / ((0.9 if shape.wide else 0.8) * warps / (warps + 0.5)),
            815.0 / (shape.stages - 1),  # ns from asking for a stage to having it
            186.0,  # ns from one barrier to the next
        )
        stage = math.pow(sum(time**3 for time in times), 1 / 3)
        turns = 0.73 * waves + 0.27 * math.ceil(waves) if waves > 1 else 1.0
        fill = 3.45
        total = 0.5 + turns * (fill + stages * stage / 1e3)
        if config.splits > 1:
            holders = 32 * shape.warps_n * shape.warps_m
            held = shape.block_m * shape.block_n / min(holders, 128)  # sums of one thread, or of several side by side
            total += 1.7 + 0.009 * (config.splits - 1) * held
        return total

    def bind(self, config: KernelConfig, problem: Problem, device: int) -> Bound:
        shape = config.shape
        variant = variant_of(shape, problem, cut.chip_of(device).arch)
        n_blocks, m_blocks = -(-problem.n // shape.block_n), -(-problem.m // shape.block_m)
        tiles, others = n_blocks * m_blocks, config.splits - 1
        launcher = jit.load(variant, device).launcher(
            (tiles, config.splits, 1),
            shape.threads,
            shape.shared_bytes(problem.tile_bytes),
            _PER_CALL.size + _FIXED.size,
        )
        row, granules = scale_bytes(1), problem.granules
        quarters = (granules // 4 * row, granules // 2 * row, (granules // 4 + granules // 2) * row)
        zero_offset = granules * row if problem.has_zeros else 0
        k = -(-problem.k // 8) * 8
        _FIXED.pack_into(
            launcher.params,
            _PER_CALL.size,
            *(problem.m, problem.n, k, problem.k_tiles, problem.n_tiles, problem.tile_bytes),
            *(granules, *quarters, zero_offset, n_blocks, m_blocks, config.splits),
        )
        flag_bytes = -(-8 * tiles * others // 128) * 128
        work_bytes = flag_bytes + 4 * tiles * others * shape.block_n * shape.block_m
        params, lock, launch, pack = launcher.params, launcher.lock, launcher.launch, _PER_CALL.pack_into
        current_stream = torch._C._cuda_getCurrentRawStream

        def run(
            x: torch.Tensor,
            stream: torch.Tensor,
            column_scale: torch.Tensor | None,
            bias: torch.Tensor | None,
            out: torch.Tensor,
        ) -> None:
            on = current_stream(device)
            # `work` stays alive until the launch is enqueued; from then on the order of the stream protects it.
            work = workspace(device, work_bytes, on) if others else None
            flags = 0 if work is None else work.data_ptr()
            with lock:
                pack(
                    params,
                    0,
                    stream.data_ptr(),
                    x.data_ptr(),
                    out.data_ptr(),
                    0 if bias is None else bias.data_ptr(),
                    0 if column_scale is None else column_scale.data_ptr(),
                    flags + flag_bytes,
                    flags,
                    next_ticket(),
                    x.stride(0) * 2,
                )
                launch(on)

        return run

    def variants(self, arch: str) -> list[jit.Variant]:
        chip = cut.CHIPS.get(arch)
        if chip is None:
            return []
        found: list[jit.Variant] = []
        for kind in KINDS:
            for bf16 in (False, True):
                problem = Problem(kind, bf16, 1, 1, 1, 0, False)
                found += [variant_of(shape, problem, arch) for shape in cut.shapes(kind, chip)]
        return found


def variant_of(shape: Shape, problem: Problem, arch: str) -> jit.Variant:
    """What is compiled to run problems of that kind in that shape."""
    entry = "portable_wide" if shape.wide else "portable"
    shared = shape.shared_bytes(cut.widest_tile(problem.kind, shape))
    return jit.Variant(f"{entry}.cu", entry, arch, cut.macros(shape, problem), shared)


FAMILY = PortableFamily()
