"""spearfish: LLM weights that are 2:4-sparse and quantised. Make them, load them, run them.

The names below are the public ones; everything else may change. `import spearfish` needs torch alone and no GPU:
`load`, `matmul`, `prepare` and `QuantLinear` are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spearfish.errors import (
    CompileError,
    FormatError,
    QuantizationError,
    ShapeError,
    SpearfishError,
    UnsupportedError,
)
from spearfish.scheme import QuantScheme, QuantWeight

if TYPE_CHECKING:
    from spearfish.integrations.transformers import load
    from spearfish.kernels.matmul import matmul, prepare
    from spearfish.nn import QuantLinear

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "FormatError",
    "QuantLinear",
    "QuantScheme",
    "QuantWeight",
    "QuantizationError",
    "ShapeError",
    "SpearfishError",
    "UnsupportedError",
    "__version__",
    "load",
    "matmul",
    "prepare",
]

_LATE = {
    "QuantLinear": "spearfish.nn",
    "load": "spearfish.integrations.transformers",
    "matmul": "spearfish.kernels.matmul",
    "prepare": "spearfish.kernels.matmul",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module 'spearfish' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
