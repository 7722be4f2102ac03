"""The pictures of docs/formats.md, drawn from the functions that pack and unpack the files; `make docs` writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import torch

from spearfish import layouts, sparse24

INK, PALE, GRID, PAPER = "#22303c", "#8a97a3", "#c9d1d8", "#ffffff"
COLOURS = ("#d1495b", "#2e7d9a", "#d98f2b", "#5b8c5a")
ROW = (0.9, 0.1, -0.2, 0.7, 0.0, -1.1, 0.8, 0.3, -0.6, -0.9, 0.2, 0.1, 0.1, 0.4, 0.0, 0.5)


def text(
    x: float, y: float, words: str, size: int = 13, colour: str = INK, anchor: str = "start", bold: str = ""
) -> str:
    weight = f' font-weight="{bold}"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>'
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, w: float, h: float, fill: str, edge: str = GRID) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="{edge}"/>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = PALE, width: float = 1) -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="{width:g}"/>'


def cell(x: float, y: float, w: float, h: float, words: str, fill: str, colour: str = INK, size: int = 12) -> str:
    return box(x, y, w, h, fill) + text(x + w / 2, y + h / 2 + size * 0.36, words, size, colour, "middle")


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="DejaVu Sans, Helvetica, Arial, sans-serif" role="img">'
    )
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", box(0, 0, width, height, PAPER, PAPER), *parts, "</svg>\n"]
    )


def two_of_four() -> str:
    """One row of 16 weights, what is kept of it, and the nibbles."""
    row = torch.tensor([ROW])
    mask = sparse24.magnitude_mask(row.abs())
    positions = sparse24.positions_of_mask(mask)
    kept, columns = sparse24.compress(row, positions)[0], sparse24.kept_columns(positions)[0]
    left, w, h = 150, 44, 30
    tops = {"dense": 40, "pruned": 104, "kept": 196, "nibbles": 282}
    parts = [
        text(16, tops["dense"] + 20, "dense", bold="bold"),
        text(16, tops["pruned"] + 20, "pruned", bold="bold"),
        text(16, tops["kept"] + 20, "kept values", bold="bold"),
        text(16, tops["nibbles"] + 20, "positions", bold="bold"),
    ]
    for k, value in enumerate(ROW):
        colour = COLOURS[k // 4]
        is_kept = bool(mask[0, k])
        parts.append(cell(left + k * w, tops["dense"], w, h, f"{value:g}", PAPER))
        shown = f"{value:g}" if is_kept else "0"
        parts.append(
            cell(left + k * w, tops["pruned"], w, h, shown, colour if is_kept else PAPER, PAPER if is_kept else PALE)
        )
        parts.append(text(left + k * w + w / 2, tops["dense"] - 8, str(k % 4), 11, PALE, "middle"))
    parts.append(text(16, tops["dense"] - 8, "place in its four", 11, PALE))
    for place, (value, column) in enumerate(zip(kept.tolist(), columns.tolist(), strict=True)):
        quad = column // 4
        x = left + quad * 4 * w + (place % 2) * w + w
        parts.append(line(left + column * w + w / 2, tops["pruned"] + h, x + w / 2, tops["kept"], COLOURS[quad], 1.4))
        parts.append(cell(x, tops["kept"], w, h, f"{value:g}", COLOURS[quad], PAPER))
    for quad, nibble in enumerate(positions[0].tolist()):
        x = left + quad * 4 * w + w
        first, second = nibble & 3, nibble >> 2
        parts.append(cell(x, tops["nibbles"], 2 * w, h, f"{second:02b} {first:02b}", PAPER))
        parts.append(text(x + w, tops["nibbles"] + h + 16, f"places {first} and {second}", 11, PALE, "middle"))
    borders = [left + 4 * quad * w for quad in range(5)]
    parts += [line(x, 30, x, tops["pruned"] + h, INK, 1.6) for x in borders]
    parts.append(
        text(
            left,
            362,
            "16 weights of 16 bits: 256 bits.  Kept: 8 × 4 bits + 4 nibbles = 48 bits, and a share of a scale.",
        )
    )
    return picture(880, 380, "2:4: two of every four weights are kept, a nibble says which", parts)


def nibbles() -> str:
    """The six legal nibbles, and how four of them lie in a word of B_meta."""
    left, w, h, top = 24, 30, 26, 44
    parts = [text(left, 26, "The six patterns, and the nibble  i0 | i1 << 2  that stands for each", bold="bold")]
    for number, nibble in enumerate(sparse24.NIBBLES):
        first, second = nibble & 3, nibble >> 2
        x = left + number * 143
        for place in range(4):
            taken = place in (first, second)
            parts.append(
                cell(x + place * w, top, w, h, str(place), COLOURS[1] if taken else PAPER, PAPER if taken else PALE)
            )
        parts.append(text(x + 2 * w, top + h + 20, f"i1 = {second}, i0 = {first}", 12, INK, "middle"))
        parts.append(
            text(x + 2 * w, top + h + 40, f"{second:02b} {first:02b} = 0x{nibble:X}", 13, INK, "middle", "bold")
        )
    y = 168
    parts.append(
        text(
            left,
            y,
            "One 16-bit word of B_meta: four neighbouring quads of one n, the first in the low bits",
            bold="bold",
        )
    )
    words = [layouts.marlin_24_meta(quad, 0) for quad in range(4)]
    for quad, (word, lane) in enumerate(words):
        x = left + (3 - lane) * 200
        parts.append(cell(x, y + 16, 200, 32, f"quad {quad}:  k = {4 * quad} … {4 * quad + 3}", "#e8f0f4"))
        parts.append(text(x + 100, y + 66, f"bits {4 * lane + 3} … {4 * lane} of word {word}", 11, PALE, "middle"))
    return picture(880, 256, "The metadata nibble and the word that holds four of them", parts)


def tile() -> str:
    """Which cells of a marlin_24 tile share a 32-bit word."""
    left, top, size = 64, 84, 12.5
    shown = (0, 1, 4, 16)
    where = {layouts.marlin_24_code_inverse(word, lane, 4): (word, lane) for word in shown for lane in range(8)}
    parts = [
        text(16, 26, "A tile of marlin_24, 4 bit: 16 kept k by 64 n = 128 words of 8 codes", bold="bold"),
        text(left + 32 * size, 52, "n within the tile", 12, PALE, "middle"),
        text(14, top - 8, "kept k", 12, PALE),
    ]
    parts += [text(left + n * size + size / 2, top - 8, str(n), 11, PALE, "middle") for n in range(0, 64, 8)]
    parts += [text(left - 6, top + kk * size + 10, str(kk), 11, PALE, "end") for kk in (0, 8)]
    right, bottom = left + 64 * size, top + 16 * size
    parts += [line(left, top + kk * size, right, top + kk * size, GRID) for kk in range(17)]
    parts += [line(left + n * size, top, left + n * size, bottom, GRID) for n in range(65)]
    for (kk, n), (word, lane) in where.items():
        x, y = left + n * size, top + kk * size
        parts.append(cell(x, y, size, size, str(lane), COLOURS[shown.index(word)], PAPER, 9))
    parts += [line(left + n * size, top, left + n * size, bottom, INK, 1.2) for n in range(0, 65, 8)]
    y = bottom + 30
    parts.append(
        text(
            16,
            y,
            "Eight codes share a word. In the picture the number is the lane, four bits each, the low bits first:",
            12,
        )
    )
    for i, word in enumerate(shown):
        x = left + i * 202
        parts.append(text(x, y + 28, f"word {word}", 12, COLOURS[i], bold="bold"))
        lanes = [layouts.marlin_24_code_inverse(word, lane, 4) for lane in range(8)]
        parts += _lanes(x, y + 38, lanes, COLOURS[i])
    parts.append(
        text(
            16,
            y + 176,
            "Next word: next n (0 to 3), then next pair of k, then next eight n. A warp's lanes read whole words,",
            12,
        )
    )
    parts.append(
        text(
            16, y + 194, "and each finds in its word just the codes that the tensor-core instruction wants from it.", 12
        )
    )
    return picture(880, int(y + 212), "The permutation of a marlin_24 tile", parts)


def _lanes(x: float, y: float, lanes: Sequence[tuple[int, int]], colour: str) -> list[str]:
    parts = []
    for lane, (kk, n) in enumerate(lanes):
        row, column = lane % 4, lane // 4
        parts.append(text(x + 96 * column, y + 14 + 26 * row, f"{lane}:  k {kk}, n {n}", 11))
        parts.append(box(x + 96 * column - 10, y + 6 + 26 * row, 5, 10, colour, colour))
    return parts


FIGURES = {"two_of_four.svg": two_of_four, "nibble.svg": nibbles, "marlin_24_tile.svg": tile}
