"""Plain GPTQ files, and the same files run by the Marlin-type kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spearfish.errors import QuantizationError
from spearfish.formats.gptq import Gptq, GptqV2
from spearfish.quantization.base import QuantizationConfig, log, normalised, positive_group, whole

_FORMATS = {form.name: form.name for form in (Gptq, GptqV2)}


def calls_itself_gptq(config: Mapping[str, Any]) -> bool:
    """Whether the block is of the GPTQ family. Separate quantize_config.json files often have no quant_method."""
    method = config.get("quant_method")
    return str(method).lower() == GptqConfig.name if method else "bits" in config


class GptqConfig(QuantizationConfig):
    """GPTQ files that the old kernels did not take; and any, on the dequantised path, for a user who asks for it."""

    name = "gptq"
    min_capability = 60
    plain = True
    legal_bits: tuple[int, ...] = (2, 3, 4, 8)

    def __init__(self, config: Mapping[str, Any]) -> None:
        said = normalised(config.get("checkpoint_format") or config.get("format") or Gptq.name)
        if said not in _FORMATS:
            raise QuantizationError(
                f"{self.name}: checkpoint_format is {said!r}, this method reads {' and '.join(_FORMATS)}"
            )
        self.format = _FORMATS[said]
        self.bits = whole(config, "bits", self.name, self.legal_bits)
        self.group_size = positive_group(config, self.name)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GptqConfig:
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        nameless = not hf_quant_cfg.get("quant_method") and calls_itself_gptq(hf_quant_cfg)
        return cls.name if nameless and user_quant in (None, cls.name) else None


class GptqMarlinConfig(GptqConfig):
    """GPTQ files, repacked while they load for the kernels: 4 or 8 bits, symmetric, groups of 32, 64, 128 or one."""

    name = "gptq_marlin"
    min_capability = 80
    plain = False
    legal_bits = (4, 8)
    # What else a user may call it: the old name of the kernels.
    asked_as = ("marlin",)

    @classmethod
    def convertible(cls, config: Mapping[str, Any]) -> bool:
        return (
            calls_itself_gptq(config)
            and normalised(config.get("checkpoint_format") or config.get("format") or Gptq.name) in _FORMATS
            and config.get("bits") in cls.legal_bits
            and config.get("group_size") in (-1, 32, 64, 128)
            and config.get("sym") is True
            and isinstance(config.get("desc_act"), bool)
        )

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        if not cls.convertible(hf_quant_cfg):
            return None
        if user_quant in (None, cls.name, *cls.asked_as):
            log.info("The model can be converted to %s while it loads. Using the %s kernel.", cls.name, cls.name)
            return cls.name
        if user_quant == GptqConfig.name:
            log.info(
                "The model could run with %s, but %s was asked for explicitly, so %s is forced."
                " Ask for %s to run faster.",
                *(cls.name, user_quant, user_quant, cls.name),
            )
        return None
