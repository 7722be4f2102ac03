"""The tile stream: against a slow walk by the drawing in prepare.py, and its inverse."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spearfish import reference, sparse24
from spearfish.errors import ShapeError, UnsupportedError
from spearfish.kernels.prepare import (
    TILE_N,
    code_bytes,
    from_stream,
    metadata_bytes,
    tile_bytes,
    to_stream,
    why_no_stream,
)
from spearfish.scheme import QuantScheme, QuantWeight

SCHEMES = [
    QuantScheme(bits, group, symmetric, sparsity)
    for bits in (4, 8)
    for group in (None, 32, 96, 128)
    for symmetric in (True, False)
    for sparsity in ("2:4", "dense")
] + [QuantScheme(16)]


def random_weight(
    scheme: QuantScheme, n: int, k: int, seed: int = 0, dtype: torch.dtype = torch.float16
) -> QuantWeight:
    make = torch.Generator().manual_seed(seed)
    columns = k // 2 if scheme.is_sparse else k
    positions = None
    if scheme.is_sparse:
        legal = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8)
        positions = legal[torch.randint(6, (n, k // 4), generator=make)]
    if scheme.bits == 16:
        return QuantWeight(scheme, torch.randn(n, columns, generator=make).to(dtype), positions=positions)
    zeros = None
    if not scheme.symmetric:
        zeros = torch.randint((1 << scheme.bits) + 1, (n, scheme.groups(k)), generator=make).to(torch.int16)
    return QuantWeight(
        scheme,
        torch.randint(1 << scheme.bits, (n, columns), generator=make, dtype=torch.uint8),
        (0.5 + torch.rand(n, scheme.groups(k), generator=make)).to(dtype) / 100,
        positions,
        zeros,
    )


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(64, 128), (8, 36), (130, 516)])
def test_the_inverse_gives_the_weight_back(scheme: QuantScheme, n: int, k: int) -> None:
    weight = random_weight(scheme, n, k)
    prepared = to_stream(weight, "cpu", torch.float16)
    assert prepared.stream is not None
    assert prepared.stream.numel() == prepared.n_tiles * prepared.k_tiles * prepared.tile_bytes
    back = from_stream(prepared)
    assert back.tensors().keys() == weight.tensors().keys()
    for name, tensor in weight.tensors().items():
        assert torch.equal(back.tensors()[name].to(tensor.dtype), tensor), name


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.group_size in (None, 32)], ids=str)
def test_every_fragment_is_where_the_drawing_says(scheme: QuantScheme) -> None:
    """Read the stream as a lane of the kernel does, one value at a time, and compare with the weight."""
    n, k = 72, 260
    weight = random_weight(scheme, n, k, seed=1)
    prepared = to_stream(weight, "cpu", torch.float16)
    assert prepared.stream is not None
    kind, sparse = prepared.kind, scheme.is_sparse
    tiles = prepared.stream.view(prepared.n_tiles, prepared.k_tiles, prepared.tile_bytes)
    columns = 64 if sparse else 128
    choose = torch.Generator().manual_seed(2)
    for _ in range(300):
        row = int(torch.randint(n, (1,), generator=choose))
        column = int(torch.randint(weight.codes.shape[1], (1,), generator=choose))
        tile = tiles[row // 64, column // columns]
        warp, half, gq = row % 64 // 16, row % 16 // 8, row % 8
        step, in_step = column % columns // 16, column % 16
        right, t, odd = in_step // 8, in_step % 8 // 2, in_step % 2
        lane, register = 4 * gq + t, 2 * right + half
        if scheme.bits == 4:
            chunk = tile[: code_bytes(kind)].view(torch.int32).view(4, -1, 32, 4)
            word = int(chunk[warp, step // 4, lane, step % 4]) & 0xFFFFFFFF
            assert word >> (4 * register + 16 * odd) & 15 == int(weight.codes[row, column])
        elif scheme.bits == 8:
            chunk = tile[: code_bytes(kind)].view(4, -1, 32, 2, 2, 4)
            assert chunk[warp, step // 2, lane, step % 2, right, half + 2 * odd] == weight.codes[row, column]
        else:
            # As `ldmatrix` reads it: lane l names row l % 8 of matrix l / 8, and lane 4 gq + t gets columns 2t, 2t + 1
            # of row gq of every matrix.
            values = tile[: code_bytes(kind)].view(torch.float16)
            named = [256 * warp + other % 16 * 16 + other // 16 * 1024 + step * 2048 for other in range(32)]
            assert values[named[8 * register + gq] // 2 + 2 * t + odd] == weight.codes[row, column]
            # As a matrix descriptor of wgmma says it: 8 x 8 matrices 1024 bytes apart along k and 128 along the rows.
            at = step * 2048 + in_step // 8 * 1024 + row % 64 // 8 * 128 + row % 8 * 16 + in_step % 8 * 2
            assert values[at // 2] == weight.codes[row, column]
        dense_k = column
        if weight.positions is not None:
            quad = column // 2
            meta = tile[code_bytes(kind) :][: metadata_bytes(kind)].view(torch.int32).view(4, 8, 4, 2)
            quad_in_step = quad % 8
            lane_t = 2 * (step % 2) + quad_in_step // 4
            word = int(meta[warp, gq, lane_t, step // 2]) & 0xFFFFFFFF
            nibble = word >> (16 * half + 4 * (quad_in_step % 4)) & 15
            assert nibble == int(weight.positions[row, quad])
            dense_k = 4 * quad + (nibble >> 2 if column % 2 else nibble & 3)
        if prepared.granules and weight.scales is not None:
            scales = tile[code_bytes(kind) + metadata_bytes(kind) :][: prepared.granules * 2 * TILE_N]
            granule = dense_k % 128 * prepared.granules // 128
            group = int(weight.group_of_k()[dense_k])
            assert scales.view(torch.float16).view(-1, 4, 8, 2)[granule, warp, gq, half] == weight.scales[row, group]


def test_padding_adds_exactly_nothing() -> None:
    """Expanding the padded stream as the kernel sees it gives zeros in every padded place."""
    for scheme in SCHEMES:
        if not scheme.symmetric:
            continue  # an asymmetric tail relies on x being filled with zeros as well
        weight = random_weight(scheme, 40, 196, seed=3)
        small = to_stream(weight, "cpu", torch.float16)
        grown = replace(small, n=64, k=256)
        if scheme.group_size not in (None, 128):
            continue  # the short last group would be cut differently in the grown weight
        dense = reference.dequantize(from_stream(grown), torch.float64)
        assert torch.equal(dense[:40, :196], reference.dequantize(weight, torch.float64))
        assert dense[40:].abs().max() == 0
        assert dense[:, 196:].abs().max() == 0


def test_sizes_are_those_of_the_contract() -> None:
    assert tile_bytes("int4_24", 1, False) == 3200
    assert tile_bytes("int4_24", 0, False) == 3072
    assert tile_bytes("int8_24", 1, False) == 5248
    assert tile_bytes("f16_24", 0, False) == 9216
    assert tile_bytes("int4", 4, True) == 4096 + 1024
    weight = random_weight(QuantScheme(4, 128), 4096, 4096)
    assert to_stream(weight, "cpu", torch.float16).nbytes == 64 * 32 * 3200 < 6.8e6


@pytest.mark.parametrize(
    ("weight", "dtype", "words"),
    [
        (random_weight(QuantScheme(4, 48), 8, 96), torch.float16, "multiple of 32"),
        (random_weight(QuantScheme(4, 32), 8, 96), torch.float32, "float16 and bfloat16"),
        (random_weight(QuantScheme(16), 0, 96), torch.float16, "empty"),
    ],
)
def test_refusals_name_the_reason(weight: QuantWeight, dtype: torch.dtype, words: str) -> None:
    assert words in (why_no_stream(weight, dtype) or "")
    with pytest.raises(UnsupportedError, match=words):
        to_stream(weight, "cpu", dtype)


def test_scales_that_float16_cannot_hold_are_refused() -> None:
    weight = random_weight(QuantScheme(4, 32), 8, 96)
    huge = QuantWeight(weight.scheme, weight.codes, torch.full((8, 3), 1e5, dtype=torch.bfloat16), weight.positions)
    assert "range" in (why_no_stream(huge, torch.float16) or "")
    assert why_no_stream(huge, torch.bfloat16) is None


def test_patterns_that_the_instruction_does_not_know_never_reach_it() -> None:
    weight = random_weight(QuantScheme(4, 32), 70, 96)
    assert weight.positions is not None
    positions = weight.positions.clone()
    positions[66, 5] = 0b0110  # place 2 before place 1
    with pytest.raises(ShapeError, match=r"positions\[66, 5\] is 6"):
        to_stream(replace(weight, positions=positions), "cpu", torch.float16)


def test_act_order_is_refused_and_a_plain_index_is_not() -> None:
    weight = random_weight(QuantScheme(4, 32, sparsity="dense"), 8, 96)
    plain = weight.group_of_k().to(torch.int32)
    for index, fits in ((plain, True), (plain.flip(0), False)):
        indexed = QuantWeight(weight.scheme, weight.codes, weight.scales, group_index=index)
        assert (why_no_stream(indexed, torch.float16) is None) == fits


@settings(max_examples=25, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([None, 32, 64, 160, 256]),
    symmetric=st.booleans(),
    sparsity=st.sampled_from(["2:4", "dense"]),
    n=st.integers(1, 200),
    quads=st.integers(1, 100),
    seed=st.integers(0, 1 << 20),
)
def test_any_shape_comes_back(
    bits: int, group: int | None, symmetric: bool, sparsity: str, n: int, quads: int, seed: int
) -> None:
    weight = random_weight(QuantScheme(bits, group, symmetric, sparsity), n, 4 * quads, seed)  # type: ignore[arg-type]
    back = from_stream(to_stream(weight, "cpu", torch.float16))
    assert torch.equal(reference.dequantize(back, torch.float64), reference.dequantize(weight, torch.float64))
