"""QuantWeight to the tile stream that the kernels read, and back: one map, its exact inverse, one picture.

The stream is a row of tiles, n tile by n tile and along k inside one, each of 64 n (output rows) by 128 dense k:

    [n_tile 0: k_tile 0 | k_tile 1 | ... ][n_tile 1: k_tile 0 | ... ]      every tile `tile_bytes` long

so that a block that walks along k reads one contiguous piece of memory. A tile holds, in this order:

    codes      the A fragments of the tensor-core instruction, ready to load
    metadata   which two of every four are kept (2:4 only)
    scales     `granules` rows of 64 (none if the scale is per column)
    zeros      the same again, the zero points (asymmetric only)

A "step" is one instruction along k: 32 dense k in 2:4 (16 kept values, 4 steps a tile) or 16 in dense (8 steps).
Warp w of 4 owns rows 16w .. 16w + 15; lane 4 * gq + t holds of each step the fragment

                 column 2t, 2t + 1    column 2t + 8, 2t + 9        (columns of kept values)
    row gq             a0                    a2
    row gq + 8         a1                    a3                    (a pair each, the even column in the low half)

codes, 4 bit: [warp][chunk of 4 steps][lane] 16 bytes, word s is step s. `w & 0x000f000f` gives a0, `w >> 4` a1,
    `w >> 8` a2, `w >> 12` a3, as pairs in the two halves of the word.
codes, 8 bit: [warp][chunk of 2 steps][lane] 16 bytes, two words a step: bytes (a0.even, a1.even, a0.odd, a1.odd) and
    the same of a2 and a3, so that `w & 0x00ff00ff` gives a0 and `w >> 8` a1 (and a byte permute any of them).
values, 16 bit: [step][column half][row] 16 bytes, eight columns of a row: 8 x 8 matrices, which `ldmatrix` hands out as
    the fragment and wgmma can read from shared memory as they are.
metadata: [warp][lane] 8 bytes. Word p of lane t is for step s = 2p + (t >> 1) and dense k 16 * (t & 1) .. + 15 of it;
    low half row gq, high half row gq + 8, quad q of the four at bit 4q. So step s uses word s >> 1 with sparsity
    selector s & 1, and no bit is wasted.
scales, zeros: [granule][warp][gq][row gq, row gq + 8], two bytes each, in the dtype of the activations.

Padding happens here and nowhere else: rows to 64 with scale 0, k to 128 with scale 0 or codes at the zero point.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from spearfish.errors import ShapeError, UnsupportedError
from spearfish.scheme import QuantScheme, QuantWeight

TILE_N = 64
TILE_K = 128
# Elements per chunk of work in the vectorised maps: bounds the extra memory to a few hundred MB.
_CHUNK = 1 << 25

KINDS = ("int4_24", "int8_24", "f16_24", "int4", "int8")
STREAM_DTYPES = (torch.float16, torch.bfloat16)


def kind_of(scheme: QuantScheme) -> str:
    """The kernel's name for a kind of weight: one of `KINDS`."""
    if scheme.bits == 16:
        return "f16_24"
    return f"int{scheme.bits}{'_24' if scheme.is_sparse else ''}"


def code_bytes(kind: str) -> int:
    """Bytes of the codes section of a tile."""
    values = TILE_N * TILE_K // (2 if kind.endswith("_24") else 1)
    return {"int4": values // 2, "int8": values, "f16": values * 2}[kind.removesuffix("_24")]


def metadata_bytes(kind: str) -> int:
    """Bytes of the metadata section of a tile: a nibble for every quad."""
    return TILE_N * TILE_K // 8 if kind.endswith("_24") else 0


def scale_bytes(granules: int) -> int:
    """Bytes of the scales section (and of the zeros section) of a tile."""
    return granules * TILE_N * 2


def tile_bytes(kind: str, granules: int, has_zeros: bool) -> int:
    """Bytes of one tile. A multiple of 128 for every kind."""
    return code_bytes(kind) + metadata_bytes(kind) + scale_bytes(granules) * (2 if has_zeros else 1)


# kind, n, k, granules, has_zeros, batch_invariant
Facts = tuple[str, int, int, int, bool, bool]


@dataclass(frozen=True, eq=False)
class PreparedWeight:
    """One layer's weight [n, k], ready to multiply; made by `prepare`, never changed afterwards.

    Either `stream` (uint8, the tile stream, for the GPU kernels) or `dense` ([n, k] in `dtype`, for every device) is
    there. `column_scale` is float32 [n padded to 64], applied to the accumulators. `path` says in words what runs and
    why.
    """

    scheme: QuantScheme
    n: int
    k: int
    dtype: torch.dtype
    path: str
    batch_invariant: bool = False
    dense: torch.Tensor | None = None
    stream: torch.Tensor | None = None
    column_scale: torch.Tensor | None = None
    granules: int = 0
    has_zeros: bool = False
    # What the torch op is told besides the tensors; here, so that no call has to gather it.
    facts: Facts = field(init=False, repr=False)

    def __post_init__(self) -> None:
        facts = (self.kind, self.n, self.k, self.granules, self.has_zeros, self.batch_invariant)
        object.__setattr__(self, "facts", facts)

    @property
    def kind(self) -> str:
        return kind_of(self.scheme)

    @property
    def n_tiles(self) -> int:
        return -(-self.n // TILE_N)

    @property
    def k_tiles(self) -> int:
        return -(-self.k // TILE_K)

    @property
    def tile_bytes(self) -> int:
        return tile_bytes(self.kind, self.granules, self.has_zeros)

    @property
    def device(self) -> torch.device:
        tensor = self.dense if self.stream is None else self.stream
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        held = (self.dense, self.stream, self.column_scale)
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)


def why_no_stream(weight: QuantWeight, dtype: torch.dtype) -> str | None:
    """Why `weight` cannot become a tile stream for activations of `dtype`, or None if it can."""
    scheme = weight.scheme
    if dtype not in STREAM_DTYPES:
        return f"activations are {dtype}, the kernels take float16 and bfloat16"
    if weight.n < 1 or weight.k < 1:
        return f"the weight [{weight.n}, {weight.k}] is empty"
    if scheme.bits == 16:
        return _overflow(weight.codes, dtype, "values")
    if weight.groups == 1:
        return None if scheme.symmetric else _overflow(weight.scales, dtype, "scales")
    size = scheme.group_size or weight.k
    if size % 32:
        return f"group {size} is not a multiple of 32"
    if weight.group_index is not None:
        plain = torch.arange(weight.k, device=weight.device) // size
        if not torch.equal(weight.group_index.long(), plain):
            return "the groups are out of order along k (act-order)"
    return _overflow(weight.scales, dtype, "scales")


def _overflow(tensor: torch.Tensor | None, dtype: torch.dtype, what: str) -> str | None:
    if tensor is None or dtype == torch.bfloat16 or tensor.dtype == dtype:
        return None
    if tensor.numel() and tensor.abs().max().item() > torch.finfo(dtype).max:
        return f"some {what} are beyond the range of {dtype}"
    return None


def granules_of(scheme: QuantScheme, k: int) -> int:
    """Scale rows in a tile of a weight [n, k]: 1, 2 or 4, the fewest that every group border falls between; 0 for a
    scale per column. Raises UnsupportedError where groups end inside 32 k."""
    one_group = scheme.groups(k) == 1
    if scheme.bits == 16 or (one_group and scheme.symmetric):
        return 0
    size = TILE_K if one_group or scheme.group_size is None else scheme.group_size
    if size % 32:
        raise UnsupportedError(f"groups of {size} are no multiple of 32: such a weight runs dense")
    return next(granules for granules in (1, 2, 4) if size % (TILE_K // granules) == 0)


def to_stream(
    weight: QuantWeight, device: torch.device | str, dtype: torch.dtype, batch_invariant: bool = False, path: str = ""
) -> PreparedWeight:
    """The tile stream of `weight` on `device`. Raises UnsupportedError with the reason of `why_no_stream`, and
    ShapeError if a pattern of kept positions is not legal."""
    reason = why_no_stream(weight, dtype)
    if reason:
        raise UnsupportedError(f"no tile stream for {weight.scheme} [{weight.n}, {weight.k}]: {reason}")
    device = torch.device(device)
    kind, granules, has_zeros = kind_of(weight.scheme), granules_of(weight.scheme, weight.k), weight.zeros is not None
    n_tiles, k_tiles = -(-weight.n // TILE_N), -(-weight.k // TILE_K)
    stream = torch.empty((n_tiles, k_tiles, tile_bytes(kind, granules, has_zeros)), dtype=torch.uint8, device=device)
    # A few n tiles at a time: the maps below need several copies of what they work on.
    step = max(1, _CHUNK // (TILE_N * TILE_K * k_tiles))
    per_row = {name: tensor for name, tensor in weight.tensors().items() if name != "group_index"}
    for first in range(0, n_tiles, step):
        rows = slice(first * TILE_N, (first + step) * TILE_N)
        part = QuantWeight(weight.scheme, **{name: tensor[rows].to(device) for name, tensor in per_row.items()})
        _refuse_illegal_positions(part, rows.start)
        _fill(stream[first : first + step], part, kind, granules, dtype)
    column_scale = None
    if granules == 0 and weight.scales is not None:
        column_scale = torch.zeros(n_tiles * TILE_N, dtype=torch.float32, device=device)
        column_scale[: weight.n] = weight.scales[:, 0]
    return PreparedWeight(
        weight.scheme,
        weight.n,
        weight.k,
        dtype,
        path or "tile stream",
        batch_invariant,
        stream=stream.flatten(),
        column_scale=column_scale,
        granules=granules,
        has_zeros=has_zeros,
    )


def _refuse_illegal_positions(part: QuantWeight, first_row: int) -> None:
    """Codecs check what they read; but what the tensor cores do with an illegal pattern is undefined, so look again."""
    p = part.positions
    if p is None:
        return
    bad = (p > 15) | ((p & 3) >= (p >> 2))
    if bad.any():
        row, quad = (int(i) for i in bad.nonzero()[0])
        raise ShapeError(
            f"positions[{first_row + row}, {quad}] is {int(p[row, quad])}, wanted i0 | i1 << 2 with i0 < i1 <= 3"
            f" ({int(bad.sum())} bad at least); QuantWeight.check() lists more"
        )


def _sections(tiles: torch.Tensor, kind: str, granules: int) -> list[torch.Tensor]:
    """Views [n_tiles, k_tiles, bytes] of codes, metadata, scales and zeros."""
    sizes = [code_bytes(kind), metadata_bytes(kind), scale_bytes(granules)]
    return list(torch.split(tiles, [*sizes, tiles.shape[-1] - sum(sizes)], dim=-1))


def _pad(matrix: torch.Tensor, rows: int, columns: int, fill: int | torch.Tensor) -> torch.Tensor:
    """`matrix` grown to [rows, columns]. `fill` is a number, or one [n, 1] value per row (new rows then hold 0)."""
    n, k = matrix.shape
    if (n, k) == (rows, columns):
        return matrix
    if isinstance(fill, torch.Tensor):
        padded = matrix.new_zeros((rows, columns))
        padded[:n] = fill
    else:
        padded = matrix.new_full((rows, columns), fill)
    padded[:n, :k] = matrix
    return padded


def _fill(tiles: torch.Tensor, part: QuantWeight, kind: str, granules: int, dtype: torch.dtype) -> None:
    """Write the sections of the tiles [n_tiles, k_tiles, tile_bytes] of `part`, whose rows may end early."""
    n_tiles, k_tiles = tiles.shape[:2]
    rows, k, bits = n_tiles * TILE_N, k_tiles * TILE_K, part.scheme.bits
    codes, metadata, scales, zeros = _sections(tiles, kind, granules)
    filler: int | torch.Tensor = 0 if bits == 16 else part.scheme.zero_point
    if part.zeros is not None:
        filler = part.zeros[:, -1:].clamp(max=(1 << bits) - 1).to(torch.uint8)
    values = part.codes.to(dtype) if bits == 16 else part.codes
    values = _pad(values, rows, k // (2 if part.scheme.is_sparse else 1), filler)
    codes.copy_(_pack_codes(values, n_tiles, k_tiles, bits))
    if part.positions is not None:
        # Places 0 and 1 are a legal pattern; the instruction's behaviour on an illegal one is undefined.
        metadata.copy_(_pack_metadata(_pad(part.positions, rows, k // 4, 4), n_tiles, k_tiles))
    if granules and part.scales is not None:
        scales.copy_(_pack_scales(_per_granule(part, part.scales, rows, k, granules).to(dtype), n_tiles, k_tiles))
        if part.zeros is not None:
            zeros.copy_(_pack_scales(_per_granule(part, part.zeros, rows, k, granules).to(dtype), n_tiles, k_tiles))


def _per_granule(part: QuantWeight, table: torch.Tensor, rows: int, k: int, granules: int) -> torch.Tensor:
    """[rows, k / granule]: `table` [n, groups] spread over the granules of the padded matrix, 0 where it is padding."""
    starts = torch.arange(0, k, TILE_K // granules, device=table.device)
    starts = starts[starts < part.k]
    size = part.k if part.scheme.group_size is None else part.scheme.group_size
    spread = table.new_zeros((rows, k * granules // TILE_K))
    spread[: part.n, : len(starts)] = table[:, starts // size]
    return spread


# The maps. Letters of the views: N n tile, W warp, H row half (gq or gq + 8), Q gq, K k tile, S step or chunk,
# R column half of the fragment (2t or 2t + 8), T lane of the quad, E even or odd column.


def _pack_codes(values: torch.Tensor, n_tiles: int, k_tiles: int, bits: int) -> torch.Tensor:
    """uint8 [n_tiles, k_tiles, bytes] from codes (or 16-bit values) [64 n_tiles, columns]."""
    if bits == 4:
        v = values.view(n_tiles, 4, 2, 8, k_tiles, -1, 4, 2, 4, 2)  # N W H Q K chunk step R T E
        v = v[:, :, 0] | v[:, :, 1] << 4  # N W Q K chunk step R T E
        return v.permute(0, 3, 1, 4, 2, 7, 5, 8, 6).reshape(n_tiles, k_tiles, -1)
    if bits == 8:
        v = values.view(n_tiles, 4, 2, 8, k_tiles, -1, 2, 2, 4, 2)  # N W H Q K chunk step R T E
        return v.permute(0, 4, 1, 5, 3, 8, 6, 7, 9, 2).reshape(n_tiles, k_tiles, -1)
    v = values.view(n_tiles, TILE_N, k_tiles, -1, 2, 8)  # N row K step R TE
    return v.permute(0, 2, 3, 4, 1, 5).reshape(n_tiles, k_tiles, -1).view(torch.uint8)


def _unpack_codes(section: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `_pack_codes`: codes (or values of `dtype`) [64 n_tiles, columns]."""
    n_tiles, k_tiles = section.shape[:2]
    section = section.contiguous()
    rows = n_tiles * TILE_N
    if bits == 4:
        b = section.view(n_tiles, k_tiles, 4, -1, 8, 4, 4, 2, 2)  # N K W chunk Q T step E R
        v = torch.stack((b & 15, b >> 4), dim=0)  # H N K W chunk Q T step E R
        return v.permute(1, 3, 0, 5, 2, 4, 7, 9, 6, 8).reshape(rows, -1)
    if bits == 8:
        v = section.view(n_tiles, k_tiles, 4, -1, 8, 4, 2, 2, 2, 2)  # N K W chunk Q T step R E H
        return v.permute(0, 2, 9, 4, 1, 3, 6, 7, 5, 8).reshape(rows, -1)
    v = section.view(dtype).view(n_tiles, k_tiles, -1, 2, TILE_N, 8)  # N K step R row TE
    return v.permute(0, 4, 1, 2, 3, 5).reshape(rows, -1)


def _pack_metadata(positions: torch.Tensor, n_tiles: int, k_tiles: int) -> torch.Tensor:
    """uint8 [n_tiles, k_tiles, 1024] from positions [64 n_tiles, 32 k_tiles]."""
    v = positions.view(n_tiles, 4, 2, 8, k_tiles, 2, 2, 2, 2, 2)  # N W H Q K word t>>1 t&1 byte nibble
    v = v[..., 0] | v[..., 1] << 4  # N W H Q K word t>>1 t&1 byte
    return v.permute(0, 4, 1, 3, 6, 7, 5, 2, 8).reshape(n_tiles, k_tiles, -1)


def _unpack_metadata(section: torch.Tensor) -> torch.Tensor:
    """The inverse of `_pack_metadata`: positions [64 n_tiles, 32 k_tiles]."""
    n_tiles, k_tiles = section.shape[:2]
    b = section.contiguous().view(n_tiles, k_tiles, 4, 8, 2, 2, 2, 2, 2)  # N K W Q t>>1 t&1 word H byte
    v = torch.stack((b & 15, b >> 4), dim=-1)
    return v.permute(0, 2, 7, 3, 1, 6, 4, 5, 8, 9).reshape(n_tiles * TILE_N, -1)


def _pack_scales(table: torch.Tensor, n_tiles: int, k_tiles: int) -> torch.Tensor:
    """uint8 [n_tiles, k_tiles, 128 granules] from scales or zeros [64 n_tiles, granules * k_tiles] in 16 bits."""
    v = table.view(n_tiles, 4, 2, 8, k_tiles, -1)  # N W H Q K granule
    return v.permute(0, 4, 5, 1, 3, 2).reshape(n_tiles, k_tiles, -1).view(torch.uint8)


def _unpack_scales(section: torch.Tensor, granules: int, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `_pack_scales`: [64 n_tiles, granules * k_tiles]."""
    n_tiles, k_tiles = section.shape[:2]
    v = section.contiguous().view(dtype).view(n_tiles, k_tiles, granules, 4, 8, 2)  # N K granule W Q H
    return v.permute(0, 3, 5, 4, 1, 2).reshape(n_tiles * TILE_N, -1)


def from_stream(prepared: PreparedWeight) -> QuantWeight:
    """The neutral weight back from its tile stream, bit for bit; scales come in the dtype of the activations (or
    float32 for one per column). Raises UnsupportedError if there is no stream."""
    if prepared.stream is None:
        raise UnsupportedError(f"this weight runs as {prepared.path!r} and has no tile stream to read back")
    scheme, n, k = prepared.scheme, prepared.n, prepared.k
    tiles = prepared.stream.view(prepared.n_tiles, prepared.k_tiles, prepared.tile_bytes)
    codes, metadata, scales, zeros = _sections(tiles, prepared.kind, prepared.granules)
    columns = k // (2 if scheme.is_sparse else 1)
    size = k if scheme.group_size is None else scheme.group_size
    groups = scheme.groups(k)

    def per_group(section: torch.Tensor) -> torch.Tensor:
        table = _unpack_scales(section, prepared.granules, prepared.dtype)
        first_granules = torch.arange(groups, device=table.device) * size * prepared.granules // TILE_K
        return table[:n, first_granules].contiguous()

    scale_table = None
    if prepared.granules:
        scale_table = per_group(scales)
    elif prepared.column_scale is not None:
        scale_table = prepared.column_scale[:n, None].contiguous()
    return QuantWeight(
        scheme,
        _unpack_codes(codes, scheme.bits, prepared.dtype)[:n, :columns].contiguous(),
        scale_table,
        _unpack_metadata(metadata)[:n, : k // 4].contiguous() if scheme.is_sparse else None,
        per_group(zeros).to(torch.int16) if prepared.has_zeros else None,
    )
