"""The only part that touches a GPU's clock: record calls into a CUDA graph, replay it, read the time off events.

Everything else talks to the `Device` protocol, which the tests fill with a device whose time is made up.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from spearfish.errors import UnsupportedError

Call = Callable[[], object]
# Runs what was recorded once, and returns the microseconds that it took.
Replay = Callable[[], float]

_QUERY = {
    "driver": "driver_version",
    "clock MHz": "clocks.sm",
    "largest clock MHz": "clocks.max.sm",
    "memory clock MHz": "clocks.mem",
    "power W": "power.draw",
    "power limit W": "power.limit",
    "temperature C": "temperature.gpu",
}


class Device(Protocol):
    """Where calls run and how long they take."""

    torch_device: torch.device
    name: str
    l2_bytes: int

    def record(self, calls: Sequence[Call]) -> Replay:
        """Record `calls`, each already run once, to be replayed back to back."""

    def seconds(self) -> float:
        """A clock that only goes forward, for budgets."""

    def synchronize(self) -> None:
        """Wait until all work is done. Raises if the device is lost."""

    def release(self) -> None:
        """Give memory that nobody holds back to the device."""

    def state(self) -> dict[str, str]:
        """Driver, clocks, power, temperature, as far as they can be read."""


class CudaDevice:
    """torch's current CUDA device."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError("a measurement needs an NVIDIA GPU, and torch finds none here")
        self.index = torch.cuda.current_device()
        self.torch_device = torch.device("cuda", self.index)
        facts: Any = torch.cuda.get_device_properties(self.index)
        self.name: str = facts.name
        self.l2_bytes: int = facts.L2_cache_size
        self._uuid = f"GPU-{facts.uuid}"
        self._side = torch.cuda.Stream(self.index)  # type: ignore[no-untyped-call]

    def record(self, calls: Sequence[Call]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Not `with torch.cuda.graph`, which empties torch's cache of memory each time: thousands are recorded here.
        with torch.cuda.stream(self._side):
            graph.capture_begin()
            try:
                for call in calls:
                    call()
            except BaseException:
                # The end of a broken capture complains as well; what broke it says more.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        begin, end = _event(), _event()

        def replay() -> float:
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e3

        return replay

    def seconds(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def release(self) -> None:
        torch.cuda.empty_cache()

    def state(self) -> dict[str, str]:
        # Only looks; and a machine without nvidia-smi still measures.
        command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY.values())}", "--format=csv,noheader,nounits"]
        try:
            shown = subprocess.run([*command, "-i", self._uuid], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.SubprocessError):
            return {}
        values = [value.strip() for value in shown.stdout.strip().split(",")]
        return dict(zip(_QUERY, values, strict=True)) if len(values) == len(_QUERY) else {}


# A replay should take this long, so that the few microseconds around a graph do not count.
_WANTED_MICROSECONDS = 1500.0
_MOST_NODES = 1024


def per_call(device: Device, calls: Sequence[Call]) -> Replay:
    """Microseconds of one call on average, from a graph that goes through `calls` as often as it takes to be timed
    well. Each call must have run once before."""
    replay = device.record(calls)
    replay()
    once = replay()
    times = min(int(_WANTED_MICROSECONDS / max(once, 1e-3)) + 1, max(1, _MOST_NODES // len(calls)))
    if times > 1:
        replay = device.record([*calls] * times)
        replay()
    count = times * len(calls)
    return lambda: replay() / count


def sustained(device: Device, replay: Replay, seconds: float) -> float:
    """What `replay` returns after it has run back to back for `seconds`, the average of the second half: the clock that
    the chip can hold, not the one it starts with."""
    begin = device.seconds()
    late: list[float] = []
    while (passed := device.seconds() - begin) < seconds:
        value = replay()
        if passed >= seconds / 2:
            late.append(value)
    return sum(late) / len(late) if late else replay()


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
