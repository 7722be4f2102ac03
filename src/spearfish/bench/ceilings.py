"""What the card allows: a read curve and sustained tensor-core rates, measured in the same run as everything else.

The roof time of a product is the larger of two: the time in which one graph node reads as many bytes as the product
must move, and the time that its operations take at the best rate that the chip holds for a second. The kernels for it
are in kernels/cuda/ceilings.cu.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch

from spearfish.bench.device import Call, Device, per_call, sustained
from spearfish.bench.problems import Point
from spearfish.errors import SpearfishError
from spearfish.kernels import jit

SOURCE = "ceilings.cu"
# Bytes of the points of the read curve, where the layers of today's models lie.
READ_BYTES = tuple(
    int(megabytes * 1e6) // 128 * 128
    for megabytes in (0.5, 1, 2, 4, 6.6, 9, 13, 18, 25, 35, 50, 70, 100, 150, 250, 500, 1000)
)
SPARSE_RATES = ("wgmma.sp", "mma.sp")
DENSE_RATE = "cublas 8192"

_READ = struct.Struct("<QQQ")
_RATE = struct.Struct("<QiiQ")
_BULK_SHARED = 12 * 16384


@dataclass
class Ceilings:
    """read: (bytes, µs) ascending. rates: dense-equivalent TFLOP/s by name. notes: what could not be measured."""

    read: list[tuple[int, float]] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def read_us(self, size: float) -> float | None:
        """µs in which one graph node reads `size` bytes: between two measured sizes the straight line, beyond the
        largest the last one's bandwidth, below the smallest its time. None if nothing was measured."""
        if not self.read:
            return None
        if size <= self.read[0][0]:
            return self.read[0][1]
        for (low, low_us), (high, high_us) in pairwise(self.read):
            if size <= high:
                return low_us + (high_us - low_us) * (size - low) / (high - low)
        return self.read[-1][1] * size / self.read[-1][0]

    def rate(self, sparse: bool) -> float | None:
        """The best sustained TFLOP/s (dense-equivalent), or None if none was measured."""
        names = SPARSE_RATES if sparse else (DENSE_RATE,)
        return max((self.rates[name] for name in names if name in self.rates), default=None)

    def roof_us(self, point: Point) -> float | None:
        """The time below which no kernel can run `point` on this card; None without both ceilings."""
        read, rate = self.read_us(point.bytes), self.rate(point.scheme.is_sparse)
        return None if read is None or rate is None else max(read, point.flops / rate / 1e6)


class Probes(Protocol):
    """The kernels that find the ceilings."""

    def readers(self, size: int) -> dict[str, list[Call]]:
        """By name: calls that each read `size` bytes, out of the L2 when their turn comes. Empty if too large."""

    def rates(self) -> dict[str, Callable[[], tuple[Call, float]]]:
        """By name: what makes a call, and the operations of it."""


def measure(
    device: Device, probes: Probes, seconds: float = 1.0, time_left: Callable[[], bool] = lambda: True
) -> Ceilings:
    """Measure everything that `probes` offers. What fails is noted and left out."""
    found = Ceilings()
    for size in READ_BYTES:
        best: list[float] = []
        if not time_left():
            break
        try:
            for calls in probes.readers(size).values():
                for call in calls:
                    call()
                replay = per_call(device, calls)
                best.append(sorted(replay() for _ in range(5))[2])
        except (SpearfishError, RuntimeError) as error:
            found.notes[f"read {size}"] = first_line(error)
        if best:
            found.read.append((size, round(min(best), 3)))
    for name, make in probes.rates().items():
        if not time_left():
            break
        try:
            call, operations = make()
            call()
            replay = per_call(device, [call])
            found.rates[name] = round(operations / sustained(device, replay, seconds) / 1e6, 1)
        except (SpearfishError, RuntimeError) as error:
            found.notes[name] = first_line(error)
        device.release()
    return found


def first_line(error: BaseException, most: int = 160) -> str:
    """An exception in one line, for a result file."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:most]


class CudaProbes:
    """The kernels of ceilings.cu on a CUDA device."""

    def __init__(self, device: Device) -> None:
        self.device = device.torch_device
        self.index = device.torch_device.index
        facts: Any = torch.cuda.get_device_properties(self.index)
        self.multiprocessors: int = facts.multi_processor_count
        self.shared: int = getattr(facts, "shared_memory_per_block_optin", 0)
        self.l2_bytes = device.l2_bytes
        free, _ = torch.cuda.mem_get_info(self.index)
        size = min(2 * READ_BYTES[-1], free // 2) // 4096 * 4096
        self.buffer = torch.randint(256, (size,), dtype=torch.uint8, device=self.device)
        self.sink = torch.zeros(4, dtype=torch.int32, device=self.device)

    def readers(self, size: int) -> dict[str, list[Call]]:
        copies = max(2, -(-5 * self.l2_bytes // (2 * size)))
        if copies * size > self.buffer.numel():
            return {}
        starts = [self.buffer.data_ptr() + i * size for i in range(copies)]
        found = {
            "plain": [self._reader("read_plain", start, size, 4 * self.multiprocessors, 512, 0) for start in starts]
        }
        if torch.cuda.get_device_capability(self.index)[0] >= 9 and self.shared > _BULK_SHARED + 128:
            found["bulk"] = [
                self._reader("read_bulk", start, size, self.multiprocessors, 32, _BULK_SHARED) for start in starts
            ]
        return found

    def _reader(self, entry: str, start: int, size: int, blocks: int, threads: int, shared: int) -> Call:
        launcher = self._load(entry).launcher((blocks, 1, 1), threads, shared, _READ.size)
        _READ.pack_into(launcher.params, 0, start, size, self.sink.data_ptr())
        return lambda: launcher.launch(jit.current_stream(self.index))

    def _load(self, entry: str, specific: bool = False) -> jit.Function:
        return jit.load(jit.Variant(SOURCE, entry, jit.architecture(self.index, specific)), self.index)

    def rates(self) -> dict[str, Callable[[], tuple[Call, float]]]:
        found: dict[str, Callable[[], tuple[Call, float]]] = {DENSE_RATE: self._library}
        found["mma.sp"] = lambda: self._rate("rate_mma_sp", 8000, 2, 256, 8 * 16 * 2 * 16 * 8 * 32, False)
        if torch.cuda.get_device_capability(self.index)[0] == 9:
            found["wgmma.sp"] = lambda: self._rate("rate_wgmma_sp", 2000, 1, 512, 4 * 8 * 2 * 64 * 128 * 32, True)
        return found

    def _rate(
        self, entry: str, rounds: int, blocks: int, threads: int, round_flops: int, specific: bool
    ) -> tuple[Call, float]:
        data = torch.randn(8192, device=self.device).half().view(torch.int32)
        grid = blocks * self.multiprocessors
        launcher = self._load(entry, specific).launcher((grid, 1, 1), threads, 0, _RATE.size)
        _RATE.pack_into(launcher.params, 0, data.data_ptr(), rounds, 0, self.sink.data_ptr())

        def call(keep: torch.Tensor = data) -> None:
            launcher.launch(jit.current_stream(self.index))

        return call, float(grid * rounds * round_flops)

    def _library(self) -> tuple[Call, float]:
        a, b = (torch.randn((8192, 8192), device=self.device).half() for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b.T, out=out), 2.0 * 8192**3
