"""A whole measurement: ceilings, then every dtype and scheme asked for, into result files as it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spearfish.bench.ceilings import Ceilings, Probes, measure
from spearfish.bench.device import Device
from spearfish.bench.implementations import Implementation
from spearfish.bench.problems import Point, passes
from spearfish.bench.results import Results, begin_run, end_run, open_for
from spearfish.bench.runner import Budget, Measured, Outcome, Say, Settings, run
from spearfish.scheme import QuantScheme


@dataclass
class Campaign:
    """What is measured how. layers: (k, n, scheme). folder: where result files live, None to keep none. commit: of the
    sources, where they are no checkout. resume: leave out points that the same sources have measured. libraries: what
    `peers.load_libraries` said."""

    layers: Sequence[tuple[int, int, QuantScheme]]
    tokens: Sequence[int]
    dtypes: Sequence[str]
    implementations: Sequence[Implementation]
    settings: Settings = field(default_factory=Settings)
    folder: Path | None = None
    commit: str | None = None
    resume: bool = False
    libraries: Mapping[str, str] = field(default_factory=dict)

    def run(
        self, device: Device, probes: Probes, budget: Budget, say: Say = lambda text: None
    ) -> tuple[list[Results], Outcome]:
        """Measure, save after every point, and return what there is with how it ended.

        A tenth of the budget at most goes to the ceilings, but always a second.
        """
        jobs = [self._job(dtype, device) for dtype in self.dtypes]
        found = [results for files, _ in jobs for results in files.values()]
        total = Outcome(0, 0)
        if not any(work for _, work in jobs):
            return found, total
        seconds = 1.0 if budget.seconds is None else min(1.0, budget.seconds / 40)
        ceilings = measure(device, probes, seconds, budget.left)
        say(_ceilings_line(ceilings))
        for files, work in jobs:
            outcome = self._measure(files, work, device, ceilings, budget, say)
            total.measured += outcome.measured
            total.asked += outcome.asked
            total.stopped = total.stopped or outcome.stopped
        return found, total

    def _job(self, dtype: str, device: Device) -> tuple[dict[QuantScheme, Results], list[list[Point]]]:
        """The files of one dtype, and the points that are to be measured."""
        schemes = dict.fromkeys(scheme for _, _, scheme in self.layers)
        files = {scheme: open_for(self.folder, device.name, scheme, dtype) for scheme in schemes}
        known = {point for results in files.values() for point in results.measured_now()} if self.resume else set()
        lists = ([p for p in points if p not in known] for points in passes(self.layers, self.tokens, dtype))
        return files, [points for points in lists if points]

    def _measure(
        self,
        files: dict[QuantScheme, Results],
        work: list[list[Point]],
        device: Device,
        ceilings: Ceilings,
        budget: Budget,
        say: Say,
    ) -> Outcome:
        identity = begin_run(files.values(), device, self.settings, ceilings, self.commit, self.libraries)

        def save(results: Results) -> None:
            if self.folder is not None and results.points:
                results.save(self.folder)

        def keep(measured: Measured) -> None:
            results = files[measured.point.scheme]
            results.add(measured, identity)
            save(results)

        outcome = run(work, self.implementations, device, self.settings, budget, keep, say)
        ended = f"{outcome.measured} of {outcome.asked} points" + (f"; {outcome.stopped}" if outcome.stopped else "")
        end_run(files.values(), identity, device, ended)
        for results in files.values():
            save(results)
        return outcome


def _ceilings_line(ceilings: Ceilings) -> str:
    best = max((size / us / 1e6 for size, us in ceilings.read), default=0.0)
    rates = ", ".join(f"{name} {rate:.0f} TFLOP/s" for name, rate in ceilings.rates.items())
    notes = "".join(f"\n    {name}: {why}" for name, why in ceilings.notes.items())
    return f"ceilings: read {best:.2f} TB/s; {rates}{notes}"
