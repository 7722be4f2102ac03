"""One product in two launches: tokens that fill whole blocks, and the rest, where one launch would waste much.

Blocks of many tokens come in multiples of 128: 300 tokens cost what 384 do. 256 and then 44, which have kernels of
their own, cost less, though the weights are read twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from spearfish.kernels.config import Bound, Chip, Family, Problem, Runner

_BLOCK = 128  # tokens
_WASTE = 1.1  # tokens that whole blocks hold for each that is there: below this it is not worth a thought
_DOUBT = 1.02  # what two launches must be thought to save at least, for the estimates are not exact

# The best family and configuration for a problem.
Best = Callable[[Problem], tuple[Family, Any]]


@dataclass(frozen=True)
class InTwo:
    """The first `tokens` of a product one way, those that are left another."""

    tokens: int
    first: tuple[Family, Any]
    rest: tuple[Family, Any]

    def __str__(self) -> str:
        return f"{self.tokens} tokens by {_words(self.first)}; then the rest by {_words(self.rest)}"

    def parts(self, problem: Problem) -> list[tuple[Family, Any, Problem]]:
        """The two that `problem` becomes, each with its family and configuration."""
        sizes = (self.tokens, problem.m - self.tokens)
        return [(*way, replace(problem, m=m)) for way, m in zip((self.first, self.rest), sizes, strict=True)]


def _words(way: tuple[Family, Any]) -> str:
    return f"{way[0].name}: {way[1]}"


class Parts:
    """Runs an InTwo with the kernels of its parts."""

    name = "in two"

    def ways(self, problem: Problem, best: Best) -> list[InTwo]:
        """Where to cut the tokens of `problem`, with the best for both parts."""
        if problem.batch_invariant or -(-problem.m // _BLOCK) * _BLOCK < _WASTE * problem.m:
            return []
        cuts = {(problem.m - 1) // size * size for size in (_BLOCK, 2 * _BLOCK)} - {0}
        return [
            InTwo(cut, best(replace(problem, m=cut)), best(replace(problem, m=problem.m - cut))) for cut in sorted(cuts)
        ]

    def microseconds(self, config: InTwo, problem: Problem, chip: Chip) -> float:
        """The sum of both estimates, and a bit for doubt."""
        return _DOUBT * sum(family.microseconds(way, part, chip) for family, way, part in config.parts(problem))

    def bind(self, config: InTwo, problem: Problem, device: int) -> Bound:
        first, rest = (family.bind(way, part, device) for family, way, part in config.parts(problem))
        cut = config.tokens

        def run(
            x: torch.Tensor,
            stream: torch.Tensor,
            column_scale: torch.Tensor | None,
            bias: torch.Tensor | None,
            out: torch.Tensor,
        ) -> None:
            y = out.view(problem.m, -1)
            first(x[:cut], stream, column_scale, bias, y[:cut])
            rest(x[cut:], stream, column_scale, bias, y[cut:])

        return run


PARTS = Parts()


def families_of(runner: Runner, config: Any) -> list[Family]:
    """Whose kernels run what `choose` has said: those of one family, or of both parts."""
    return [config.first[0], config.rest[0]] if runner is PARTS else [cast(Family, runner)]
