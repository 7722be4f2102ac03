"""Whether the format of the output can hold what a recipe will make of a model: asked before the work, not after it."""

from __future__ import annotations

import torch
from torch import nn

from spearfish.checkpoint.reader import layer_format
from spearfish.compress.methods import METHODS
from spearfish.compress.recipe import Recipe, matches
from spearfish.compress.solve import present
from spearfish.compress.walk import Walker
from spearfish.errors import UnsupportedError
from spearfish.formats import FORMATS
from spearfish.scheme import QuantScheme, QuantWeight

SHOWN = 5  # layers in one message


def refuse_unfit(walker: Walker, recipe: Recipe, format: str) -> None:
    """Raise UnsupportedError naming the layers whose size or scheme the format cannot hold, and why."""
    if format not in FORMATS:
        raise UnsupportedError(f"no format {format!r}; there are {', '.join(FORMATS)}")
    failed = []
    for path in walker.paths:
        block = walker.net.get_submodule(path)
        linears = [
            found for group in walker.model.architecture.linears for found in present(block, path, group).items()
        ]
        for full, linear in linears:
            if matches(full, recipe.ignore) or not isinstance(linear, nn.Linear):
                continue
            sparse = METHODS[recipe.method].prunes and not matches(full, recipe.dense_layers)
            weight = _without_values(recipe.scheme(sparse), linear.out_features, linear.in_features)
            reasons = FORMATS[layer_format(format, weight.scheme.is_sparse)].refusals(weight)
            failed += [f"  {full}: {'; '.join(reasons)}"] if reasons else []
    if failed:
        more = [f"  ... and {len(failed) - SHOWN} more"] if len(failed) > SHOWN else []
        raise UnsupportedError(
            "\n".join(
                [
                    f"{format} cannot hold {len(failed)} of the layers; choose another format (--to) or leave them out"
                    f" (--ignore):",
                    *failed[:SHOWN],
                    *more,
                ]
            )
        )


def _without_values(scheme: QuantScheme, n: int, k: int) -> QuantWeight:
    """A weight of that size whose tensors hold nothing: shapes and dtypes are all that decides here."""

    def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((n, columns), dtype=dtype, device="meta")

    codes = empty(k // 2 if scheme.is_sparse else k, torch.float16 if scheme.bits == 16 else torch.uint8)
    scales = None if scheme.bits == 16 else empty(scheme.groups(k), torch.float16)
    return QuantWeight(scheme, codes, scales, empty(k // 4, torch.uint8) if scheme.is_sparse else None)
