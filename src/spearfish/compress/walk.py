"""Walking a model block by block: what the first block receives, what each linear reads, what a block gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spearfish.errors import SpearfishError
from spearfish.models import DenseModel, release

TOKENS_AT_ONCE = 4096
TOKENS_AT_ONCE_GPU = 16384


class _Enough(Exception):
    """Ends a forward pass when everything wanted has been seen."""


@contextmanager
def compute_context(device: torch.device, fast: bool) -> Iterator[None]:
    """bfloat16 products where `fast`, plain float32 otherwise. No gradients."""
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=fast):
        yield


def bfloat16_is_faster(device: torch.device) -> bool:
    """Whether a bfloat16 product clearly beats float32 here: yes on any recent GPU; on a CPU it is measured, since
    processors without such instructions are many times slower at it."""
    import time

    if device.type == "cuda":
        return True
    took = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.ones(256, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            x @ w
            best = min(best, time.perf_counter() - start)
        took[dtype] = best
    return took[torch.bfloat16] < 0.7 * took[torch.float32]


def batches(hidden: torch.Tensor, device: torch.device | None = None) -> Iterator[slice]:
    """Slices of windows [count, length, width] of as many tokens as a device takes at once."""
    at_once = TOKENS_AT_ONCE_GPU if device is not None and device.type == "cuda" else TOKENS_AT_ONCE
    step = max(1, at_once // hidden.shape[1])
    for start in range(0, hidden.shape[0], step):
        yield slice(start, min(start + step, hidden.shape[0]))


class Walker:
    """Runs the blocks of a model one at a time, each read from disk when its turn comes.

    `arguments[i]` are what the model passes to block i besides the hidden state: masks and rotary tables, which differ
    between sliding and full attention. All windows have one length and no padding, so they hold for every batch.

    `home` is where hidden states of all windows are kept: the CPU, or the device where it has room to spare.
    """

    def __init__(self, model: DenseModel, device: torch.device, fast: bool) -> None:
        self.model = model
        self.device = device
        self.home = torch.device("cpu")
        self.fast = fast
        self.net = model.skeleton()
        self.paths = model.block_paths(self.net)
        self.arguments: list[dict[str, Any]] = []

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """float32 [count, length, width], at `home`: what the first block receives for tokens [count, length]."""
        everything_else = [path for path, _ in self.net.named_modules() if self._outside_blocks(path)]
        for path in everything_else:
            if not list(self.net.get_submodule(path).children()):
                self.model.materialise(self.net, path, self.device)
        blocks = [self.net.get_submodule(path) for path in self.paths]
        first: list[torch.Tensor] = []
        arguments: list[dict[str, Any]] = []
        plain = [block.forward for block in blocks]
        try:
            for index, block in enumerate(blocks):
                block.forward = self._recorder(index, first, arguments)
            for part in batches(tokens[:, :, None], self.device):
                arguments.clear()
                with compute_context(self.device, False):
                    with suppress(_Enough):
                        self.net(input_ids=tokens[part].to(self.device), use_cache=False)
                    if self.arguments:
                        continue
                    # Masks and tables are the same for every window: keep those of a batch of one.
                    arguments.clear()
                    kept = len(first)
                    with suppress(_Enough):
                        self.net(input_ids=tokens[:1].to(self.device), use_cache=False)
                    del first[kept:]
                    self.arguments = list(arguments)
        finally:
            for block, forward in zip(blocks, plain, strict=True):
                block.forward = forward
        if len(self.arguments) != len(blocks):
            raise SpearfishError(
                f"{self.model.name}: {len(blocks)} blocks were found, but its forward pass calls {len(self.arguments)}"
            )
        for path in everything_else:
            if not list(self.net.get_submodule(path).children()):
                release(self.net, path)
        return torch.cat(first).to(self.home)

    def _outside_blocks(self, path: str) -> bool:
        # lm_head is not needed for the first block's input, and it can be the largest tensor of all.
        return not path.startswith(self.model.architecture.blocks + ".") and path != "lm_head"

    def _recorder(
        self, index: int, first: list[torch.Tensor], arguments: list[dict[str, Any]]
    ) -> Callable[..., torch.Tensor]:
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            hidden: torch.Tensor = args[0] if args else kwargs.pop("hidden_states")
            if len(args) > 1:
                raise SpearfishError(f"block {index} takes positional arguments besides the hidden state")
            if index == 0:
                first.append(hidden.float().cpu())
            arguments.append(kwargs)
            if index == len(self.paths) - 1:
                raise _Enough
            return hidden

        return forward

    def load(self, index: int) -> nn.Module:
        """Block `index` with its float32 weights on the device."""
        self.model.materialise(self.net, self.paths[index], self.device)
        return self.net.get_submodule(self.paths[index])

    def release(self, index: int) -> None:
        """Frees the weights of a block."""
        release(self.net, self.paths[index])

    def forward(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """The block's output for hidden [count, length, width], on the same device, batch by batch."""
        block = self.net.get_submodule(self.paths[index])
        out = torch.empty_like(hidden)
        with compute_context(self.device, self.fast):
            for part in batches(hidden, self.device):
                result = block(hidden[part].to(self.device), **self.arguments[index])
                out[part] = first_of(result).float().to(out.device)
        return out

    def lag(
        self,
        index: int,
        names: tuple[str, ...],
        hidden: torch.Tensor,
        twin: nn.Module,
        goal: torch.Tensor,
        residual: str,
        take: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> bool:
        """Calls take(x, lag) for each batch: what the linears `names` of the block, which share an input, read for
        `hidden`; and how far `twin`, the dense block run on `goal`, is ahead of what its weights make of x, [..., sum
        of n]. False if they never ran.

        residual: "" for that alone; "in" or "out" where a linear's output is added to the block's input or is the last
        thing added to its output: then what the sum lags behind is counted.
        """
        block = self.net.get_submodule(self.paths[index])
        mine, dense = ([b.get_submodule(name) for name in names] for b in (block, twin))
        whole = residual == "out"
        with compute_context(self.device, self.fast):
            for part in batches(hidden, self.device):
                here, there = hidden[part].to(self.device), goal[part].to(self.device)
                seen = _watch(block, mine, here, self.arguments[index], whole)
                ahead = _watch(twin, dense, there, self.arguments[index], whole)
                if seen is None or ahead is None:
                    return False
                # The linears themselves are still dense.
                if residual == "out":
                    lag = ahead.block - seen.block
                else:
                    lag = ahead.given - seen.given + (there - here if residual == "in" else 0.0)
                take(seen.read, lag)
        return True

    def inputs(self, index: int, linear: nn.Module, hidden: torch.Tensor, take: Callable[[torch.Tensor], None]) -> bool:
        """Calls take(input) for what `linear` reads in each batch; the forward pass ends there. False if it never
        ran."""
        block = self.net.get_submodule(self.paths[index])
        ran = False

        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            nonlocal ran
            ran = True
            take(args[0])
            raise _Enough

        handle = linear.register_forward_pre_hook(hook)
        try:
            with compute_context(self.device, self.fast):
                for part in batches(hidden, self.device):
                    with suppress(_Enough):
                        block(hidden[part].to(self.device), **self.arguments[index])
        finally:
            handle.remove()
        return ran


def first_of(result: Any) -> torch.Tensor:
    """A block's output, which some families wrap in a tuple."""
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out


@dataclass(frozen=True)
class _Seen:
    """What linears that share an input read, what they gave side by side, and what the whole block gave where that was
    wanted, in float32."""

    read: torch.Tensor
    given: torch.Tensor
    block: torch.Tensor


def _watch(
    block: nn.Module, linears: list[nn.Module], hidden: torch.Tensor, arguments: dict[str, Any], whole: bool
) -> _Seen | None:
    """The forward pass ends after the last of the linears, unless the whole block's output is wanted. None if they did
    not run."""
    inputs: list[torch.Tensor] = []
    outputs: dict[int, torch.Tensor] = {}

    def hook(module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> None:
        inputs.append(args[0])
        outputs[id(module)] = out
        if len(outputs) == len(linears) and not whole:
            raise _Enough

    handles = [linear.register_forward_hook(hook) for linear in linears]
    result: Any = None
    try:
        with suppress(_Enough):
            result = block(hidden, **arguments)
    finally:
        for handle in handles:
            handle.remove()
    if len(outputs) < len(linears):
        return None
    given = torch.cat([outputs[id(linear)] for linear in linears], dim=-1).float()
    return _Seen(inputs[0], given, first_of(result).float() if whole else given)
