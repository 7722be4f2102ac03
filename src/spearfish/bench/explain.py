"""Why the chooser picks what it picks: every candidate with its estimate, or the reason why it cannot run. No GPU."""

from __future__ import annotations

from spearfish.bench.implementations import ranked
from spearfish.bench.problems import Point
from spearfish.bench.report import table
from spearfish.errors import UnsupportedError
from spearfish.kernels.choose import choose
from spearfish.kernels.config import CHIPS, Chip, Problem
from spearfish.kernels.matmul import kernel_choice
from spearfish.kernels.parts import PARTS
from spearfish.kernels.prepare import granules_of, kind_of


def problem_for(point: Point) -> Problem:
    """The kernels' problem of a point, without its weight. Raises UnsupportedError if no kernel takes the scheme."""
    scheme = point.scheme
    granules = granules_of(scheme, point.k)
    return Problem(kind_of(scheme), point.dtype == "bf16", point.m, point.n, point.k, granules, not scheme.symmetric)


def chip_named(arch: str) -> Chip:
    """The chip that stands for an architecture. Raises UnsupportedError for one that is not in the list."""
    found = CHIPS.get(arch) or CHIPS.get(arch.rstrip("af"))
    if found is None:
        raise UnsupportedError(f"no chip is listed for {arch!r}; architectures: {', '.join(CHIPS)}")
    return found


def explain(point: Point, chip: Chip, most: int = 12) -> str:
    """What is chosen, the `most` best candidates with their estimates, then how many cannot run and why, each reason
    once."""
    problem = problem_for(point)
    ways = ranked(problem, chip)
    able = [way for way in ways if way.why_not is None]
    choice = kernel_choice()
    try:
        chosen = choose(problem, chip, choice)
    except UnsupportedError:
        chosen = None
    body = []
    for i, way in enumerate(able):
        is_chosen = (way.family, way.config) == chosen
        if i < most or is_chosen:
            body.append((f"{way.family.name}: {way.config}", f"{way.microseconds:.1f}", "chosen" if is_chosen else ""))
    others = len(able) - len(body)
    if chosen is not None and chosen[0] is PARTS:
        body.insert(0, (f"{PARTS.name}: {chosen[1]}", f"{PARTS.microseconds(chosen[1], problem, chip):.1f}", "chosen"))
    asked = "" if choice == "auto" else f", SPEARFISH_KERNEL={choice}"
    parts = [f"{point}, on {chip.arch} with {chip.multiprocessors} multiprocessors{asked}"]
    parts.append(table(("candidate", "estimated µs", ""), body) if body else "No candidate can run.")
    if others:
        parts.append(f"and {others} others, up to {able[-1].microseconds:.1f} µs")
    reasons: dict[str, int] = {}
    for way in ways:
        if way.why_not is not None:
            text = f"{way.family.name}: {way.why_not}"
            reasons[text] = reasons.get(text, 0) + 1
    parts += [f"cannot run ({count}): {text}" for text, count in reasons.items()]
    return "\n".join(parts)
