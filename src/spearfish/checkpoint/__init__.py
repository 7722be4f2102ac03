"""Checkpoint folders: open, write, convert, verify, inspect. Never more than one layer and one shard in memory."""

from spearfish.checkpoint.config import FORMAT_VERSION, QuantConfig
from spearfish.checkpoint.conversion import DTYPES, TARGETS, Converted, ConvertReport, convert
from spearfish.checkpoint.inspection import Inspection, LayerRow, inspect
from spearfish.checkpoint.reader import Checkpoint, LinearInfo, open_checkpoint
from spearfish.checkpoint.verification import Problem, VerifyReport, verify
from spearfish.checkpoint.writer import CheckpointWriter, refuse_target

__all__ = [
    "DTYPES",
    "FORMAT_VERSION",
    "TARGETS",
    "Checkpoint",
    "CheckpointWriter",
    "ConvertReport",
    "Converted",
    "Inspection",
    "LayerRow",
    "LinearInfo",
    "Problem",
    "QuantConfig",
    "VerifyReport",
    "convert",
    "inspect",
    "open_checkpoint",
    "refuse_target",
    "verify",
]
