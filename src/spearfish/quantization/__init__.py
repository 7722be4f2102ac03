"""Which method serves a checkpoint: the registry, asked in order, first claim wins.

    resolve({"quant_method": "gptq", "checkpoint_format": "marlin_24", ...})    ->  "gptq_marlin_24"

The names are the vocabulary of vLLM 0.4.3, where these files come from: what a config says and a user may ask for.
All methods lead to the same kernels, "gptq" to the dequantised path if it is asked for by name. Where the answer
differs from that of vLLM 0.4.3, `spearfish.quantization.deviations` says so and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spearfish.errors import QuantizationError
from spearfish.quantization.base import QuantizationConfig
from spearfish.quantization.compressed_tensors import CompressedTensorsConfig, Sparse24Config
from spearfish.quantization.gptq import GptqConfig, GptqMarlinConfig
from spearfish.quantization.marlin import GptqMarlin24Config, MarlinConfig

# The order matters: a file that is stored in a kernel's own layout must be claimed before it is taken for plain GPTQ,
# and 16-bit values before they are taken for quantised ones.
QUANTIZATION_METHODS: dict[str, type[QuantizationConfig]] = {
    "marlin": MarlinConfig,
    "gptq_marlin_24": GptqMarlin24Config,
    "gptq_marlin": GptqMarlinConfig,
    "gptq": GptqConfig,
    "sparse24": Sparse24Config,
    "compressed-tensors": CompressedTensorsConfig,
}

__all__ = ["QUANTIZATION_METHODS", "QuantizationConfig", "get_quantization_config", "register", "resolve"]


def resolve(config: Mapping[str, Any], user_quant: str | None = None, hf_config: Any = None) -> str:
    """The name of the method that serves a checkpoint with this `quantization_config` block.

    user_quant: what the user asks for, or None. hf_config: the model's config, for methods that need to see it.
    Raises QuantizationError, with the valid names, if no method serves it or the one asked for does not fit the file.
    """
    said = str(config.get("quant_method") or "").lower()
    asked = user_quant.lower() if user_quant else None
    for method in QUANTIZATION_METHODS.values():
        claimed = method.override_quantization_method(config, asked, hf_config)
        if claimed is not None:
            return _known(claimed, f"{method.__name__} hands the file to {claimed!r}")
    if asked is None and not said:
        raise QuantizationError(f"the quantization_config has no quant_method; wanted one of {_names()}")
    if asked is not None and asked != said:
        raise QuantizationError(
            f"{asked!r} was asked for, but the file's quant_method is {said!r} and {asked!r} does not take such a file."
            f" Leave the method out, or name the right one of {_names()}"
        )
    return _known(said, f"the file's quant_method is {said!r}")


def get_quantization_config(name: str) -> type[QuantizationConfig]:
    """The class of that name. Raises QuantizationError with the valid names."""
    return QUANTIZATION_METHODS[_known(name, f"{name!r} was asked for")]


def register(method: type[QuantizationConfig]) -> type[QuantizationConfig]:
    """Add somebody else's method under its `name`; it is asked before those that were there. Also a decorator.

    Registering the same class again changes nothing. Raises QuantizationError if another class has the name.
    """
    name = method.name
    present = QUANTIZATION_METHODS.get(name)
    if present is method:
        return method
    if present is not None:
        raise QuantizationError(
            f"{name!r} is already the name of {present.__module__}.{present.__qualname__}; give"
            f" {method.__module__}.{method.__qualname__} another name"
        )
    others = dict(QUANTIZATION_METHODS)
    QUANTIZATION_METHODS.clear()
    QUANTIZATION_METHODS.update({name: method, **others})
    return method


def _known(name: str, why: str) -> str:
    if name not in QUANTIZATION_METHODS:
        raise QuantizationError(f"{why}, which is no method here; wanted one of {_names()}")
    return name


def _names() -> str:
    return ", ".join(QUANTIZATION_METHODS)
