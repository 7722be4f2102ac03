"""Files that are stored in a kernel's own layout and call themselves GPTQ: dense Marlin, and its 2:4-sparse sibling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from spearfish.errors import QuantizationError
from spearfish.formats.base import Format
from spearfish.formats.marlin import Marlin
from spearfish.formats.marlin_24 import Marlin24
from spearfish.quantization.base import QuantizationConfig, log, normalised, positive_group, whole
from spearfish.quantization.gptq import GptqConfig, GptqMarlinConfig, calls_itself_gptq


class SerializedMarlin(QuantizationConfig):
    """What the two share: the file's own method takes it, whatever GPTQ-like name the user gives."""

    stored: ClassVar[Format]
    flag: ClassVar[str]  # the boolean key that said so before there was checkpoint_format
    legal_bits: ClassVar[tuple[int, ...]] = (4, 8)

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not self.owns(config):
            raise QuantizationError(
                f"{self.name}: the quantization_config does not say checkpoint_format {self.stored.name!r}, so this"
                f" file is not stored in that layout"
            )
        self.format = self.stored.name
        self.bits = whole(config, "bits", self.name, self.legal_bits) if "bits" in config else None
        self.group_size = positive_group(config, self.name)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SerializedMarlin:
        return cls(config)

    @classmethod
    def owns(cls, config: Mapping[str, Any]) -> bool:
        """Whether the block says that the file is stored in this layout."""
        named = normalised(config.get("quant_method")) == cls.name
        if not named and not calls_itself_gptq(config):
            return False
        said = config.get("checkpoint_format") or config.get("format")
        return normalised(said) == cls.stored.name if said else named or config.get(cls.flag) is True

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        asked_as = (None, cls.name, GptqConfig.name, GptqMarlinConfig.name, *GptqMarlinConfig.asked_as)
        if not cls.owns(hf_quant_cfg) or user_quant not in asked_as:
            return None
        log.info("The model is serialized in %s format. Using the %s kernel.", cls.name, cls.name)
        return cls.name


class MarlinConfig(SerializedMarlin):
    name = "marlin"
    stored = Marlin()
    flag = "is_marlin_format"


class GptqMarlin24Config(SerializedMarlin):
    name = "gptq_marlin_24"
    stored = Marlin24()
    flag = "is_marlin_24_format"
