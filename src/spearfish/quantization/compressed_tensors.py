"""The 2:4 files of compressed-tensors: quantised ones under its own name, 16-bit ones as a method of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spearfish.errors import QuantizationError
from spearfish.formats.ct_bitmask import CtSparse24Bitmask, CtSparseBitmask
from spearfish.formats.ct_marlin_24 import CtMarlin24
from spearfish.formats.ct_pack_quantized import CtPackQuantized
from spearfish.formats.dense import Dense
from spearfish.quantization.base import QuantizationConfig, log

_PREFIX = "ct-"  # of the formats' names in this project; the files say them without
_QUANTISED = {form.name.removeprefix(_PREFIX): form.name for form in (CtMarlin24, CtPackQuantized)}
_BITMASKS = {form.name.removeprefix(_PREFIX): form.name for form in (CtSparse24Bitmask, CtSparseBitmask)}


class CompressedTensorsConfig(QuantizationConfig):
    """Integer codes: "marlin-24", and "pack-quantized" whose values are 2:4 (which only the values show)."""

    name = "compressed-tensors"
    other_names = ("sparseml",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        said = str(config.get("format"))
        if said not in _QUANTISED:
            raise QuantizationError(
                f"{self.name}: format is {said!r}, the quantised 2:4 formats are {' and '.join(_QUANTISED)}"
            )
        self.format = _QUANTISED[said]
        weights = next(iter(_weights(config)), {})
        self.bits = weights.get("num_bits")
        self.group_size = -1 if weights.get("strategy") in ("channel", "tensor") else weights.get("group_size")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CompressedTensorsConfig:
        return cls(config)

    @classmethod
    def calls_itself_so(cls, config: Mapping[str, Any]) -> bool:
        """Whether the block is of this family; old ones lie under another key and name no method."""
        method = config.get("quant_method")
        if method:
            return str(method).lower().replace("_", "-") in (cls.name, *cls.other_names)
        return "config_groups" in config or "sparsity_config" in config

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        return cls.name if cls.calls_itself_so(hf_quant_cfg) and user_quant in (None, cls.name) else None


class Sparse24Config(QuantizationConfig):
    """2:4 values that are not packed codes: 16-bit ones, and the int8 and fp8 ones of the bitmask formats."""

    name = "sparse24"

    def __init__(self, config: Mapping[str, Any]) -> None:
        form = self.stored_as(config)
        if form is None:
            raise QuantizationError(
                f"{self.name}: the quantization_config has no sparsity_config of format"
                f" {' or '.join(_BITMASKS)}, nor one of structure 2:4 on unquantised weights"
            )
        self.format = form
        self.bits, self.group_size = 16, None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Sparse24Config:
        return cls(config)

    @classmethod
    def stored_as(cls, config: Mapping[str, Any]) -> str | None:
        """The format of the files, or None if they are not this method's."""
        sparsity = config.get("sparsity_config")
        if not CompressedTensorsConfig.calls_itself_so(config) or not isinstance(sparsity, Mapping):
            return None
        said = str(sparsity.get("format"))
        if said in _BITMASKS:
            return _BITMASKS[said]
        unquantised = said == Dense.name and not _weights(config) and config.get("format") in (None, Dense.name)
        return Dense.name if unquantised and sparsity.get("sparsity_structure") == "2:4" else None

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        if cls.stored_as(hf_quant_cfg) is None or user_quant not in (None, cls.name, CompressedTensorsConfig.name):
            return None
        log.info("The model is serialized as 2:4 values. Using the %s kernel.", cls.name)
        return cls.name


def _weights(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The quantisation of weights in each of the block's groups."""
    groups = config.get("config_groups")
    found = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    return [weights for weights in found if isinstance(weights, Mapping)]
