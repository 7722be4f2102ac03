"""spearfish: LLM weights that are 2:4-sparse and quantised. Make them, load them, run them."""

from spearfish.errors import (
    CompileError,
    FormatError,
    QuantizationError,
    ShapeError,
    SpearfishError,
    UnsupportedError,
)
from spearfish.scheme import QuantScheme, QuantWeight

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "FormatError",
    "QuantScheme",
    "QuantWeight",
    "QuantizationError",
    "ShapeError",
    "SpearfishError",
    "UnsupportedError",
    "__version__",
]
