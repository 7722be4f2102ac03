"""Unpack, then multiply with the library's product: for many tokens, where dense tensor cores may win.

The dense form lives a slab of rows at a time, small enough to stay in the L2 between the kernel that writes it and
the product that reads it, and comes from torch's allocator in every call: so several streams may run at once, and a
graph has its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from spearfish.kernels import jit
from spearfish.kernels.config import Bound, Chip, Problem, chip_of
from spearfish.kernels.prepare import KINDS, TILE_K, TILE_N, scale_bytes

SOURCE = "unpack.cu"
ENTRY = "unpack_tiles"
# Three pointers, the row stride, eight ints.
_PARAMS = struct.Struct("<3Qq8i")
_SLAB_BYTES = 32 << 20
# At few tokens the bytes of the dense form decide, and no library product can win.
_FEWEST_TOKENS = 65


@dataclass(frozen=True)
class UnpackConfig:
    """Rows of the weight that are dense at a time."""

    rows: int


def slab_rows(n: int, k_tiles: int) -> int:
    """Rows of a slab: a multiple of 64, within 32 MiB, in equal parts."""
    tiles = -(-n // TILE_N)
    most = max(1, _SLAB_BYTES // (k_tiles * TILE_K * 2 * TILE_N))
    parts = -(-tiles // most)
    return -(-tiles // parts) * TILE_N


@lru_cache(maxsize=512)
def _launcher(problem: Problem, device: int, tiles: int) -> jit.Launcher:
    variant = jit.Variant(SOURCE, ENTRY, chip_of(device).arch, problem.weight_macros)
    return jit.load(variant, device).launcher((problem.k_tiles, tiles, 1), 128, 0, _PARAMS.size)


def unpack_rows(
    problem: Problem,
    stream: torch.Tensor,
    column_scale: torch.Tensor | None,
    first_n_tile: int,
    dense: torch.Tensor,
) -> None:
    """Fill `dense` [64 * tiles, k padded to 128] with the rows from tile `first_n_tile` on. Enqueued on torch's stream
    of the current device, which must be that of the tensors."""
    device = stream.get_device()
    launcher = _launcher(problem, device, dense.shape[0] // TILE_N)
    row, granules = scale_bytes(1), problem.granules
    with launcher.lock:
        _PARAMS.pack_into(
            launcher.params,
            0,
            stream.data_ptr(),
            dense.data_ptr(),
            0 if column_scale is None else column_scale.data_ptr(),
            dense.stride(0),
            problem.k_tiles,
            problem.tile_bytes,
            first_n_tile,
            granules,
            granules // 4 * row,
            granules // 2 * row,
            (granules // 4 + granules // 2) * row,
            granules * row if problem.has_zeros else 0,
        )
        launcher.launch(jit.current_stream(device))


class UnpackFamily:
    """The dense library product on a weight unpacked for it."""

    name = "unpack"

    def candidates(self, problem: Problem, chip: Chip) -> Sequence[UnpackConfig]:
        return (UnpackConfig(slab_rows(problem.n, problem.k_tiles)),)

    def why_not(self, config: UnpackConfig, problem: Problem, chip: Chip) -> str | None:
        if problem.m < _FEWEST_TOKENS:
            return f"unpacking for {problem.m} tokens cannot win, it begins at {_FEWEST_TOKENS}"
        if problem.batch_invariant:
            return "the library's product is not batch-invariant"
        if chip.capability < 80:
            return f"{chip.arch} is older than sm_80"
        return None

    def microseconds(self, config: UnpackConfig, problem: Problem, chip: Chip) -> float:
        """Dense bytes once to and from the L2, then the library at its sustained rate, in whole tiles of 128 tokens
        and with a launch for each slab."""
        slabs = -(-problem.n // config.rows)
        tokens = -(-problem.m // 128) * 128
        unpack = (problem.n_tiles * problem.k_tiles * (problem.tile_bytes + TILE_N * TILE_K * 2)) / chip.bandwidth / 1e3
        product = 2 * tokens * problem.n * problem.k / (chip.rate * chip.library) / 1e6
        return slabs * 6.0 + unpack + product

    def bind(self, config: UnpackConfig, problem: Problem, device: int) -> Bound:
        slabs = [(first, min(config.rows, problem.n - first)) for first in range(0, problem.n, config.rows)]
        k, padded_k = problem.k, problem.k_tiles * TILE_K

        def run(
            x: torch.Tensor,
            stream: torch.Tensor,
            column_scale: torch.Tensor | None,
            bias: torch.Tensor | None,
            out: torch.Tensor,
        ) -> None:
            x = x[:, :k]
            y = out.view(-1, problem.n)
            scratch = x.new_empty((-(-min(config.rows, problem.n) // TILE_N) * TILE_N, padded_k))
            for first, rows in slabs:
                dense = scratch[: -(-rows // TILE_N) * TILE_N]
                unpack_rows(problem, stream, column_scale, first // TILE_N, dense)
                part, weight = y[:, first : first + rows], dense[:rows, :k].T
                if bias is None:
                    torch.mm(x, weight, out=part)
                else:
                    torch.addmm(bias[first : first + rows], x, weight, out=part)

        return run

    def variants(self, arch: str) -> list[jit.Variant]:
        if arch not in jit.ARCHITECTURES:
            return []
        problems = [Problem(kind, bf16, 1, 1, 1, 0, False) for kind in KINDS for bf16 in (False, True)]
        return [jit.Variant(SOURCE, ENTRY, arch, problem.weight_macros) for problem in problems]


def dense_weight(
    problem: Problem, stream: torch.Tensor, column_scale: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    """Dense [n, k] in the dtype of `like`, unpacked by the kernel."""
    dense = like.new_empty((problem.n_tiles * TILE_N, problem.k_tiles * TILE_K))
    with torch.cuda.device(stream.device):
        unpack_rows(problem, stream, column_scale, 0, dense)
    return dense[: problem.n, : problem.k].contiguous()


FAMILY = UnpackFamily()
