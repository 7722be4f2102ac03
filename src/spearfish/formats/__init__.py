"""Checkpoint formats: bytes on disk to and from a `QuantWeight`. One file and one line of `FORMATS` each."""

from __future__ import annotations

from spearfish.formats.base import Declared, Description, Format, LayerFacts, TensorSpec
from spearfish.formats.ct_bitmask import CtSparse24Bitmask, CtSparseBitmask
from spearfish.formats.ct_marlin_24 import CtMarlin24
from spearfish.formats.ct_pack_quantized import CtPackQuantized
from spearfish.formats.dense import Dense
from spearfish.formats.gptq import Gptq, GptqV2
from spearfish.formats.marlin import Marlin
from spearfish.formats.marlin_24 import Marlin24

FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Marlin24(),
        Gptq(),
        GptqV2(),
        Marlin(),
        CtMarlin24(),
        CtPackQuantized(),
        CtSparse24Bitmask(),
        CtSparseBitmask(),
        Dense(),
    )
}

__all__ = ["FORMATS", "Declared", "Description", "Format", "LayerFacts", "TensorSpec"]
