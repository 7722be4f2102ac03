"""Work made of very many small steps, recorded on a GPU once and replayed: launching them one by one takes longer than
running them. On a CPU everything here just calls the function.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

log = logging.getLogger(__name__)

WARM = 3  # calls before recording, so that libraries have set themselves up

Tensors = tuple[torch.Tensor | None, ...]


class Repeated:
    """`body()` reads and writes tensors that stay where they are (parameters, buffers), and returns one such tensor.

    A body that cannot be recorded, because it waits for the processor, is called plainly for good; that is logged.
    """

    def __init__(self, body: Callable[[], torch.Tensor], device: torch.device) -> None:
        self.body = body
        self.device = device
        self.calls = 0
        self.plain = device.type != "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        if self.plain:
            return self.body()
        if self.calls <= WARM:
            # Off the main stream, as recording will be: gradients are then added up on a stream of their own too.
            side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                result = self.body()
            torch.cuda.current_stream(self.device).wait_stream(side)
            return result
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    self.result = self.body()
            except RuntimeError as error:
                log.warning("a step could not be recorded and is launched piece by piece: %s", error)
                self.plain = True
                torch.cuda.synchronize(self.device)
                return self.body()
            self.graph = graph
        self.graph.replay()
        if self.result is None:
            raise ValueError("unreachable: recording made a result")
        return self.result


class Replays:
    """Recordings of functions, by name and the shapes of their arguments: a model's blocks are all alike."""

    def __init__(self) -> None:
        self.known: dict[Hashable, tuple[Repeated, Tensors, list[Tensors]]] = {}

    def clear(self) -> None:
        """Frees the memory of all recordings."""
        self.known.clear()

    def call(self, key: Hashable, function: Callable[..., Tensors], *arguments: torch.Tensor | None) -> Tensors:
        """function(*arguments), which must depend on nothing but `key` and the arguments."""
        first = next(a for a in arguments if a is not None)
        if first.device.type != "cuda":
            return function(*arguments)
        shapes = tuple(None if a is None else (tuple(a.shape), a.dtype) for a in arguments)
        if (key, shapes) not in self.known:
            fixed = tuple(None if a is None else a.clone(memory_format=torch.contiguous_format) for a in arguments)
            results: list[Tensors] = [()]

            def body(fixed: Any = fixed, results: Any = results) -> torch.Tensor:
                results[0] = function(*fixed)
                first_result: torch.Tensor = next(r for r in results[0] if r is not None)
                return first_result

            repeated = Repeated(body, first.device)
            repeated.calls = WARM - 1  # nothing here needs gradients: one plain call sets everything up
            self.known[key, shapes] = (repeated, fixed, results)
        repeated, fixed, results = self.known[key, shapes]
        for place, value in zip(fixed, arguments, strict=True):
            if place is not None and value is not None:
                place.copy_(value)
        repeated()
        return tuple(None if r is None else r.clone() for r in results[0])


REPLAYS = Replays()
