"""What a quantisation method is: a name, what it runs on, and whether a checkpoint's config is its own."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from spearfish.errors import QuantizationError

log = logging.getLogger("spearfish")


class QuantizationConfig(ABC):
    """One method, made from the `quantization_config` block of a checkpoint.

    name: what a config says under quant_method and a user asks for.
    supported_dtypes: of the activations.
    min_capability: of the GPU that its kernels need, major * 10 + minor. (Older GPUs and CPUs get the dense path.)
    plain: True if asking for the method by name asks for the dequantised path, although a kernel may exist.
    """

    name: ClassVar[str]
    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16, torch.float32)
    min_capability: ClassVar[int] = 80
    plain: ClassVar[bool] = False

    # The checkpoint format (a key of `spearfish.formats.FORMATS`), its bits, and the dense k that share a scale (-1:
    # one scale per output row; None: the config does not say).
    format: str
    bits: int | None
    group_size: int | None

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """The method for this block. Raises QuantizationError if the block is not one that the method serves."""

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """The name of the method that takes this checkpoint over, or None to let the config's own word stand.

        Exceptional: only for methods whose files call themselves by another's name, and for those that run another's
        files better. `user_quant` is what the user asked for, in lower case, or None; `hf_config` the model's config
        where the host has it. Must be cheap, must not raise, and must not claim what it would misread.
        """
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(format={self.format!r}, bits={self.bits}, group_size={self.group_size})"


def whole(config: Mapping[str, Any], key: str, method: str, legal: tuple[int, ...]) -> int:
    """A whole number that a method cannot do without. Raises QuantizationError naming the key and what is legal."""
    value = config.get(key)
    if type(value) is not int or (legal and value not in legal):
        wanted = f"one of {', '.join(map(str, legal))}" if legal else "a whole number"
        raise QuantizationError(f"{method}: {key} is {value!r} in the quantization_config, wanted {wanted}")
    return value


def positive_group(config: Mapping[str, Any], method: str) -> int:
    """group_size: positive, or -1 for one scale per output row."""
    size = whole(config, "group_size", method, ())
    if size != -1 and size < 1:
        raise QuantizationError(f"{method}: group_size is {size}, wanted a positive number, or -1 for one per row")
    return size


def normalised(word: Any) -> str:
    """The word as configs are compared: both "marlin-24" and "marlin_24" were written."""
    return str(word).lower().replace("-", "_")
