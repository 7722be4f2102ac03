"""Where every code, metadata nibble and scale lies in a packed file: pure index maps, each beside its inverse.

Marlin files cut a weight into tiles of 16 stored k by 64 n. One tile is 1024 codes, and the file holds it as 128
(4-bit) or 256 (8-bit) words of 32 bits in the order in which the threads of a warp fetch them. The same place in
every tile follows the same rule, so a map is a function of the place inside one tile:

    the weight, k down, n across           one tile                        its words in the file

      +------+------+------+           nn 0 ......... 63
      | tile | tile | tile |  row 0    kk 0  +----------+               row 0: | tile | tile | tile |
      +------+------+------+               : |   code   |  ---map--->          word, lane
      | tile | tile | tile |  row 1    kk 15 +----------+               row 1: | tile | tile | tile |
      +------+------+------+

A word is written with its lanes from the least significant bits up: lane L of a b-bit word is bits b*L .. b*L+b-1.
In a 2:4 file a tile's 16 stored k are the kept half of 32 dense k. All functions take and return integers or integer
tensors; none allocates more than what it returns. (Checked bit by bit against the packers of vLLM 0.4.3.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

from spearfish.errors import ShapeError

TILE_N = 64  # columns of the GEMM in one tile of any Marlin file
TILE_K = 16  # stored k in one tile of codes; 32 dense k in a 2:4 file
META_QUADS = 8  # quads of dense k in one tile of 2:4 metadata: 32 dense k

Index = TypeVar("Index", int, torch.Tensor)


# --- fields in words ----------------------------------------------------------------------------------------------


def pack_fields(fields: torch.Tensor, bits: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Pack unsigned `bits`-wide fields [..., count] (uint8) from the low bits up into words [..., words].

    The fields form one little-endian bit stream, so a width that does not divide the word lets fields straddle two
    words. The last word is filled up with zero bits.
    """
    if bits not in (1, 2, 4, 8):
        place = torch.arange(bits, device=fields.device, dtype=torch.uint8)
        fields, bits = ((fields.unsqueeze(-1) >> place) & 1).flatten(-2), 1
    lanes = torch.iinfo(dtype).bits // bits
    fields = torch.nn.functional.pad(fields, (0, -fields.shape[-1] % lanes))
    per_byte = 8 // bits
    split = fields.reshape(*fields.shape[:-1], -1, per_byte)
    packed = split[..., 0].clone()
    for lane in range(1, per_byte):
        packed |= split[..., lane] << (bits * lane)
    return packed.contiguous().view(dtype)


def unpack_fields(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` fields, uint8 [..., count], of words [..., words]. Inverse of `pack_fields`."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets[..., :count].contiguous()
    width = bits if bits in (1, 2, 4) else 1
    place = torch.arange(0, 8, width, device=words.device, dtype=torch.uint8)
    fields = ((octets.unsqueeze(-1) >> place) & ((1 << width) - 1)).flatten(-2)
    if width == bits:
        return fields[..., :count].contiguous()
    stream = fields[..., : count * bits].reshape(*fields.shape[:-1], count, bits)
    return (stream << torch.arange(bits, device=words.device, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


# --- 2:4 Marlin ("marlin_24") -------------------------------------------------------------------------------------


def marlin_24_code(kk: Index, nn: Index, bits: int) -> tuple[Index, Index]:
    """(word, lane) in its tile of the code at stored k `kk` in 0..15 and column `nn` in 0..63.

             n:  o = nn >> 3      h = bit 2 of nn     j = nn & 3
             k:  hi = kk >> 3     a = (kk >> 1) & 3   lo = kk & 1
    4 bit  word  | o o o | a a | j j |         lane | lo | h | hi |
    8 bit  word  | o o o | a a | j j | h |     lane | lo | hi |
    """
    o, h, j = nn >> 3, (nn >> 2) & 1, nn & 3
    hi, a, lo = kk >> 3, (kk >> 1) & 3, kk & 1
    if bits == 4:
        return 16 * o + 4 * a + j, 4 * lo + 2 * h + hi
    return 32 * o + 8 * a + 2 * j + h, 2 * lo + hi


def marlin_24_code_inverse(word: Index, lane: Index, bits: int) -> tuple[Index, Index]:
    """(kk, nn) of the code that `marlin_24_code` puts at (word, lane)."""
    if bits == 4:
        nn = 8 * (word >> 4) + 4 * ((lane >> 1) & 1) + (word & 3)
        return 2 * ((word >> 2) & 3) + (lane >> 2) + 8 * (lane & 1), nn
    nn = 8 * (word >> 5) + 4 * (word & 1) + ((word >> 1) & 3)
    return 2 * ((word >> 3) & 3) + (lane >> 1) + 8 * (lane & 1), nn


def marlin_24_meta(quad: Index, nn: Index) -> tuple[Index, Index]:
    """(word, lane) in its tile of the nibble of quad 0..7 and column `nn` in 0..63; words are 16 bits, 4 nibbles each.

        word  | bit 1 of nn | nn >> 3 (3 bits) | bit 0 of nn | quad >> 2 | bit 2 of nn |      lane = quad & 3

    It is the usual reordered metadata matrix of the sparse tensor core, [n, k/16], read in place as [k/32, 2n].
    """
    return 64 * ((nn >> 1) & 1) + 8 * (nn >> 3) + 4 * (nn & 1) + 2 * (quad >> 2) + ((nn >> 2) & 1), quad & 3


def marlin_24_meta_inverse(word: Index, lane: Index) -> tuple[Index, Index]:
    """(quad, nn) of the nibble that `marlin_24_meta` puts at (word, lane)."""
    nn = 8 * ((word >> 3) & 7) + 4 * (word & 1) + 2 * (word >> 6) + ((word >> 2) & 1)
    return 4 * ((word >> 1) & 1) + lane, nn


def marlin_24_scale(n: Index) -> Index:
    """Place in the file of the grouped scale of column n: within 8 columns the file order is 0 4 1 5 2 6 3 7.

    With one group the scales of a 2:4 file stand in natural order.
    """
    return 8 * (n >> 3) + 2 * (n & 3) + ((n >> 2) & 1)


def marlin_24_scale_inverse(place: Index) -> Index:
    """The column whose grouped scale `marlin_24_scale` puts at `place`."""
    return 8 * (place >> 3) + 4 * (place & 1) + ((place >> 1) & 3)


# --- dense Marlin -------------------------------------------------------------------------------------------------


def marlin_code(kk: Index, nn: Index, bits: int) -> tuple[Index, Index]:
    """(word, lane) in its tile of the code at k `kk` in 0..15 and column `nn` in 0..63 of a dense Marlin file.

             n:  t = nn >> 4      h = bit 3 of nn     c = nn & 7
             k:  hi = kk >> 3     a = (kk >> 1) & 3   lo = kk & 1
    4 bit  word  | c c c | a a | t t |         lane | lo | h | hi |
    8 bit  word  | c c c | a a | t t | h |     lane | lo | hi |
    """
    t, h, c = nn >> 4, (nn >> 3) & 1, nn & 7
    hi, a, lo = kk >> 3, (kk >> 1) & 3, kk & 1
    if bits == 4:
        return 16 * c + 4 * a + t, 4 * lo + 2 * h + hi
    return 32 * c + 8 * a + 2 * t + h, 2 * lo + hi


def marlin_code_inverse(word: Index, lane: Index, bits: int) -> tuple[Index, Index]:
    """(kk, nn) of the code that `marlin_code` puts at (word, lane)."""
    if bits == 4:
        nn = (word >> 4) + 8 * ((lane >> 1) & 1) + 16 * (word & 3)
        return 2 * ((word >> 2) & 3) + (lane >> 2) + 8 * (lane & 1), nn
    nn = (word >> 5) + 8 * (word & 1) + 16 * ((word >> 1) & 3)
    return 2 * ((word >> 3) & 3) + (lane >> 1) + 8 * (lane & 1), nn


def marlin_scale(n: Index, grouped: bool) -> Index:
    """Place in a dense Marlin file of the scale of column n; the order differs between one group and several."""
    if grouped:
        return 64 * (n >> 6) + 8 * (n & 7) + ((n >> 3) & 7)
    return 32 * (n >> 5) + 8 * ((n >> 1) & 3) + 2 * ((n >> 3) & 3) + (n & 1)


def marlin_scale_inverse(place: Index, grouped: bool) -> Index:
    """The column whose scale `marlin_scale` puts at `place`."""
    if grouped:
        return 64 * (place >> 6) + 8 * (place & 7) + ((place >> 3) & 7)
    return 32 * (place >> 5) + 8 * ((place >> 1) & 3) + 2 * ((place >> 3) & 3) + (place & 1)


# --- whole matrices -----------------------------------------------------------------------------------------------


def pack_marlin_24_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Kept codes uint8 [n, k/2] -> `B_24` int32 [k/32, n * bits / 2]."""
    return _pack_tiles(codes, TILE_K, _sources("marlin_24", bits), bits, torch.int32)


def unpack_marlin_24_codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """`B_24` int32 [k/32, n * bits / 2] -> kept codes uint8 [n, k/2]."""
    return _unpack_tiles(words, TILE_K, _places("marlin_24", bits), bits)


def pack_marlin_24_meta(positions: torch.Tensor) -> torch.Tensor:
    """Nibbles uint8 [n, k/4] -> `B_meta` int16 [k/32, 2n]."""
    return _pack_tiles(positions, META_QUADS, _sources("meta", 4), 4, torch.int16)


def unpack_marlin_24_meta(words: torch.Tensor) -> torch.Tensor:
    """`B_meta` int16 [k/32, 2n] -> nibbles uint8 [n, k/4]."""
    return _unpack_tiles(words, META_QUADS, _places("meta", 4), 4)


def pack_marlin_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [n, k] -> dense Marlin `B` int32 [k/16, n * bits / 2]."""
    return _pack_tiles(codes, TILE_K, _sources("marlin", bits), bits, torch.int32)


def unpack_marlin_codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Dense Marlin `B` int32 [k/16, n * bits / 2] -> codes uint8 [n, k]."""
    return _unpack_tiles(words, TILE_K, _places("marlin", bits), bits)


def marlin_24_scales_to_file(scales: torch.Tensor, grouped: bool) -> torch.Tensor:
    """Scales [n, groups] -> the file's `s` [groups, n]."""
    order = torch.arange(scales.shape[0], device=scales.device)
    if grouped:
        order = marlin_24_scale_inverse(order)
    return scales[order].T.contiguous()


def marlin_24_scales_from_file(s: torch.Tensor, grouped: bool) -> torch.Tensor:
    """The file's `s` [groups, n] -> scales [n, groups]."""
    order = torch.arange(s.shape[1], device=s.device)
    if grouped:
        order = marlin_24_scale(order)
    return s[:, order].T.contiguous()


def marlin_scales_to_file(scales: torch.Tensor, grouped: bool) -> torch.Tensor:
    """Scales [n, groups] -> the `s` [groups, n] of a dense Marlin file."""
    return scales[marlin_scale_inverse(torch.arange(scales.shape[0], device=scales.device), grouped)].T.contiguous()


def marlin_scales_from_file(s: torch.Tensor, grouped: bool) -> torch.Tensor:
    """The `s` [groups, n] of a dense Marlin file -> scales [n, groups]."""
    return s[:, marlin_scale(torch.arange(s.shape[1], device=s.device), grouped)].T.contiguous()


# --- tiles --------------------------------------------------------------------------------------------------------

_CODE_MAPS: dict[str, tuple[Callable[..., tuple[torch.Tensor, torch.Tensor]], ...]] = {
    "marlin_24": (marlin_24_code, marlin_24_code_inverse),
    "marlin": (marlin_code, marlin_code_inverse),
    "meta": (lambda quad, nn, _: marlin_24_meta(quad, nn), lambda word, lane, _: marlin_24_meta_inverse(word, lane)),
}


def _tile_shape(kind: str, bits: int) -> tuple[int, int]:
    """(depth along k, lanes in a word) of one tile."""
    return (META_QUADS, 4) if kind == "meta" else (TILE_K, 32 // bits)


@cache
def _sources(kind: str, bits: int) -> torch.Tensor:
    """int64 [fields]: for every field of a tile in file order, which place nn * depth + kk it comes from."""
    depth, lanes = _tile_shape(kind, bits)
    field = torch.arange(TILE_N * depth)
    kk, nn = _CODE_MAPS[kind][1](field // lanes, field % lanes, bits)
    return nn * depth + kk


@cache
def _places(kind: str, bits: int) -> torch.Tensor:
    """int64 [fields]: for every place nn * depth + kk of a tile, which field of the file holds it."""
    depth, lanes = _tile_shape(kind, bits)
    place = torch.arange(TILE_N * depth)
    word, lane = _CODE_MAPS[kind][0](place % depth, place // depth, bits)
    return word * lanes + lane


def _pack_tiles(matrix: torch.Tensor, depth: int, sources: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    n, columns = matrix.shape
    if n % TILE_N or columns % depth:
        raise ShapeError(f"Marlin tiles need n a multiple of {TILE_N} and stored k of {depth}, got {[n, columns]}")
    tiles = matrix.reshape(n // TILE_N, TILE_N, columns // depth, depth).permute(2, 0, 1, 3).flatten(2)
    return pack_fields(tiles[..., sources.to(matrix.device)], bits, dtype).flatten(1)


def _unpack_tiles(words: torch.Tensor, depth: int, places: torch.Tensor, bits: int) -> torch.Tensor:
    rows, width = words.shape
    lanes = torch.iinfo(words.dtype).bits // bits
    n = width * lanes // depth
    if n % TILE_N or width * lanes % depth:
        raise ShapeError(f"a Marlin tensor of {bits}-bit fields cannot have shape {[rows, width]}")
    fields = unpack_fields(words.reshape(rows, n // TILE_N, TILE_N * depth // lanes), bits, TILE_N * depth)
    tiles = fields[..., places.to(words.device)].reshape(rows, n // TILE_N, TILE_N, depth)
    return tiles.permute(1, 2, 0, 3).reshape(n, rows * depth)
