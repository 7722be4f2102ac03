"""Where pruning hurts: what each group of linears adds to the error of its block, and which of them a budget keeps
dense.

Linears that read the same input (q, k and v; gate and up) stay together: inference engines fuse them and need one
format for all. Each group is solved twice on the dense model's own activations, pruned and dense, everything else left
as it is; what differs is how far the block's output moves. That is the same scale for every layer, a share of the
hidden state that all blocks write into, where a layer's own relative error would not be.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from spearfish.compress.hessian import Hessian
from spearfish.compress.recipe import Recipe, matches
from spearfish.compress.recover import distance
from spearfish.compress.solve import present, solve_group
from spearfish.compress.walk import Walker
from spearfish.reference import dequantize
from spearfish.scheme import QuantScheme

# Windows of the calibration text that are enough to rank layers, and the method that does it: a better solver lowers
# all errors much alike.
WINDOWS = 8
METHOD = "sparsegpt"


@dataclass(frozen=True)
class Unit:
    """layers: full module names that share an input. nbytes: of codes and scales if they stay dense. sparse, dense:
    mean over tokens of ‖h − ĥ‖² / ‖h‖² of the block's output h with only these layers pruned and quantised, or only
    quantised."""

    layers: tuple[str, ...]
    nbytes: int
    sparse: float
    dense: float

    @property
    def saved_per_byte(self) -> float:
        return (self.sparse - self.dense) / self.nbytes

    def is_dense_in(self, dense_layers: tuple[str, ...]) -> bool:
        """Whether a recipe's patterns keep all of it dense anyway."""
        return all(matches(name, dense_layers) for name in self.layers)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"layers": list(self.layers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Unit:
        """Inverse of `to_dict`."""
        return cls(tuple(values["layers"]), int(values["nbytes"]), float(values["sparse"]), float(values["dense"]))


def measure_block(walker: Walker, index: int, hidden: torch.Tensor, recipe: Recipe) -> list[Unit]:
    """The units of one loaded, dense block whose input is hidden [count, length, width]. Layers that the recipe
    ignores, or that the text never reaches, are none."""
    path = walker.paths[index]
    block = walker.net.get_submodule(path)
    wanted = walker.forward(index, hidden)
    fast = replace(recipe, method=METHOD)
    units = []
    for group in walker.model.architecture.linears:
        linears = {
            name: module
            for name, module in present(block, path, group).items()
            if isinstance(module, nn.Linear) and not matches(name, recipe.ignore)
        }
        if not linears:
            continue
        first = next(iter(linears.values()))
        hessian = Hessian(first.in_features, walker.device, recipe.equal_norm)
        if not walker.inputs(index, first, hidden, hessian.add):
            continue
        originals = {name: module.weight.data.clone() for name, module in linears.items()}
        errors = []
        for dense_layers in ((), ("*",)):
            found = solve_group(linears, hessian, replace(fast, dense_layers=dense_layers))
            for name, (weight, _) in found.items():
                linears[name].weight.data.copy_(dequantize(weight))
            errors.append(float(distance(walker.forward(index, hidden), wanted)))
            for name, module in linears.items():
                module.weight.data.copy_(originals[name])
        scheme = recipe.scheme(sparse=False)
        nbytes = sum(dense_bytes(m.out_features, m.in_features, scheme) for m in linears.values())
        units.append(Unit(tuple(linears), nbytes, *errors))
    return units


def dense_bytes(n: int, k: int, scheme: QuantScheme) -> int:
    """Codes and float16 scales of a dense weight [n, k]."""
    return n * k * scheme.bits // 8 + 2 * n * scheme.groups(k)


def choose(units: list[Unit], budget: float, fixed: tuple[str, ...] = ()) -> list[Unit]:
    """The units to keep dense, best first: those that save the most error per byte while their bytes fit into
    `budget`, a share of what all units would take dense. Layers that match `fixed` are dense anyway and count."""
    left = budget * sum(unit.nbytes for unit in units)
    free = []
    for unit in units:
        if unit.is_dense_in(fixed):
            left -= unit.nbytes
        else:
            free.append(unit)
    chosen = []
    for unit in sorted(free, key=lambda unit: -unit.saved_per_byte):
        if unit.nbytes <= left and unit.saved_per_byte > 0:
            chosen.append(unit)
            left -= unit.nbytes
    return chosen
