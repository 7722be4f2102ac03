"""The one folder for what can be made again: compiled kernels, converted copies of GGUF files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """SPEARFISH_CACHE_DIR, else `spearfish` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    chosen = os.environ.get("SPEARFISH_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spearfish"
