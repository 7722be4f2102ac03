"""Checkpoint formats: bytes on disk to and from a `QuantWeight`. One file and one line of `FORMATS` each."""

from __future__ import annotations

from spearfish.formats.base import Declared, Description, Format, TensorSpec
from spearfish.formats.marlin_24 import Marlin24

FORMATS: dict[str, Format] = {form.name: form for form in (Marlin24(),)}

__all__ = ["FORMATS", "Declared", "Description", "Format", "TensorSpec"]
