"""The index maps: bijections, inverse to each other, and equal to their formulas worked one code at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spearfish import layouts
from spearfish.errors import ShapeError

BITS = (4, 8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["marlin_24_code", "marlin_code"])
def test_code_maps_are_bijections(kind: str, bits: int) -> None:
    forward, inverse = getattr(layouts, kind), getattr(layouts, f"{kind}_inverse")
    nn, kk = (grid.flatten() for grid in torch.meshgrid(torch.arange(64), torch.arange(16), indexing="ij"))
    word, lane = forward(kk, nn, bits)
    lanes = 32 // bits
    assert torch.equal((word * lanes + lane).sort().values, torch.arange(1024))
    back = inverse(word, lane, bits)
    assert torch.equal(back[0], kk)
    assert torch.equal(back[1], nn)
    assert forward(5, 37, bits) == (int(word[37 * 16 + 5]), int(lane[37 * 16 + 5])), "plain integers work too"


def test_meta_map_is_a_bijection() -> None:
    nn, quad = (grid.flatten() for grid in torch.meshgrid(torch.arange(64), torch.arange(8), indexing="ij"))
    word, lane = layouts.marlin_24_meta(quad, nn)
    assert torch.equal((word * 4 + lane).sort().values, torch.arange(512))
    back = layouts.marlin_24_meta_inverse(word, lane)
    assert torch.equal(back[0], quad)
    assert torch.equal(back[1], nn)


def test_scale_maps_are_bijections() -> None:
    n = torch.arange(256)
    maps = [(layouts.marlin_24_scale, layouts.marlin_24_scale_inverse)]
    maps += [
        (partial(layouts.marlin_scale, grouped=grouped), partial(layouts.marlin_scale_inverse, grouped=grouped))
        for grouped in (True, False)
    ]
    for forward, inverse in maps:
        assert torch.equal(forward(n).sort().values, n)
        assert torch.equal(inverse(forward(n)), n)
    assert layouts.marlin_24_scale_inverse(torch.arange(8)).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("bits", BITS)
def test_marlin_24_code_by_code(bits: int) -> None:
    """Against the written formula, one code after the other, over more than one tile in both directions."""
    n, half, lanes, per_tile = 128, 32, 32 // bits, 1024 * bits // 32
    codes = torch.randint(0, 1 << bits, (n, half), generator=torch.manual_seed(bits), dtype=torch.uint8)
    words = layouts.pack_marlin_24_codes(codes, bits).long() & 0xFFFFFFFF
    assert words.shape == (half // 16, n * bits // 2)
    for kc in range(half):
        for col in range(n):
            kk, nn = kc % 16, col % 64
            a, lo, hi, o, h, j = (kk >> 1) & 3, kk & 1, kk >> 3, nn >> 3, (nn >> 2) & 1, nn & 3
            if bits == 4:
                word, lane = 16 * o + 4 * a + j, 4 * lo + 2 * h + hi
            else:
                word, lane = 32 * o + 8 * a + 2 * j + h, 2 * lo + hi
            assert lane < lanes
            found = int(words[kc // 16, per_tile * (col // 64) + word]) >> (bits * lane) & ((1 << bits) - 1)
            assert found == int(codes[col, kc])
    assert torch.equal(layouts.unpack_marlin_24_codes(layouts.pack_marlin_24_codes(codes, bits), bits), codes)


def test_meta_nibble_by_nibble() -> None:
    n, quads = 128, 16
    nibbles = torch.randint(0, 16, (n, quads), generator=torch.manual_seed(1), dtype=torch.uint8)
    words = layouts.pack_marlin_24_meta(nibbles)
    assert words.dtype == torch.int16
    assert words.shape == (quads // 8, 2 * n)
    for g in range(quads):
        for col in range(n):
            r = col % 64
            c = 64 * ((r >> 1) & 1) + 8 * (r >> 3) + 4 * (r & 1) + 2 * ((g >> 2) & 1) + ((r >> 2) & 1)
            found = int(words[g // 8, 128 * (col // 64) + c]) >> (4 * (g & 3)) & 15
            assert found == int(nibbles[col, g])
    assert torch.equal(layouts.unpack_marlin_24_meta(words), nibbles)


@given(bits=st.integers(1, 8), rows=st.integers(1, 3), count=st.integers(1, 70), seed=st.integers(0, 999))
def test_fields_are_one_bit_stream(bits: int, rows: int, count: int, seed: int) -> None:
    fields = torch.randint(0, 1 << bits, (rows, count), generator=torch.manual_seed(seed), dtype=torch.uint8)
    words = layouts.pack_fields(fields, bits)
    assert words.shape == (rows, -(-count * bits // 32))
    for row in range(rows):
        stream = sum((int(word) & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(words[row]))
        truth = sum(int(field) << (bits * i) for i, field in enumerate(fields[row]))
        assert stream == truth
    assert torch.equal(layouts.unpack_fields(words, bits, count), fields)


def test_tiles_refuse_sizes_they_cannot_cut() -> None:
    with pytest.raises(ShapeError, match="multiple of 64"):
        layouts.pack_marlin_24_codes(torch.zeros(60, 16, dtype=torch.uint8), 4)
    with pytest.raises(ShapeError, match="cannot have shape"):
        layouts.unpack_marlin_codes(torch.zeros(1, 100, dtype=torch.int32), 4)
