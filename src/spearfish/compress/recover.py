"""Recovery: the compressed model learns from the dense one, its masks frozen and its codes in the loop.

What is trained lies on the checkpoint's own grid: the codes (as real numbers that the forward pass rounds, gradients
going straight through), the scales and the norm gains. Nothing is added to the model, so inference costs nothing more.

Codes are trained in units of their scale: one learning rate then fits every layer.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from spearfish import sparse24
from spearfish.compress import grid
from spearfish.compress.replay import Repeated
from spearfish.compress.workfolder import load_with_facts, save_atomically
from spearfish.errors import SpearfishError
from spearfish.models import DenseModel
from spearfish.scheme import QuantWeight

log = logging.getLogger(__name__)

# Tokens whose predictions are formed at once: the vocabulary is the widest thing in a language model.
LOGITS_AT_ONCE = 256
LOGITS_AT_ONCE_GPU = 4096
CACHES = ("cache", "past_key_values")  # its name in newer and older releases of transformers
SYNC_EVERY = 8  # steps between two looks at the loss on a GPU, which otherwise waits for the processor each time


@dataclass(frozen=True)
class Settings:
    """budget: seconds, or steps if that is given (then the result depends on nothing but the seed). tokens: per step.

    rate: largest learning rate of the codes, in codes per step; scales and norm gains move by `gain_rate` of
    themselves. Rounding fades in until `rounded` of the budget is used: before that, codes travel freely.
    features: weight of the distance between the blocks' outputs beside that between the predictions; at the end of the
    budget `features_end` of it, on a straight line.
    table: the embedding and what predicts words learn too, by that share of their mean size a step; 0: they do not.
    evenly: in the blocks' outputs each number counts by how far it is off for its usual size; else a few large ones own
    the distance (in most of SmolLM2's blocks, five of 576 make more than half of a state's squared length).
    """

    budget: float = 300.0
    steps: int | None = None
    tokens: int = 1024
    length: int = 256
    rate: float = 0.05
    gain_rate: float = 1e-3
    warmup: float = 0.05
    rounded: float = 0.5
    features: float = 1.0
    features_end: float = 1.0
    table: float = 0.0
    evenly: bool = False
    seed: int = 0
    save_every: float = 180.0


def settings_on(device: torch.device) -> dict[str, Any]:
    """What pays on a device besides the defaults: a GPU sees hundreds of times more text in the same time, in larger
    steps. How it is taught was measured there, change by change (docs/accuracy.md), and not on a CPU; the rate lies
    between two that were: 0.03, and 0.06, which was better in a short run."""
    if device.type != "cuda":
        return {}
    teaching = {"evenly": True, "features": 4.0, "features_end": 0.25, "table": 1e-3}
    return {"tokens": 8192, "length": 512, "rate": 0.04, "rounded": 0.3, **teaching}


def tokens_that_fit(wanted: int, length: int, free: int, config: dict[str, Any]) -> int:
    """Tokens per step, whole windows and one at least, whose activations take no more than `free` bytes. Measured: 3 MB
    a token with 30 blocks that are 576 wide (on an H200, in bfloat16), so 180 bytes for each number of each block."""
    width, blocks = int(config.get("hidden_size", 0)), int(config.get("num_hidden_layers", 0))
    most = free // max(180 * width * blocks, 1)
    return max(min(wanted, most) // length, 1) * length


@cache
def compiler_works() -> bool:
    """Whether torch can compile for the GPU here; it needs a C compiler besides Triton."""
    x = torch.ones(8, device="cuda", requires_grad=True)
    try:
        with torch.enable_grad():  # whoever asks first may have switched it off
            torch.compile(lambda y: (y.sin() * y).sum())(x).backward()
    except (RuntimeError, OSError, ImportError) as error:
        log.warning("torch cannot compile here, so steps take about twice as long: %s", error)
        return False
    return True


_COMPILED: dict[Any, Any] = {}


def fused(function: Any, device: torch.device) -> Any:
    """The function, on a GPU with what lies between its matrix products fused into few passes over memory. Functions
    that share their code, such as the forward passes of a model's blocks, are compiled once."""
    if device.type != "cuda" or not compiler_works():
        return function
    if isinstance(function, MethodType):
        return torch.compile(function, dynamic=False)
    if function not in _COMPILED:
        _COMPILED[function] = torch.compile(function, dynamic=False)
    return _COMPILED[function]


def fuse_blocks(model: nn.Module, paths: list[str], device: torch.device) -> None:
    """Lets the blocks of a transformers model run fused, on a GPU, for whole windows without padding."""
    for path in paths:
        block = model.get_submodule(path)
        block.forward = _as_first_called(fused(block.forward, device))


def _as_first_called(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A block's forward pass that goes on with the masks and rotary tables of its first call, without a cache of keys
    and values. While a GPU records, transformers makes a mask where it otherwise leaves causality to the attention
    kernel, and that takes several times as long."""
    first: dict[torch.Size, dict[str, Any]] = {}

    def run(hidden: torch.Tensor, **named: Any) -> Any:
        if hidden.shape not in first:
            first[hidden.shape] = {name: value for name, value in named.items() if name not in CACHES}
        return forward(hidden, **first[hidden.shape])

    return run


class _OnGrid(torch.autograd.Function):
    """Codes [n, k] and scales [n, groups] to the weight that the file would hold; gradients go straight through."""

    @staticmethod
    def forward(
        ctx: Any,
        codes: torch.Tensor,
        scales: torch.Tensor,
        mask: torch.Tensor | None,
        share: torch.Tensor,
        low: int,
        high: int,
        size: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        values = torch.lerp(codes, codes.round().clamp_(low, high), share).to(dtype)
        wide = scales.to(dtype).repeat_interleave(size, dim=1)[:, : codes.shape[1]]
        ctx.save_for_backward(values, wide, mask)
        ctx.size, ctx.groups = size, scales.shape[1]
        return values * wide

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        values, wide, mask = ctx.saved_tensors
        by_code = gradient * wide
        if mask is not None:  # what is pruned begins as 0 and stays so
            by_code *= mask
        n, k = values.shape
        by_scale = F.pad(gradient * values, (0, ctx.groups * ctx.size - k)).view(n, ctx.groups, ctx.size)
        return by_code.float(), by_scale.float().sum(-1), None, None, None, None, None, None


class GridLinear(nn.Module):
    """A linear whose weight lies on the grid of a QuantWeight, trainable. `share` 0 leaves the codes real, 1 rounds."""

    def __init__(
        self, weight: QuantWeight, bias: torch.Tensor | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        scheme = weight.scheme
        if weight.scales is None:
            raise SpearfishError("recovery needs quantised weights (4 or 8 bit)")
        signed = weight.codes.to(device).float() - scheme.zero_point
        self.mask: torch.Tensor | None = None
        if weight.positions is not None:
            positions = weight.positions.to(device)
            signed = sparse24.expand(signed, positions)
            self.mask = sparse24.expand(torch.ones_like(weight.codes, device=device), positions).bool()
        self.codes = nn.Parameter(signed)
        # The logarithm of a scale is trained: it stays positive, and a step changes it by a share of itself.
        self.log_scales = nn.Parameter(weight.scales.to(device).float().clamp_min(1e-8).log())
        self.bias = None if bias is None else nn.Parameter(bias.to(device, dtype), requires_grad=False)
        self.scheme = scheme
        self.dtype = dtype
        # A tensor: a recorded step reads it anew each time, and nothing is compiled anew when it changes.
        self.share = torch.zeros((), device=device)

    @property
    def group(self) -> int:
        return self.codes.shape[1] if self.scheme.group_size is None else self.scheme.group_size

    def weight_on_grid(self) -> torch.Tensor:
        """[n, k] in the compute dtype."""
        low, high = grid.code_range(self.scheme)
        out: torch.Tensor = _OnGrid.apply(  # type: ignore[no-untyped-call]
            self.codes, self.log_scales.exp(), self.mask, self.share, low, high, self.group, self.dtype
        )
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.dtype), self.weight_on_grid(), self.bias)

    def packed(self) -> QuantWeight:
        """What goes into the checkpoint."""
        with torch.no_grad():
            scales = grid.as_stored(self.log_scales.exp())
            values = self.codes.round() * grid.scale_of_columns(scales, self.scheme, self.codes.shape[1])
            return grid.pack(values.cpu(), scales.cpu(), None if self.mask is None else self.mask.cpu(), self.scheme)


class _Divergence(torch.autograd.Function):
    """Mean KL(teacher ‖ student) over tokens, from final hidden states [t, d] and the shared output matrix [v, d].

    The gradient is formed chunk by chunk on the way forward, so that no [t, v] tensor outlives its chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student: torch.Tensor,
        teacher: torch.Tensor,
        head: torch.Tensor,
        goal_head: torch.Tensor,
        cap: float | None,
    ) -> torch.Tensor:
        gradient = torch.empty_like(student)
        by_head = torch.zeros_like(head, dtype=torch.float32) if head.requires_grad else None
        total = torch.zeros((), device=student.device)
        at_once = LOGITS_AT_ONCE_GPU if student.device.type == "cuda" else LOGITS_AT_ONCE
        slope_of = fused(_slope, student.device)
        for start in range(0, student.shape[0], at_once):
            mine = student[start : start + at_once].to(head.dtype)
            loss, slope = slope_of(mine @ head.T, teacher[start : start + at_once].to(head.dtype) @ goal_head.T, cap)
            total += loss
            gradient[start : start + at_once] = slope @ head
            if by_head is not None:
                by_head += slope.T @ mine
        ctx.save_for_backward(gradient, by_head)
        ctx.count = student.shape[0]
        return total / student.shape[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, by_head = ctx.saved_tensors
        factor = gradients[0] / ctx.count
        return gradient * factor, None, None if by_head is None else by_head * factor, None, None


def _slope(raw: torch.Tensor, goal: torch.Tensor, cap: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over tokens of KL(goal ‖ raw) for logits [t, v], and its slope [t, v] by `raw`, of raw's type."""
    logits = _capped(raw.float(), cap)
    goal = _capped(goal.float(), cap)
    logits = logits - logits.logsumexp(-1, keepdim=True)
    goal = goal - goal.logsumexp(-1, keepdim=True)
    p = goal.exp()
    loss = (p * (goal - logits)).sum()
    slope = logits.exp_().sub_(p)
    if cap is not None:
        slope *= 1 - (raw.float() / cap).tanh_().square_()
    return loss, slope.to(raw.dtype)


def _capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Gemma squeezes its logits through a tanh."""
    return logits if cap is None else (logits / cap).tanh_().mul_(cap)


class _Watched:
    """A decoder that gives its blocks' outputs too. (transformers' own way of asking for them puts hooks inside of the
    blocks, where they break up what is compiled.)"""

    def __init__(self, model: nn.Module, paths: list[str]) -> None:
        self.decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
        self.seen: list[torch.Tensor] = []
        for path in paths:
            model.get_submodule(path).register_forward_hook(self._see)

    def _see(self, _module: nn.Module, _inputs: Any, out: Any) -> None:
        self.seen.append((out[0] if isinstance(out, tuple) else out).flatten(0, 1))

    def __call__(self, tokens: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The outputs of all blocks but the last [t, d], and the final hidden state after the last norm [t, d]."""
        self.seen = []
        # A cache nobody reads: without one transformers looks into its position ids, for which a GPU must wait.
        out: Any = self.decoder(input_ids=tokens, use_cache=tokens.is_cuda)
        seen, self.seen = self.seen, []
        return seen[:-1], out.last_hidden_state.flatten(0, 1)


def distance(out: torch.Tensor, goal: torch.Tensor, by: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over tokens of ‖out − goal‖² / ‖goal‖² for [..., width], each number times `by` [width]: token by token, so
    that a few huge ones do not own it."""
    out, goal = out.float(), goal.float()
    if by is not None:
        out, goal = out * by, goal * by
    size = goal.square().sum(-1).clamp_min(1e-6)
    return ((out - goal).square().sum(-1) / size).mean()


def even(states: torch.Tensor) -> torch.Tensor:
    """[width]: one over the size that each number of such hidden states [..., width] usually has beside the whole."""
    shares = F.normalize(states.float(), dim=-1).flatten(0, -2)
    return shares.square().mean(0).sqrt().clamp_min(1e-4).reciprocal()


def _feature_loss(
    student: Iterable[torch.Tensor], teacher: Iterable[torch.Tensor], by: Iterable[torch.Tensor | None]
) -> torch.Tensor:
    """Mean distance over blocks."""
    losses = [fused(distance, s.device)(s, t, b) for s, t, b in zip(student, teacher, by, strict=True)]
    return torch.stack(losses).mean()


def _narrow(linear: nn.Linear, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (inputs[0].to(linear.weight.dtype),)


def rate_at(fraction: float, warmup: float) -> float:
    """Share of the full learning rate at a fraction of the budget: linear warm-up, then a cosine to zero."""
    if fraction < warmup:
        return fraction / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (fraction - warmup) / (1 - warmup))))


def optimiser_of(groups: Iterable[tuple[list[nn.Parameter], float]], device: torch.device) -> torch.optim.AdamW:
    """For groups of parameters, each with its own full rate; `set_rates` sets the share of it that holds."""
    gpu = device.type == "cuda"
    each = [
        {"params": some, "share": rate, "lr": torch.zeros((), device=device) if gpu else 0.0} for some, rate in groups
    ]
    return torch.optim.AdamW(each, betas=(0.9, 0.95), weight_decay=0.0, fused=True, capturable=gpu)


def set_rates(optimiser: torch.optim.Optimizer, share: float) -> None:
    """Gives each group of parameters that share of its own full rate, in place where the rate is a tensor."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(group["share"] * share)
        else:
            group["lr"] = group["share"] * share


class _Table:
    """An embedding's or output layer's weight [v, d] that learns: in float32, beside the one that computes."""

    def __init__(self, weight: nn.Parameter, exact: torch.Tensor) -> None:
        self.weight = weight.requires_grad_(True)
        self.exact = nn.Parameter(exact)
        self.size = float(exact.square().mean().sqrt())

    def take_gradient(self) -> None:
        if self.weight.grad is not None:
            self.exact.grad = self.weight.grad.float()
            self.weight.grad = None

    @torch.no_grad()
    def give(self) -> None:
        self.weight.copy_(self.exact)


def _tables(model: nn.Module, dense: DenseModel, device: torch.device) -> dict[str, _Table]:
    """By the name of their tensor; tied ones are one."""
    found: dict[str, _Table] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and any(
            parameter is module.weight
            for module in (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
        ):
            found[name] = _Table(parameter, dense.reader.tensor(name).to(device).float())
    return found


class Recovery:
    """The student, the teacher and the optimiser, kept in step so that a killed run goes on (`state_file`)."""

    def __init__(
        self,
        dense: DenseModel,
        weights: dict[str, QuantWeight],
        settings: Settings,
        device: torch.device,
        fast: bool,
    ) -> None:
        self.settings = settings
        self.device = device
        self.dtype = torch.bfloat16 if fast else torch.float32
        self.teacher = dense.whole(device, self.dtype)
        self.student = dense.whole(device, self.dtype)
        self.head: torch.Tensor = self.teacher.get_output_embeddings().weight  # type: ignore[operator]
        self.cap = dense.config.get("final_logit_softcapping")
        self.layers: dict[str, GridLinear] = {}
        for name, weight in weights.items():
            parent = self.student.get_submodule(name.rpartition(".")[0])
            linear = parent.get_submodule(name.rpartition(".")[2])
            bias = linear.bias if isinstance(linear.bias, torch.Tensor) else None
            layer = GridLinear(weight, bias, device, self.dtype)
            setattr(parent, name.rpartition(".")[2], layer)
            self.layers[name] = layer
        # Gains in float32: bfloat16 would swallow steps this small.
        self.gains: dict[str, nn.Parameter] = {}
        self.tables: dict[str, _Table] = {}
        for name, parameter in list(self.student.named_parameters()):
            if parameter.dim() == 1 and name.endswith("norm.weight"):
                owner = self.student.get_submodule(name.rpartition(".")[0])
                owner.weight = nn.Parameter(dense.reader.tensor(name).to(device).float())
                self.gains[name] = owner.weight
        for module in self.student.modules():
            if isinstance(module, nn.Linear):  # left as it is by the recipe; the float32 gains widen what it is given
                module.register_forward_pre_hook(_narrow)
        if settings.table:
            self.tables = _tables(self.student, dense, device)
        self.student_head: torch.Tensor = self.student.get_output_embeddings().weight  # type: ignore[operator]
        paths = dense.block_paths(self.student)
        if device.type == "cuda":
            for model in (self.teacher, self.student):
                fuse_blocks(model, paths, device)
        self.watched = [_Watched(model, paths) for model in (self.teacher, self.student)]
        codes = [layer.codes for layer in self.layers.values()]
        scales = [layer.log_scales for layer in self.layers.values()]
        groups = [
            (codes, settings.rate),
            (scales, settings.gain_rate),
            (list(self.gains.values()), settings.gain_rate),
            *(([table.exact], settings.table * table.size) for table in self.tables.values()),
        ]
        self.optimiser = optimiser_of(groups, device)
        # What a recorded step reads anew each time; these are one for all layers and groups.
        self.share = torch.zeros((), device=device)
        self.features = torch.zeros((), device=device)
        for layer in self.layers.values():
            layer.share = self.share
        self.even: list[torch.Tensor] = []  # by block, for each number of a hidden state: one over its usual size
        self.tokens = torch.empty(0)
        self.one: Repeated | None = None
        self.step = 0
        self.elapsed = 0.0
        self.started = 0.0  # seconds until a GPU had compiled everything
        self.order: tuple[tuple[int, int], torch.Tensor] | None = None  # of a pass, and for which pass and count
        self.losses: list[float] = []

    def run(
        self, tokens: torch.Tensor, state_file: Path | None, progress: Callable[[str, int, int, str], None]
    ) -> None:
        """Trains on windows int64 [count, length] until the budget is used; goes through them again if they end."""
        if state_file is not None and state_file.exists():
            self._load(state_file)
        settings = self.settings
        begin = time.perf_counter() - self.elapsed
        last_save = time.perf_counter()
        per_step = max(1, settings.tokens // tokens.shape[1])
        tokens = tokens.to(self.device)  # a GPU finds a step's windows there without waiting for the processor
        if settings.evenly and settings.features:
            self.even = self._usual_sizes(tokens[torch.arange(per_step) % len(tokens)])
        gpu = self.device.type == "cuda"
        sync = SYNC_EVERY if gpu else 1
        longest = 0.0
        pending: list[torch.Tensor] = []
        while True:
            now = time.perf_counter()
            self.elapsed = now - begin
            # The step that would end beyond the budget is not begun.
            if settings.steps:
                fraction = self.step / settings.steps
            elif self.elapsed < settings.budget and gpu and self.step < sync:
                fraction = 0.0  # compiling: else the rate's warm-up would be over before anything is learnt
            else:
                left = settings.budget - self.started
                fraction = (self.elapsed - self.started + longest) / left if left > 0 else 1.0
            if fraction >= 1:
                break
            pending.append(self._one(tokens[self._rows(len(tokens), per_step)], fraction))
            self.step += 1
            if len(pending) < sync and not (settings.steps and self.step == settings.steps):
                continue
            self._note(pending)
            if gpu and self.step == sync:
                self.started = time.perf_counter() - begin
            longest = max(longest if self.step > 2 * sync else 0.0, time.perf_counter() - now)
            unit = 100
            progress("recovery", int(unit * fraction), unit, f"step {self.step}, loss {self.losses[-1]:.3f}")
            if state_file is not None and time.perf_counter() - last_save > settings.save_every:
                self._save(state_file)
                last_save = time.perf_counter()
        self._note(pending)
        if state_file is not None:
            self._save(state_file)

    def _note(self, pending: list[torch.Tensor]) -> None:
        """Moves losses from the device into `losses`, which waits until they are there, and looks at them."""
        for number, loss in enumerate(torch.stack(pending).tolist() if pending else [], self.step - len(pending)):
            if not math.isfinite(loss):
                raise SpearfishError(
                    f"recovery: the loss is {loss} in step {number}. The finished blocks are kept: the same command"
                    " without --recover writes them"
                )
            self.losses.append(loss)
        pending.clear()

    def _rows(self, count: int, per_step: int) -> torch.Tensor:
        """Which windows step `self.step` takes: each once in every pass, in an order given by the seed alone."""
        first = self.step * per_step
        epoch, rows = divmod(first, count)
        if self.order is None or self.order[0] != (epoch, count):
            order = torch.randperm(count, generator=torch.Generator().manual_seed(self.settings.seed + epoch))
            self.order = (epoch, count), order.to(self.device)
        order = self.order[1]
        if rows + per_step <= count:
            return order[rows : rows + per_step]
        return order[torch.arange(rows, rows + per_step, device=self.device) % count]

    def _one(self, tokens: torch.Tensor, fraction: float) -> torch.Tensor:
        settings = self.settings
        self.share.fill_(1.0 if settings.rounded <= 0 else min(1.0, fraction / settings.rounded))
        self.features.fill_(settings.features * (1 + (settings.features_end - 1) * fraction))
        set_rates(self.optimiser, rate_at(fraction, settings.warmup))
        if self.tokens.shape != tokens.shape or self.one is None:
            self.tokens = tokens.to(self.device)
            self.one = Repeated(self._learn, self.device)
        self.tokens.copy_(tokens)
        return self.one().clone()

    def _learn(self) -> torch.Tensor:
        """One step on `self.tokens`: the mean divergence, still on the device."""
        with torch.no_grad():
            goals, final_goal = self.watched[0](self.tokens)
        blocks, final = self.watched[1](self.tokens)
        loss: torch.Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
            final, final_goal, self.student_head, self.head, self.cap
        )
        value = loss.detach()
        if self.settings.features and blocks:
            loss = loss + self.features * _feature_loss(blocks, goals, self.even or [None] * len(goals))
        loss.backward()  # type: ignore[no-untyped-call]
        for table in self.tables.values():
            table.take_gradient()
        self.optimiser.step()
        for table in self.tables.values():
            table.give()
        self.optimiser.zero_grad(set_to_none=True)
        return value

    @torch.no_grad()
    def _usual_sizes(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """By block, for the dense model's output: see `even`."""
        return [even(goal) for goal in self.watched[0](tokens.to(self.device))[0]]

    def summary(self) -> dict[str, Any]:
        """For the report. The losses are means over the first and last tenth of the steps, in nats per token."""
        tenth = max(1, len(self.losses) // 10)
        return {
            "seconds": self.elapsed,
            "seconds_of_compiling": self.started,
            "steps": self.step,
            "tokens_per_step": self.settings.tokens,
            "divergence_first": sum(self.losses[:tenth]) / tenth if self.losses else None,
            "divergence_last": sum(self.losses[-tenth:]) / tenth if self.losses else None,
        }

    def results(self) -> tuple[dict[str, QuantWeight], dict[str, torch.Tensor]]:
        """The recovered weights by module name, and the changed norm gains by tensor name."""
        return (
            {name: layer.packed() for name, layer in self.layers.items()},
            {name: gain.detach().cpu() for name, gain in self.gains.items()}
            | {name: table.exact.detach().cpu() for name, table in self.tables.items()},
        )

    def _trained(self) -> dict[str, nn.Parameter]:
        named = {f"{name}.codes": layer.codes for name, layer in self.layers.items()}
        named |= {f"{name}.log_scales": layer.log_scales for name, layer in self.layers.items()}
        return named | dict(self.gains) | {name: table.exact for name, table in self.tables.items()}

    def _save(self, file: Path) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._trained().items():
            tensors[name] = parameter.detach()
            for part, value in self.optimiser.state[parameter].items():
                tensors[f"{name}:{part}"] = value
        facts = {"step": self.step, "elapsed": self.elapsed, "started": self.started, "losses": self.losses}
        save_atomically(tensors, file, facts)

    def _load(self, file: Path) -> None:
        tensors, facts = load_with_facts(file)
        for name, parameter in self._trained().items():
            parameter.data.copy_(tensors[name])
            self.optimiser.state[parameter] = {
                part: tensors[f"{name}:{part}"].to(self.device) for part in ("step", "exp_avg", "exp_avg_sq")
            }
        for table in self.tables.values():
            table.give()
        self.step, self.elapsed, self.losses = facts["step"], facts["elapsed"], list(facts["losses"])
        self.started = facts.get("started", 0.0)
