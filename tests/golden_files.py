"""The golden files, unpacked: they are tracked as .xz, since the tree has to travel light."""

from __future__ import annotations

import atexit
import lzma
import shutil
import tempfile
from functools import cache
from pathlib import Path

PACKED = Path(__file__).parent / "golden"


@cache
def _unpacked() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="spearfish-golden-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for packed in PACKED.glob("*.xz"):
        (folder / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
    return folder


def golden_files(pattern: str) -> list[Path]:
    """Those that match, in order; no match is a mistake."""
    files = sorted(_unpacked().glob(pattern))
    assert files, pattern
    return files
