"""From result files to tables that can be read, and a plain list of where we lose."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

from spearfish.bench.problems import Point, scheme_name
from spearfish.bench.results import Results, slug
from spearfish.errors import FormatError
from spearfish.scheme import QuantScheme

OURS = "spearfish"
# A ratio within this of 1 is no loss: the medians of one run repeat to about that.
EVEN = 0.97


@dataclass(frozen=True)
class Row:
    """One point: times in µs by implementation, the roof time if the ceilings are known, and the width of the middle
    half of our times as a fraction of their median."""

    point: Point
    us: dict[str, float]
    roof_us: float | None
    spread: float | None = None

    @property
    def ours(self) -> float | None:
        return self.us.get(OURS)

    @property
    def cublas(self) -> float | None:
        """The better of its two layouts."""
        return min((us for name, us in self.us.items() if name.startswith("cublas")), default=None)

    @property
    def rival(self) -> tuple[str, float] | None:
        """The best of all others, cuBLAS among them."""
        found = [(us, name) for name, us in self.us.items() if not name.startswith(OURS)]
        if not found:
            return None
        us, name = min(found)
        return name, us

    @property
    def against_cublas(self) -> float | None:
        return ratio(self.cublas, self.ours)

    @property
    def against_rival(self) -> float | None:
        return ratio(self.rival[1] if self.rival else None, self.ours)

    @property
    def of_roof(self) -> float | None:
        """Fraction of what the card allows."""
        return ratio(self.roof_us, self.ours)


def ratio(above: float | None, below: float | None) -> float | None:
    """above / below, None if either is missing."""
    return None if above is None or not below else above / below


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None if none is."""
    logs = [log(value) for value in values if value is not None]
    return exp(sum(logs) / len(logs)) if logs else None


def rows(results: Results, sustained: bool = False) -> list[Row]:
    """The points of a file, in its order; with `sustained` the times of kept-up runs, of the points that have them."""
    found = []
    for entry in results.points:
        times: dict[str, Any] = entry.get("sustained", {}) if sustained else entry["us"]
        us = {name: value if sustained else value[0] for name, value in times.items()}
        if us:
            point = results.point(entry)
            middle, low, high = entry["us"].get(OURS, (0.0, 0.0, 0.0))
            spread = None if sustained else ratio(high - low, middle)
            found.append(Row(point, us, results.ceilings(entry).roof_us(point), spread))
    return found


def by_tokens(found: Sequence[Row]) -> dict[int, list[Row]]:
    """The rows of each m, ascending."""
    return {m: [row for row in found if row.point.m == m] for m in sorted({row.point.m for row in found})}


# ------------------------------------------------------------------------------------------------------------ tables


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned, so that a terminal shows it as well."""
    lines = [list(head), *(list(line) for line in body)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

    def format_line(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"

    rule = "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([format_line(lines[0]), rule, *map(format_line, lines[1:])])


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A fraction as a percentage, or a dash."""
    return "–" if value is None else f"{100 * value:.0f} %"


def microseconds(value: float | None) -> str:
    """Three digits are what a median is good for."""
    return "–" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def points_table(found: Sequence[Row]) -> str:
    """Every point: our time, bandwidth and rate; cuBLAS, the best rival and the roof beside it."""
    head = (
        "k × n",
        "m",
        "µs",
        "spread",
        "TB/s",
        "TFLOP/s",
        "cuBLAS µs",
        "× cuBLAS",
        "best rival",
        "its µs",
        "× rival",
        "of roof",
    )
    body = []
    for row in found:
        point, ours, rival = row.point, row.ours, row.rival
        body.append(
            (
                f"{point.k} × {point.n}",
                str(point.m),
                microseconds(ours),
                "–" if row.spread is None else f"{100 * row.spread:.1f} %",
                number(ratio(point.bytes / 1e6, ours)),
                number(ratio(point.flops / 1e6, ours), 0),
                microseconds(row.cublas),
                number(row.against_cublas),
                rival[0] if rival else "–",
                microseconds(rival[1] if rival else None),
                number(row.against_rival),
                percent(row.of_roof),
            )
        )
    return table(head, body)


def means_table(found: Sequence[Row], baseline: Baseline | None = None) -> str:
    """For each m the geometric means over the layers, and the worst layer."""
    head = ["m", "layers", "× cuBLAS", "× best rival", "worst", "at k × n", "of roof", "≥ 45 MB: of roof"]
    if baseline:
        head.append("× 2024 kernel")
    body = []
    for m, here in by_tokens([row for row in found if row.ours is not None]).items():
        compared = [row for row in here if row.against_rival is not None]
        worst = min(compared, key=lambda row: row.against_rival or 0.0, default=None)
        large = [row.of_roof for row in here if row.point.weight_bytes >= 45e6]
        line = [
            str(m),
            str(len(here)),
            number(geometric_mean(row.against_cublas for row in here)),
            number(geometric_mean(row.against_rival for row in here)),
            number(worst.against_rival if worst else None),
            f"{worst.point.k} × {worst.point.n}" if worst else "–",
            percent(geometric_mean(row.of_roof for row in here)),
            percent(geometric_mean(large)),
        ]
        if baseline:
            line.append(number(geometric_mean(ratio(baseline.us(row.point), row.ours) for row in here)))
        body.append(line)
    return table(head, body)


def rivals_table(found: Sequence[Row]) -> str:
    """For each m how fast everybody is against cuBLAS, geometric means over the layers that he runs.

    A star marks a mean that lacks layers.
    """
    names = sorted({name for row in found for name in row.us if not name.startswith("cublas")}, key=_order)
    groups = by_tokens([row for row in found if row.cublas is not None])

    def cell(here: Sequence[Row], name: str) -> str:
        there = [ratio(row.cublas, row.us[name]) for row in here if name in row.us]
        return number(geometric_mean(there)) + ("*" if 0 < len(there) < len(here) else "")

    body = [[name, *(cell(here, name) for here in groups.values())] for name in names]
    if groups:
        roofs = (number(geometric_mean(ratio(row.cublas, row.roof_us) for row in here)) for here in groups.values())
        body.append(["the roof", *roofs])
    return table(["× cuBLAS at m =", *map(str, groups)], body)


def _order(name: str) -> tuple[bool, str]:
    return not name.startswith(OURS), name


def losses(found: Sequence[Row]) -> list[str]:
    """Every point at which another is faster, the worst first, in words."""
    behind = [row for row in found if (row.against_rival or 1.0) < EVEN]
    behind.sort(key=lambda row: row.against_rival or 0.0)
    absent = [f"{row.point.k} × {row.point.n}, m = {row.point.m}: no result of ours" for row in found if not row.ours]
    return absent + [
        f"{row.point.k} × {row.point.n}, m = {row.point.m}: {number(row.against_rival)}× of {row.rival[0]}"
        f" ({microseconds(row.ours)} against {microseconds(row.rival[1])} µs)"
        for row in behind
        if row.rival
    ]


def regrets(results: Results) -> list[str]:
    """Points at which another of our own ways was faster than the chosen one, the worst first, with what it was."""
    found = []
    for entry in results.points:
        ways = {name: values[0] for name, values in entry["us"].items() if name.startswith(OURS)}
        chosen = ways.get(OURS)
        best = min(ways, key=lambda name: ways[name], default=OURS)
        how = entry["how"]
        if chosen and ways[best] < EVEN * chosen and how.get(best) != how.get(OURS, ""):
            found.append(
                (
                    ways[best] / chosen,
                    f"{entry['k']} × {entry['n']}, m = {entry['m']}: {microseconds(ways[best])} µs by"
                    f" {how.get(best, best)}, {microseconds(chosen)} by the chosen {how.get(OURS, 'way')}",
                )
            )
    return [text for _, text in sorted(found)]


def unmeasured(results: Results) -> list[str]:
    """What was wrong or failed, each reason once with how often."""
    seen: dict[tuple[str, str], list[str]] = {}
    for entry in results.points:
        for name, why in entry.get("missing", {}).items():
            seen.setdefault((name, why), []).append(f"{entry['k']} × {entry['n']}, m = {entry['m']}")
    return [
        f"{name}: {why} (at {places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''})"
        for (name, why), places in seen.items()
    ]


# ------------------------------------------------------------------------------------ the kernel that was there before


@dataclass(frozen=True)
class Baseline:
    """Times of the 2024 kernel on one GPU, measured once and kept: by scheme, "KxN" and m, in µs."""

    about: str
    times: dict[str, dict[str, dict[str, float]]]

    def us(self, point: Point) -> float | None:
        """Its time at a point, if it was measured there. It takes float16 only."""
        if point.dtype != "fp16":
            return None
        return self.times.get(scheme_name(point.scheme), {}).get(f"{point.k}x{point.n}", {}).get(str(point.m))


def baseline_for(folder: Path, gpu: str) -> Baseline | None:
    """The kept baseline of a GPU, `folder`/<gpu>/baseline_2024_kernel.json, or None."""
    path = folder / slug(gpu) / "baseline_2024_kernel.json"
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Baseline(content["about"], content["us"])
    except (ValueError, KeyError) as error:
        raise FormatError(f"{path} is no baseline file: {error!r}") from error


# --------------------------------------------------------------------------------------------------------------- pages


def report(results: Results, baseline: Baseline | None = None, heading: str = "##", details: bool = True) -> str:
    """All tables of one file as Markdown."""
    found = rows(results)
    title = f"{heading} {scheme_name(results.scheme)}, {results.dtype}, {results.gpu}"
    parts = [title, _provenance(results)]
    parts += [f"{heading}# Geometric means", means_table(found, baseline)]
    kept_up = rows(results, sustained=True)
    if kept_up:
        parts += [f"{heading}# The same, each kept up for a second or more", means_table(kept_up)]
    parts += [f"{heading}# Everybody", rivals_table(found)]
    behind = losses(found)
    parts.append(f"{heading}# Where we lose")
    parts.append("\n".join(f"* {text}" for text in behind) if behind else "Nowhere that was measured.")
    regretted = regrets(results)
    if regretted:
        parts += [f"{heading}# Where another of our own ways was faster", "\n".join(f"* {text}" for text in regretted)]
    broken = unmeasured(results)
    if broken:
        parts += [f"{heading}# What failed or was wrong, and was not timed", "\n".join(f"* {text}" for text in broken)]
    if details:
        parts += [f"{heading}# Every point", points_table(found)]
    return "\n\n".join(parts) + "\n"


def _provenance(results: Results) -> str:
    lines = []
    for run in results.runs:
        count = sum(entry["run"] == run["id"] for entry in results.points)
        kept_up = sum(entry.get("sustained_run") == run["id"] for entry in results.points)
        points = f"{count} points" if count else f"{kept_up} points, kept up"
        versions, state = run["versions"], run["state"]["before"]
        rates = ", ".join(f"{name} {rate:.0f}" for name, rate in run["ceilings"]["rates"].items())
        read = run["ceilings"]["read"]
        bandwidth = f"{max(size / us for size, us in read) / 1e6:.2f} TB/s" if read else "not measured"
        lines.append(
            f"* {run['date']}, commit {run['commit']}: {points}; torch {versions.get('torch')}, CUDA"
            f" {versions.get('cuda')}, driver {state.get('driver', '?')}; read {bandwidth}; sustained TFLOP/s:"
            f" {rates or '–'}"
        )
    return "\n".join(lines)


def layers_table(found: Sequence[Row], counts: dict[tuple[int, int, QuantScheme], int]) -> str:
    """For a model: the sum over its layers at each m, in ms, ours against cuBLAS; no sum without all layers."""

    def total(here: Sequence[Row], pick: Callable[[Row], float | None]) -> float | None:
        times = [(counts.get((row.point.k, row.point.n, row.point.scheme), 0), pick(row)) for row in here]
        return None if any(us is None for _, us in times) else sum(count * (us or 0.0) for count, us in times) / 1e3

    body = []
    for m, here in by_tokens(found).items():
        ours, cublas = total(here, lambda row: row.ours), total(here, lambda row: row.cublas)
        roof = total(here, lambda row: row.roof_us)
        body.append(
            (str(m), number(ours, 3), number(cublas, 3), number(ratio(cublas, ours)), percent(ratio(roof, ours)))
        )
    return table(("m", "all linear layers, ms", "cuBLAS, ms", "× cuBLAS", "of roof"), body)
