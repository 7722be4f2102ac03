"""Linears that read one input, solved together."""

from __future__ import annotations

import time

import torch
from torch import nn

from spearfish.compress import methods, report
from spearfish.compress.hessian import Hessian, relative_error
from spearfish.compress.recipe import Recipe, matches
from spearfish.errors import ShapeError
from spearfish.reference import dequantize
from spearfish.scheme import QuantWeight


def present(block: nn.Module, path: str, names: tuple[str, ...]) -> dict[str, nn.Module]:
    """Those of a block's submodules that it has, by full name; `path` is the block's own."""
    found = dict(block.named_modules())
    return {f"{path}.{name}": found[name] for name in names if name in found}


def solve_group(
    linears: dict[str, nn.Linear], hessian: Hessian, recipe: Recipe
) -> dict[str, tuple[QuantWeight, report.LayerReport]]:
    """Solves linears that read the same input; those of one scheme are stacked, so that a sweep costs once."""
    method = methods.METHODS[recipe.method]
    names = list(linears)
    h = hessian.mean(names[0])
    out: dict[str, tuple[QuantWeight, report.LayerReport]] = {}
    places, first = {}, 0
    for name, linear in linears.items():
        places[name] = range(first, first + linear.out_features)
        first += linear.out_features
    for sparse in (True, False):
        chosen = [n for n in names if (method.prunes and not matches(n, recipe.dense_layers)) == sparse]
        if not chosen:
            continue
        scheme = recipe.scheme(sparse)
        begin = time.perf_counter()
        stacked = torch.cat([linears[name].weight.detach().float() for name in chosen])
        if not stacked.isfinite().all():
            raise ShapeError(f"{', '.join(chosen)}: the dense weight holds NaN or Inf")
        lag = None
        if hessian.lag is not None:
            outputs = [row for name in chosen for row in places[name]]
            lag = hessian.lag[outputs] * ((recipe.catch_up or 0.0) / max(hessian.tokens, 1))
        problem = methods.Problem.of(stacked, h, scheme, recipe.damping, lag)
        solved = method.solve(problem)
        naive = dequantize(methods.magnitude(problem))
        values = dequantize(solved)
        took = time.perf_counter() - begin
        remarks = [problem.factor.remark] if problem.factor.remark else []
        if hessian.skipped:
            remarks.append(
                f"{hessian.skipped} of {hessian.skipped + hessian.tokens} tokens have non-finite inputs and were left"
                " out; calibrate in float32 or bfloat16"
            )
        row = 0
        for name in chosen:
            n = linears[name].out_features
            rows = slice(row, row + n)
            row += n
            weight = _rows(solved, rows)
            out[name] = (
                weight,
                report.LayerReport(
                    name=name,
                    n=n,
                    k=stacked.shape[1],
                    scheme=str(scheme),
                    naive=relative_error(stacked[rows], naive[rows], h),
                    error=relative_error(stacked[rows], values[rows], h),
                    sparsity=float((values[rows] == 0).float().mean()),
                    seconds=took * n / stacked.shape[0],
                    remark="; ".join(remarks) or None,
                ),
            )
    return out


def _rows(weight: QuantWeight, rows: slice) -> QuantWeight:
    return QuantWeight(weight.scheme, **{name: t[rows].contiguous().cpu() for name, t in weight.tensors().items()})
