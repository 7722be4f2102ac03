"""Who takes part: small adapters with one question (`why_not`) and one step (`prepare`). Here ourselves and cuBLAS; the
others are in `peers`.

An adapter says which of the three weights of `problems.Weights` it multiplies with: dense rivals get a dense weight of
the same size, codes and groups, since they cannot use that half of it is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch.nn import functional

from spearfish.bench.problems import DTYPES, Point, Weights
from spearfish.errors import UnsupportedError
from spearfish.kernels import matmul as kernels
from spearfish.kernels.choose import choose, families
from spearfish.kernels.config import Chip, Family, Problem, Runner, chip_of
from spearfish.kernels.prepare import PreparedWeight

WeightKind = Literal["own", "codes", "full"]


@dataclass(frozen=True)
class Prepared:
    """A weight in an implementation's own layout. `call` takes x [m, k] and returns y [m, n], a view if need be;
    `nbytes` is what the weight holds; `how` says for some m in words what will run."""

    call: Callable[[torch.Tensor], torch.Tensor]
    nbytes: int
    how: Callable[[int], str] | None = None


class Implementation(Protocol):
    """A way to multiply. `name` is its key in result files."""

    name: str
    takes: WeightKind

    def why_not(self, point: Point) -> str | None:
        """Why it cannot take part at `point` here, or None. Must not raise and not touch the GPU."""

    def prepare(self, weights: Weights) -> Prepared:
        """A new copy of the weight, ready to multiply. May raise anything; the run records it and goes on."""


class Cublas:
    """The library's product with a dense 16-bit weight, stored [n, k] as torch.nn.Linear does, or [k, n]."""

    takes: WeightKind = "full"

    def __init__(self, transposed: bool = False) -> None:
        self.name = "cublas kn" if transposed else "cublas"
        self.transposed = transposed

    def why_not(self, point: Point) -> str | None:
        return None

    def prepare(self, weights: Weights) -> Prepared:
        if self.transposed:
            stored = weights.full.T.contiguous()
            return Prepared(lambda x: x @ stored, stored.nbytes)
        weight = weights.full.clone()
        return Prepared(lambda x: functional.linear(x, weight), weight.nbytes)


class Spearfish:
    """Ourselves: what the chooser picks; or with `family` that one's best; or its `rank`-th best, to see whether the
    chooser is right."""

    takes: WeightKind = "own"

    def __init__(self, family: str | None = None, rank: int | None = None) -> None:
        self.family, self.rank = family, rank
        self.name = "spearfish" + (f" {family}" if family else "") + ("" if rank is None else f" #{rank + 1}")

    def why_not(self, point: Point) -> str | None:
        if point.k % 8 and (self.family is not None or self.rank is not None):
            return "a kernel on its own takes multiples of 8 k; matmul pads x"
        return None

    def prepare(self, weights: Weights) -> Prepared:
        prepared = kernels.prepare(weights.own, weights.device, weights.dtype)
        if self.family is None and self.rank is None:
            return Prepared(lambda x: kernels.matmul(x, prepared), prepared.nbytes, lambda m: chosen(prepared, m))
        stream = prepared.stream
        if stream is None:
            raise UnsupportedError(f"no kernel takes this weight: {prepared.path}")
        device = stream.get_device()
        bound: dict[int, Any] = {}

        def call(x: torch.Tensor) -> torch.Tensor:
            m = x.shape[0]
            if m not in bound:
                family, config = self._pick(problem_of(prepared, m), chip_of(device))
                bound[m] = family.bind(config, problem_of(prepared, m), device)
            y = x.new_empty((m, prepared.n))
            bound[m](x, stream, prepared.column_scale, None, y)
            return y

        def how(m: int) -> str:
            family, config = self._pick(problem_of(prepared, m), chip_of(device))
            return f"{family.name}: {config}"

        return Prepared(call, prepared.nbytes, how)

    def _pick(self, problem: Problem, chip: Chip) -> tuple[Runner, Any]:
        if self.rank is None:
            return choose(problem, chip, self.family or "auto")
        ways = [way for way in ranked(problem, chip) if way.why_not is None and self.family in (None, way.family.name)]
        if self.rank >= len(ways):
            raise UnsupportedError(f"there are only {len(ways)} ways")
        return ways[self.rank].family, ways[self.rank].config


@dataclass(frozen=True)
class Way:
    """One candidate of one family: its estimate in microseconds, or why it cannot run."""

    family: Family
    config: Any
    microseconds: float
    why_not: str | None


def ranked(problem: Problem, chip: Chip) -> list[Way]:
    """All candidates of all families, the one with the lowest estimate first and those that cannot run last."""
    ways = []
    for family in families():
        for config in family.candidates(problem, chip):
            reason = family.why_not(config, problem, chip)
            cost = float("inf") if reason else family.microseconds(config, problem, chip)
            ways.append(Way(family, config, cost, reason))
    return sorted(ways, key=lambda way: way.microseconds)


def problem_of(prepared: PreparedWeight, m: int) -> Problem:
    """The kernels' problem of m tokens with a prepared weight."""
    kind, n, k, granules, has_zeros, batch_invariant = prepared.facts
    return Problem(kind, prepared.dtype == torch.bfloat16, m, n, k, granules, has_zeros, batch_invariant)


def chosen(prepared: PreparedWeight, m: int) -> str:
    """What runs m tokens with a prepared weight, in words."""
    if prepared.stream is None:
        return prepared.path
    family, config = choose(problem_of(prepared, m), chip_of(prepared.stream.get_device()), kernels.kernel_choice())
    return f"{family.name}: {config}"


def ours_and_cublas(top: int = 0, every_family: bool = False) -> list[Implementation]:
    """Ourselves, cuBLAS in both layouts, and on request every family's best and the `top` ways of the estimate."""
    found: list[Implementation] = [Spearfish(), Cublas(), Cublas(transposed=True)]
    if every_family:
        found += [Spearfish(family.name) for family in families()]
    return found + [Spearfish(None, rank) for rank in range(top)]


def select(found: Sequence[Implementation], names: Sequence[str]) -> list[Implementation]:
    """Those of `found` that are named. Raises UnsupportedError for a name that none has."""
    unknown = sorted(set(names) - {one.name for one in found})
    if unknown:
        raise UnsupportedError(f"no implementation {', '.join(unknown)}: there are {', '.join(x.name for x in found)}")
    return [one for one in found if one.name in names]


def dtype_of(point: Point) -> torch.dtype:
    """torch's dtype of a point."""
    return DTYPES[point.dtype]
