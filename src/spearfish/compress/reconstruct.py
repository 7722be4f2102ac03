"""Block-wise reconstruction: after blocks are solved, their codes and scales learn from the dense ones, masks frozen.

The layers were solved one by one, each for its own output. Here all kept weights of a few neighbouring blocks move
together so that what each of these blocks gives comes close to what the dense model has at its place, on the hidden
states that the compressed blocks in front really give: they then also make good some of what those lost. Nothing is
added to the model.

These blocks, their gradients and the hidden states of all windows at their ends are in memory at a time. The result
depends on the recipe and the seed alone, so blocks that were interrupted are done again to the same bits (on a CPU with
as many threads).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from spearfish.compress.recover import GridLinear, distance, even, fused, optimiser_of, rate_at, set_rates
from spearfish.compress.replay import Repeated
from spearfish.compress.walk import Walker, first_of
from spearfish.errors import SpearfishError
from spearfish.reference import dequantize
from spearfish.scheme import QuantWeight


@dataclass(frozen=True)
class Settings:
    """tokens: per step. rate: largest learning rate of the codes, in codes per step; scales move by `scale_rate` of
    themselves. Rounding fades in until `rounded` of the steps are done. held_out: share of the windows that are not
    trained on but judge the result. evenly: see recover.Settings."""

    steps: int
    tokens: int = 1024
    rate: float = 0.01
    scale_rate: float = 1e-3
    warmup: float = 0.05
    rounded: float = 0.5
    held_out: float = 0.125
    evenly: bool = False
    seed: int = 0


def settings_on(device: torch.device) -> dict[str, Any]:
    """What pays on a device besides the defaults: larger steps on a GPU, which takes no longer for them."""
    return {"tokens": 8192, "rate": 0.02, "evenly": True} if device.type == "cuda" else {}


@dataclass(frozen=True)
class Outcome:
    """Of blocks trained together: mean over the held-out tokens of ‖h − ĥ‖² / ‖h‖², h being the dense model's hidden
    state behind the last of them and ĥ the compressed one's. kept: False if training did not lower it; the blocks then
    stay as they were."""

    blocks: list[str]
    before: float
    after: float
    kept: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def reconstruct(
    walker: Walker,
    indices: Sequence[int],
    weights: dict[str, QuantWeight],
    hidden: torch.Tensor,
    goals: Sequence[torch.Tensor],
    settings: Settings,
) -> tuple[dict[str, QuantWeight], Outcome]:
    """Trains the `weights` (by full module name) of neighbouring blocks so that from `hidden` [count, length, width],
    which the first receives, each gives its goal.

    The loaded blocks end up holding the values of the weights that are returned. Raises SpearfishError if the loss is
    not finite.
    """
    paths = [walker.paths[index] for index in indices]
    plain = {name: walker.net.get_submodule(name) for name in weights}
    training, judging = split(len(hidden), settings.held_out, settings.seed + indices[0])

    def judged() -> float:
        out = hidden[judging]
        for index in indices:
            out = walker.forward(index, out)
        return float(distance(out, goals[-1][judging]))

    before = judged()
    dtype = torch.bfloat16 if walker.fast else torch.float32
    layers = {
        name: GridLinear(weight, plain[name].bias, walker.device, dtype)  # type: ignore[arg-type]
        for name, weight in weights.items()
    }
    try:
        for name, layer in layers.items():
            _put(walker.net, name, layer)
        _train(walker, indices, list(layers.values()), hidden, goals, training, settings)
    finally:
        for name, module in plain.items():
            _put(walker.net, name, module)
    trained = {name: layer.packed() for name, layer in layers.items()}
    _fill(plain, trained)
    after = judged()
    kept = after < before
    if not kept:
        _fill(plain, weights)
    return trained if kept else weights, Outcome(paths, before, after, kept)


def split(count: int, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of `count` windows train and which judge, at least one each; a single window does both."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    judges = max(1, round(count * share))
    return (order[judges:], order[:judges]) if count > judges else (order, order)


def _train(
    walker: Walker,
    indices: Sequence[int],
    layers: list[GridLinear],
    hidden: torch.Tensor,
    goals: Sequence[torch.Tensor],
    training: torch.Tensor,
    settings: Settings,
) -> None:
    """layers: those of the blocks that learn. training: the windows to learn from."""
    device = walker.device
    groups = (([layer.codes for layer in layers], settings.rate), ([x.log_scales for x in layers], settings.scale_rate))
    optimiser = optimiser_of(groups, device)
    per_step = min(max(1, settings.tokens // hidden.shape[1]), len(training))
    generator = torch.Generator().manual_seed(settings.seed + indices[0])
    order = torch.empty(0, dtype=torch.int64)
    # Tensors that stay where they are, so that a recorded step can read them.
    share = torch.zeros((), device=device)
    for layer in layers:
        layer.share = share
    states = [hidden, *goals]
    given, *wanted = places = [torch.empty(per_step, *hidden.shape[1:], device=device) for _ in states]
    by = [even(goal[training[:per_step]].to(device)) if settings.evenly else None for goal in goals]
    forwards = [fused(walker.net.get_submodule(walker.paths[index]).forward, device) for index in indices]
    apart = fused(distance, device)

    def learn() -> torch.Tensor:
        with torch.enable_grad(), torch.autocast(device.type, torch.bfloat16, enabled=walker.fast):
            out, losses = given, []
            for index, forward, goal, sizes in zip(indices, forwards, wanted, by, strict=True):
                out = first_of(forward(out, **walker.arguments[index]))
                losses.append(apart(out, goal, sizes))
            loss = torch.stack(losses).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    step_once = Repeated(learn, device)
    losses = []
    for step in range(settings.steps):
        fraction = step / settings.steps
        if len(order) < per_step:
            order = training[torch.randperm(len(training), generator=generator)].to(hidden.device)
        rows, order = order[:per_step], order[per_step:]
        share.fill_(1.0 if settings.rounded <= 0 else min(1.0, fraction / settings.rounded))
        set_rates(optimiser, rate_at(fraction, settings.warmup))
        for there, state in zip(places, states, strict=True):
            there.copy_(state[rows])
        losses.append(step_once().clone())  # looked at when all is done: a GPU would wait at each
    for step, value in enumerate(torch.stack(losses).tolist()):
        if not math.isfinite(value):
            raise SpearfishError(
                f"{walker.paths[indices[0]]}: the loss is {value} in step {step} of its reconstruction; do without"
                " (--reconstruct 0), or with another seed"
            )


def _put(net: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(net.get_submodule(parent), leaf, module)


def _fill(linears: dict[str, nn.Module], weights: dict[str, QuantWeight]) -> None:
    for name, linear in linears.items():
        linear.weight.data.copy_(dequantize(weights[name]))  # type: ignore[operator]
