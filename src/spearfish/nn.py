"""QuantLinear, the layer, and replace_linears, which puts it into a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from spearfish.errors import ShapeError, SpearfishError
from spearfish.kernels.matmul import matmul, prepare
from spearfish.kernels.prepare import PreparedWeight, from_stream
from spearfish.scheme import QuantWeight

_preparing = threading.Lock()  # of the module: a lock in each layer could be neither copied nor saved


class QuantLinear(nn.Module):
    """y = x · weightᵀ + bias with a quantised weight, in the place of `nn.Linear`.

    It holds the neutral weight until `prepare` (or the first forward), then only what the kernel reads. Moving it to
    another device, copying it and saving it work before and after: a weight that was prepared as a tile stream is
    turned back exactly, one that runs dense keeps its neutral form beside it. The state dict always holds the neutral
    tensors. The weight is frozen; gradients flow to x and to the bias. `plain` keeps the kernels out of it.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        weight: QuantWeight,
        bias: torch.Tensor | None = None,
        batch_invariant: bool = False,
        plain: bool = False,
    ) -> None:
        super().__init__()
        if bias is not None and tuple(bias.shape) != (weight.n,):
            raise ShapeError(f"bias {list(bias.shape)} does not fit a weight [n={weight.n}, k={weight.k}]: want [n]")
        self.scheme = weight.scheme
        self.out_features = weight.n
        self.in_features = weight.k
        self.batch_invariant = batch_invariant
        self.plain = plain
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._neutral: QuantWeight | None = weight
        self._prepared: PreparedWeight | None = None

    @property
    def weight(self) -> QuantWeight:
        """The neutral weight, rebuilt from the tile stream if need be."""
        # In this order: another thread may be preparing, which sets the one before it clears the other.
        neutral, prepared = self._neutral, self._prepared
        if neutral is not None:
            return neutral
        if prepared is None:
            raise ShapeError("this layer has lost its weight")
        return from_stream(prepared)

    @property
    def prepared(self) -> PreparedWeight | None:
        """What the kernel reads, or None before `prepare`."""
        return self._prepared

    def prepare(self, device: torch.device | str | None = None, dtype: torch.dtype = torch.float16) -> QuantLinear:
        """Prepare for activations of `dtype` on `device` (default: where the weight is) and let go of the rest."""
        weight = self.weight
        prepared = prepare(weight, device, dtype, self.batch_invariant, self.plain)
        if self.bias is not None:
            self.bias.data = self.bias.data.to(prepared.device, dtype)
        if prepared.device.type == "cuda":  # the next call may come on another stream
            torch.cuda.current_stream(prepared.device).synchronize()
        # Last, and in this order: whatever failed above left the layer as it was, and other threads go by these two.
        self._prepared = prepared
        self._neutral = None if prepared.stream is not None else weight
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., k] to [..., n]."""
        prepared = self._prepared
        if prepared is None or prepared.dtype != x.dtype or prepared.device != x.device:
            with _preparing:  # of several threads at a new layer one prepares it, and the others wait
                prepared = self._prepared
                if prepared is None or prepared.dtype != x.dtype or prepared.device != x.device:
                    self.prepare(x.device, x.dtype)
                    prepared = self._prepared
        return matmul(x, prepared, self.bias)  # type: ignore[arg-type]  # prepare has just set it

    def extra_repr(self) -> str:
        path = "not prepared" if self._prepared is None else self._prepared.path
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme}, {path}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantLinear:
        # Only the device of a move concerns the weight: a change of dtype must not round its scales. An empty integer
        # tensor shows where the move goes.
        weight = self.weight
        device = fn(torch.empty(0, dtype=torch.uint8, device=weight.device)).device
        if device != weight.device:
            self._neutral, self._prepared = weight.to(device), None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in self.weight.tensors().items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        wanted = self.weight.tensors()
        found = {name: state_dict[prefix + name] for name in wanted if prefix + name in state_dict}
        rest = {key: value for key, value in state_dict.items() if key[len(prefix) :] not in found}
        missing, errors = args[2], args[4]
        missing.extend(prefix + name for name in wanted if name not in found)
        if found.keys() == wanted.keys():
            shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
            if all(tuple(tensor.shape) == shapes[name] for name, tensor in found.items()):
                device = self.weight.device
                loaded = QuantWeight(self.scheme, **{name: t.to(device) for name, t in found.items()})
                try:
                    loaded.check(prefix.removesuffix("."))
                    self._neutral, self._prepared = loaded, None
                except SpearfishError as error:
                    errors.append(str(error))
            else:
                errors.append(f"{prefix}: the shapes of {sorted(found)} do not fit this layer's {shapes}")
        super()._load_from_state_dict(rest, prefix, *args)


def replace_linears(model: nn.Module, weights: Mapping[str, QuantWeight], batch_invariant: bool = False) -> nn.Module:
    """Put a `QuantLinear` in the place of every `nn.Linear` of `model` that `weights` names; biases stay. In place.

    A module that may hold no data yet (on the meta device) is replaced as well; the weight stays on its own device.
    Raises ShapeError if a name is no linear of the model or its shape differs, before anything is replaced.
    """
    modules = dict(model.named_modules())
    for name, weight in weights.items():
        linear = modules.get(name)
        if not isinstance(linear, nn.Linear):
            seen = "nothing" if linear is None else type(linear).__name__
            raise ShapeError(f"{name}: the weights name a linear layer, the model has {seen} there")
        if (linear.out_features, linear.in_features) != (weight.n, weight.k):
            raise ShapeError(
                f"{name}: the weight is [{weight.n}, {weight.k}], the model's layer"
                f" [{linear.out_features}, {linear.in_features}]"
            )
    for name, weight in weights.items():
        linear = modules[name]
        parent_name, _, child = name.rpartition(".")
        bias = linear.bias
        layer = QuantLinear(weight, None if bias is None else bias.data, batch_invariant)
        layer.train(linear.training)
        setattr(modules[parent_name], child, layer)
    return model
