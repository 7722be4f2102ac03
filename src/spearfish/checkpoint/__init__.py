"""Checkpoint folders: open, write, convert, verify, inspect. Never more than one layer and one shard in memory."""

from spearfish.checkpoint.config import FORMAT_VERSION, QuantConfig
from spearfish.checkpoint.reader import Checkpoint, LinearInfo, open_checkpoint
from spearfish.checkpoint.writer import CheckpointWriter

__all__ = ["FORMAT_VERSION", "Checkpoint", "CheckpointWriter", "LinearInfo", "QuantConfig", "open_checkpoint"]
