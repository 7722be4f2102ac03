"""Which kernel runs a product: of all candidates of all families, the legal one that its family thinks cheapest, or two
of them one after the other."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

from spearfish.errors import UnsupportedError
from spearfish.kernels.config import Chip, Family, Problem, Runner
from spearfish.kernels.jit import ARCHITECTURES, Variant
from spearfish.kernels.parts import PARTS

# Modules of this package with a FAMILY. A family is tried on every chip and says itself where it cannot run.
FAMILY_MODULES = ("hopper", "portable", "unpack")


@lru_cache(maxsize=1)
def families() -> tuple[Family, ...]:
    """All families."""
    return tuple(import_module(f"spearfish.kernels.{name}").FAMILY for name in FAMILY_MODULES)


def all_variants(arch: str) -> list[Variant]:
    """All variants that a GPU of `arch` may use, those for features of exactly that chip ("sm_90a") included.

    Raises UnsupportedError if there is none.
    """
    base = arch.rstrip("af")
    found = [variant for name in (base, f"{base}a") for family in families() for variant in family.variants(name)]
    if not found:
        raise UnsupportedError(
            f"no kernel is made ahead for {arch!r}, a GPU compiles what it needs at first use; architectures:"
            f" {', '.join(ARCHITECTURES)}"
        )
    return found


def choose(problem: Problem, chip: Chip, only: str = "auto") -> tuple[Runner, Any]:
    """What runs `problem`, and its configuration: one family, or two launches (`parts.py`). `only` names a family,
    "auto" takes any.

    Raises UnsupportedError that lists why each candidate cannot run.
    """
    runner: Runner
    runner, config = _best(problem, chip, only)
    if only != "auto":
        return runner, config
    cost = runner.microseconds(config, problem, chip)
    for in_two in PARTS.ways(problem, lambda part: _best(part, chip, only)):
        both = PARTS.microseconds(in_two, problem, chip)
        if both < cost:
            cost, runner, config = both, PARTS, in_two
    return runner, config


def _best(problem: Problem, chip: Chip, only: str) -> tuple[Family, Any]:
    """As `choose`, in one launch."""
    best: tuple[float, Family, Any] | None = None
    reasons: list[str] = []
    for family in families():
        if only not in ("auto", family.name):
            reasons.append(f"{family.name}: SPEARFISH_KERNEL asks for {only}")
            continue
        options = family.candidates(problem, chip)
        if not options:
            reasons.append(f"{family.name}: no configuration for {problem.kind} on {chip.arch}")
        for option in options:
            reason = family.why_not(option, problem, chip)
            if reason is not None:
                reasons.append(f"{family.name}: {reason}")
                continue
            cost = family.microseconds(option, problem, chip)
            if best is None or cost < best[0]:
                best = (cost, family, option)
    if best is None:
        words = "\n  ".join(dict.fromkeys(reasons))
        raise UnsupportedError(
            f"no kernel for {problem.kind} [n={problem.n}, k={problem.k}] with {problem.m} tokens:\n  {words}"
        )
    return best[1], best[2]
