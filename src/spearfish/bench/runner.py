"""Drive a run: for each layer prepare every implementation, for each m check it, then time all in turns.

Nothing that one implementation does may end the run: what fails, does not fit or is wrong is written down in its place.
A run ends early, cleanly, when its budget is spent or the device is lost; what was measured by then is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from statistics import median

import torch

from spearfish.bench import check
from spearfish.bench.ceilings import first_line
from spearfish.bench.device import Device, Replay, per_call, sustained
from spearfish.bench.implementations import Implementation, Prepared, dtype_of
from spearfish.bench.problems import Point, Weights
from spearfish.errors import UnsupportedError

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """rounds: turns in which every implementation is timed once. sustain: seconds that each runs back to back besides,
    0 for not at all. rotate: copies of a weight hold this many times the L2 together, so that each is read from memory.
    """

    rounds: int = 9
    sustain: float = 0.0
    rotate: float = 2.5


class Budget:
    """Seconds that a run may take. `left` is also false when the next piece would not fit, taken to be as long as the
    longest so far but for the first, which also loads libraries and compiles."""

    def __init__(self, device: Device, seconds: float | None) -> None:
        self._now, self.seconds = device.seconds, seconds
        self._begin, self._longest, self._pieces = device.seconds(), 0.0, 0

    def took(self, seconds: float) -> None:
        """A piece of work has ended."""
        self._pieces += 1
        if self._pieces > 1:
            self._longest = max(self._longest, seconds)

    def left(self) -> bool:
        """Whether another piece of work fits."""
        return self.seconds is None or self._now() - self._begin + self._longest < self.seconds


@dataclass
class Measured:
    """One point. us: median, lower and upper quartile by implementation; sustained: µs when kept up; how: what ran;
    errors: relative, of those that were timed; missing: why an implementation is not there."""

    point: Point
    us: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    sustained: dict[str, float] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """How a run ended: points measured of those asked for, and why it stopped before its end, if it did."""

    measured: int
    asked: int
    stopped: str | None = None


class _Lost(Exception):
    """The device answers no more."""


def run(
    work: Iterable[Sequence[Point]],
    implementations: Sequence[Implementation],
    device: Device,
    settings: Settings,
    budget: Budget,
    keep: Callable[[Measured], None],
    say: Say = lambda text: None,
) -> Outcome:
    """Measure lists of points, each of one layer; hand every measured point to `keep` at once."""
    lists = [list(points) for points in work]
    outcome = Outcome(0, sum(map(len, lists)))
    for points in lists:
        layer = _Layer(points[0], implementations, device, settings)
        for point in points:
            if not budget.left():
                outcome.stopped = f"the budget of {budget.seconds:g} s is spent"
                return outcome
            began = device.seconds()
            try:
                measured = layer.measure(point)
            except _Lost as lost:
                outcome.stopped = f"the device is lost at {point}: {lost}"
                return outcome
            budget.took(device.seconds() - began)
            outcome.measured += 1
            keep(measured)
            say(_line(measured))
        del layer
        device.release()
    return outcome


def _line(measured: Measured) -> str:
    times = "  ".join(f"{name} {values[0]:.1f}" for name, values in measured.us.items())
    wrong = [f"{name}: {why}" for name, why in measured.missing.items() if why.startswith(("wrong", "failed"))]
    return f"{measured.point}: {times}" + "".join(f"\n    {text}" for text in wrong)


class _Layer:
    """All implementations of one layer, each prepared when first asked for."""

    def __init__(
        self, first: Point, implementations: Sequence[Implementation], device: Device, settings: Settings
    ) -> None:
        self.implementations, self.device, self.settings = implementations, device, settings
        self.weights = Weights(first.k, first.n, first.scheme, dtype_of(first), device.torch_device)
        self._prepared: dict[str, list[Prepared] | str] = {}

    def measure(self, point: Point) -> Measured:
        found = Measured(point)
        make = torch.Generator(device=self.device.torch_device).manual_seed(point.m)
        shape = (point.m, point.k)
        x = torch.randn(shape, generator=make, device=self.device.torch_device).to(self.weights.dtype)
        truths: dict[str, check.Truth] = {}
        replays: dict[str, Replay] = {}
        for one in self.implementations:
            reason = one.why_not(point)
            if reason is None:
                reason = self._guarded(one, lambda one=one: self._ready(one, x, truths, found, replays))  # type: ignore[misc]
            if reason is not None:
                found.missing[one.name] = reason
        self._time(replays, found)
        # A graph's memory is its own until it is given back, and the largest results take a gigabyte each.
        replays.clear()
        self.device.release()
        return found

    def _guarded(self, one: Implementation, step: Callable[[], str | None]) -> str | None:
        """What `step` says; the failure in words if it fails. Raises _Lost if the device is lost as well."""
        try:
            reason = step()
            self.device.synchronize()
            return reason
        except UnsupportedError as error:  # no failure: it does not take this; the last line says why
            return str(error).strip().splitlines()[-1].strip()
        except Exception as error:  # noqa: BLE001  # whatever a rival raises is a result
            reason = f"failed: {first_line(error)}"
        self._prepared.setdefault(one.name, reason)
        try:
            self.device.synchronize()
            self.device.release()
        except RuntimeError as error:
            raise _Lost(f"{one.name} {reason}") from error
        return reason

    def _ready(
        self,
        one: Implementation,
        x: torch.Tensor,
        truths: dict[str, check.Truth],
        found: Measured,
        replays: dict[str, Replay],
    ) -> str | None:
        """Prepare, run, check and record one implementation; the reason if it may not be timed."""
        copies = self._copies(one)
        if isinstance(copies, str):
            return copies
        if one.takes not in truths:
            truths[one.takes] = check.truth(x, self.weights, one.takes)
        # What the allocator hands out next is this memory: a result that is not written stays NaN.
        x.new_full((x.shape[0], self.weights.n), float("nan"))
        error = check.error(copies[0].call(x), truths[one.takes])
        if not error <= check.TOLERANCE[x.dtype]:
            return f"wrong: relative error {error:.0e}, allowed {check.TOLERANCE[x.dtype]:.0e}"
        calls = [partial(copy.call, x) for copy in copies]
        for call in calls:
            call()
        replays[one.name] = per_call(self.device, calls)
        found.errors[one.name] = error
        how = copies[0].how
        if how is not None:
            found.how[one.name] = how(x.shape[0])
        return None

    def _copies(self, one: Implementation) -> list[Prepared] | str:
        known = self._prepared.get(one.name)
        if known is None:
            first = one.prepare(self.weights)
            count = max(2, ceil(self.settings.rotate * self.device.l2_bytes / max(1, first.nbytes)))
            known = self._prepared[one.name] = [first, *(one.prepare(self.weights) for _ in range(count - 1))]
        return known

    def _time(self, replays: dict[str, Replay], found: Measured) -> None:
        names = list(replays)
        samples: dict[str, list[float]] = {name: [] for name in names}
        try:
            for turn in range(self.settings.rounds):
                # Each turn begins with another one, so that nobody always runs on the chip that his rival has warmed.
                first = turn % max(1, len(names))
                for name in names[first:] + names[:first]:
                    samples[name].append(replays[name]())
            for name in names:
                if self.settings.sustain:
                    found.sustained[name] = sustained(self.device, replays[name], self.settings.sustain)
        except RuntimeError as error:
            raise _Lost(first_line(error)) from error
        for name, values in samples.items():
            found.us[name] = _quartiles(values)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    ordered, last = sorted(values), len(values) - 1
    return median(ordered), ordered[round(last / 4)], ordered[round(3 * last / 4)]
