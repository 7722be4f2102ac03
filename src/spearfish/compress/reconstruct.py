"""Block-wise reconstruction: after a block is solved, its codes and scales learn from the dense block, masks frozen.

The layers were solved one by one, each for its own output. Here all of a block's kept weights move together so that
the block's output comes close to what the dense model has at this place, on the hidden states that the compressed
blocks in front really give: a block then also makes good some of what they lost. Nothing is added to the model.

One block, its gradients and three sets of hidden states are in memory at a time. The result depends on the recipe and
the seed alone, so a block that was interrupted is done again to the same bits (on a CPU with as many threads).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from spearfish.compress.recover import GridLinear, distance, fused, rate_at, set_rates
from spearfish.compress.replay import Repeated
from spearfish.compress.walk import Walker, first_of
from spearfish.errors import SpearfishError
from spearfish.reference import dequantize
from spearfish.scheme import QuantWeight


@dataclass(frozen=True)
class Settings:
    """tokens: per step. rate: largest learning rate of the codes, in codes per step; scales move by `scale_rate` of
    themselves. Rounding fades in until `rounded` of the steps are done. held_out: share of the windows that are not
    trained on but judge the result. ahead: that many dense blocks behind it are run on its output, and what comes out
    of them counts as much as the output itself."""

    steps: int
    tokens: int = 1024
    rate: float = 0.01
    scale_rate: float = 1e-3
    warmup: float = 0.05
    rounded: float = 0.5
    held_out: float = 0.125
    ahead: int = 0
    seed: int = 0


def settings_on(device: torch.device) -> dict[str, Any]:
    """What pays on a device besides the defaults: larger steps on a GPU, which takes no longer for them."""
    return {"tokens": 8192, "rate": 0.02} if device.type == "cuda" else {}


@dataclass(frozen=True)
class Outcome:
    """Of one block: mean over the held-out tokens of ‖h − ĥ‖² / ‖h‖², h being the dense model's hidden state after the
    block and ĥ the compressed one's; with blocks ahead, the mean of that and the same behind the last of them. kept:
    False if training did not lower it; the block then stays as it was."""

    block: str
    before: float
    after: float
    kept: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def reconstruct(
    walker: Walker,
    index: int,
    weights: dict[str, QuantWeight],
    hidden: torch.Tensor,
    goal: torch.Tensor,
    settings: Settings,
) -> tuple[dict[str, QuantWeight], Outcome]:
    """Trains the block's `weights` (by full module name) so that `hidden` [count, length, width] becomes `goal`.

    The loaded block ends up holding the values of the weights that are returned. Raises SpearfishError if the loss is
    not finite.
    """
    path = walker.paths[index]
    block = walker.net.get_submodule(path)
    plain = {name: walker.net.get_submodule(name) for name in weights}
    training, judging = split(len(hidden), settings.held_out, settings.seed + index)
    ahead = list(range(index + 1, min(index + 1 + settings.ahead, len(walker.paths))))
    far = goal
    for other in ahead:
        walker.load(other)
        far = walker.forward(other, far)

    def judged() -> float:
        out = walker.forward(index, hidden[judging])
        near = distance(out, goal[judging])
        for other in ahead:
            out = walker.forward(other, out)
        return float((near + distance(out, far[judging])) / 2)

    before = judged()
    dtype = torch.bfloat16 if walker.fast else torch.float32
    layers = {
        name: GridLinear(weight, plain[name].bias, walker.device, dtype)  # type: ignore[arg-type]
        for name, weight in weights.items()
    }
    try:
        for name, layer in layers.items():
            _put(walker.net, name, layer)
        states = [state[training] for state in (hidden, goal, far)]
        blocks = [block, *(walker.net.get_submodule(walker.paths[other]) for other in ahead)]
        _train(walker, index, blocks, list(layers.values()), states, settings)
    finally:
        for name, module in plain.items():
            _put(walker.net, name, module)
    trained = {name: layer.packed() for name, layer in layers.items()}
    _fill(plain, trained)
    after = judged()
    for other in ahead:
        walker.release(other)
    kept = after < before
    if not kept:
        _fill(plain, weights)
    return trained if kept else weights, Outcome(path, before, after, kept)


def split(count: int, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of `count` windows train and which judge, at least one each; a single window does both."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    judges = max(1, round(count * share))
    return (order[judges:], order[:judges]) if count > judges else (order, order)


def _train(
    walker: Walker,
    index: int,
    blocks: list[nn.Module],
    layers: list[GridLinear],
    states: list[torch.Tensor],
    settings: Settings,
) -> None:
    """blocks: the one with `layers` in it, and those ahead. states: what the first receives, and what it and the last
    should give, [count, length, width]."""
    device = walker.device
    hidden = states[0]
    groups = (([layer.codes for layer in layers], settings.rate), ([x.log_scales for x in layers], settings.scale_rate))
    gpu = device.type == "cuda"
    optimiser = torch.optim.AdamW(
        [
            {"params": params, "share": rate, "lr": torch.zeros((), device=device) if gpu else 0.0}
            for params, rate in groups
        ],
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=True,
        capturable=gpu,
    )
    per_step = min(max(1, settings.tokens // hidden.shape[1]), len(hidden))
    generator = torch.Generator().manual_seed(settings.seed + index)
    order = torch.empty(0, dtype=torch.int64)
    # Tensors that stay where they are, so that a recorded step can read them.
    share = torch.zeros((), device=device)
    for layer in layers:
        layer.share = share
    given, near, far = places = [torch.empty(per_step, *hidden.shape[1:], device=device) for _ in states]
    forwards, apart = [fused(block.forward, device) for block in blocks], fused(distance, device)

    def learn() -> torch.Tensor:
        with torch.enable_grad(), torch.autocast(device.type, torch.bfloat16, enabled=walker.fast):
            out = first_of(forwards[0](given, **walker.arguments[index]))
            loss: torch.Tensor = apart(out, near)
            for place, forward in enumerate(forwards[1:], index + 1):
                out = first_of(forward(out, **walker.arguments[place]))
            if len(forwards) > 1:
                loss = (loss + apart(out, far)) / 2
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    step_once = Repeated(learn, device)
    losses = []
    for step in range(settings.steps):
        fraction = step / settings.steps
        if len(order) < per_step:
            order = torch.randperm(len(hidden), generator=generator)
        rows, order = order[:per_step], order[per_step:]
        share.fill_(1.0 if settings.rounded <= 0 else min(1.0, fraction / settings.rounded))
        set_rates(optimiser, rate_at(fraction, settings.warmup))
        for there, state in zip(places, states, strict=True):
            there.copy_(state[rows])
        losses.append(step_once().clone())  # looked at when all is done: a GPU would wait at each
    for step, value in enumerate(torch.stack(losses).tolist()):
        if not math.isfinite(value):
            raise SpearfishError(f"{walker.paths[index]}: the loss is {value} in step {step} of its reconstruction")


def _put(net: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(net.get_submodule(parent), leaf, module)


def _fill(linears: dict[str, nn.Module], weights: dict[str, QuantWeight]) -> None:
    for name, linear in linears.items():
        linear.weight.data.copy_(dequantize(weights[name]))  # type: ignore[operator]
