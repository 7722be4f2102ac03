"""Codecs keep every value and every byte, leave their input alone, agree with their table, and say why they refuse."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spearfish import layouts, sparse24
from spearfish.errors import FormatError, ShapeError, SpearfishError, UnsupportedError
from spearfish.formats import FORMATS, Declared, transforms
from spearfish.reference import dequantize
from spearfish.scheme import QuantScheme, QuantWeight

INTEGER = ("marlin_24", "gptq", "gptq_v2", "marlin", "ct-marlin-24", "ct-pack-quantized")
SPARSE_ONLY = ("marlin_24", "ct-marlin-24")


def random_weight(
    n: int,
    k: int,
    bits: int = 4,
    group: int | None = 128,
    *,
    sparse: bool = True,
    symmetric: bool = True,
    act_order: bool = False,
    zeros_per_quad: int = 2,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> QuantWeight:
    """A random weight; `zeros_per_quad` more than 2 leaves quads with fewer than two non-zeros."""
    g = torch.Generator().manual_seed(seed)
    scheme = QuantScheme(bits, group, symmetric, "2:4" if sparse else "dense")
    groups = scheme.groups(k)
    scales = (torch.rand(n, groups, generator=g) + 0.01).to(dtype)
    zeros = None if symmetric else torch.randint(1, 1 << bits, (n, groups), generator=g, dtype=torch.int16)
    index = torch.randint(0, groups, (k,), generator=g, dtype=torch.int32) if act_order else None
    if not sparse:
        codes = torch.randint(0, 1 << bits, (n, k), generator=g, dtype=torch.uint8)
        return QuantWeight(scheme, codes, scales, zeros=zeros, group_index=index)
    positions = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8)[torch.randint(0, 6, (n, k // 4), generator=g)]
    codes = torch.randint(0, 1 << bits, (n, k // 2), generator=g, dtype=torch.uint8)
    weight = QuantWeight(scheme, codes, scales, positions, zeros, index)
    drop = torch.rand(n, k // 2, generator=g) < (zeros_per_quad - 2) / 2
    fill = transforms.to_dense(weight).codes.new_full((n, k // 2), scheme.zero_point) if symmetric else codes
    return replace(weight, codes=torch.where(drop, fill, codes))


def same_values(a: QuantWeight, b: QuantWeight) -> bool:
    return torch.equal(dequantize(a, torch.float64), dequantize(b, torch.float64))


sizes = st.tuples(st.integers(1, 3).map(lambda i: 64 * i), st.integers(1, 5).map(lambda i: 32 * i))


@given(
    form=st.sampled_from(INTEGER),
    size=sizes,
    bits=st.sampled_from((4, 8)),
    group=st.sampled_from((None, 16, 32, 48, 128)),
    sparse=st.booleans(),
    symmetric=st.booleans(),
    act_order=st.booleans(),
    zeros_per_quad=st.integers(2, 4),
    dtype=st.sampled_from((torch.float16, torch.bfloat16)),
    seed=st.integers(0, 10**6),
)
def test_round_trip(
    form: str,
    size: tuple[int, int],
    bits: int,
    group: int | None,
    sparse: bool,
    symmetric: bool,
    act_order: bool,
    zeros_per_quad: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    codec = FORMATS[form]
    weight = random_weight(
        *size,
        bits,
        group,
        sparse=sparse or form in SPARSE_ONLY,
        symmetric=symmetric,
        act_order=act_order,
        zeros_per_quad=zeros_per_quad,
        dtype=dtype,
        seed=seed,
    )
    before = {name: tensor.clone() for name, tensor in weight.tensors().items()}
    reasons = codec.refusals(weight)
    if form in ("gptq", "gptq_v2", "ct-pack-quantized"):
        assert not reasons
    else:
        assert bool(reasons) == (not symmetric or act_order)
    if reasons:
        with pytest.raises(UnsupportedError, match="layer7"):
            codec.encode(weight, "layer7")
        return
    tensors = codec.encode(weight)
    table = {spec.name: spec for spec in codec.tensors(*size, weight.scheme)}
    for name, tensor in tensors.items():
        assert tuple(tensor.shape) == table[name].shape, name
        assert tensor.dtype in table[name].dtypes, name
        assert tensor.is_contiguous(), name
    declared = Declared(bits, group or -1, symmetric, act_order, ours=True)
    stored = {name: tensor.clone() for name, tensor in tensors.items()}
    decoded = codec.decode(tensors, declared)
    assert same_values(decoded, weight)
    again = codec.encode(decoded)
    for name, tensor in stored.items():
        assert torch.equal(tensors[name], tensor), f"decode changed {name}"
        assert torch.equal(again[name], tensor), f"{name} came out otherwise"
    for name, tensor in weight.tensors().items():
        assert torch.equal(tensor, before[name]), f"encode changed {name}"


@pytest.mark.parametrize("form", SPARSE_ONLY)
def test_every_quad_of_four_bits(form: str) -> None:
    """All 1411 quads of 4-bit codes with at most two non-zeros: values kept, slots by the packers' rule."""
    quads = [q for q in itertools.product(range(16), repeat=4) if sum(code != 8 for code in q) <= 2]
    assert len(quads) == 1411
    quads += [(8, 8, 8, 8)] * (1536 - len(quads))
    dense = torch.tensor(quads, dtype=torch.uint8).reshape(64, 96)
    scales = torch.rand(64, 1, generator=torch.manual_seed(0)).half() + 0.5
    weight = transforms.find_24(QuantWeight(QuantScheme(4, None, sparsity="dense"), dense, scales))
    assert weight.scheme.is_sparse
    decoded = FORMATS[form].decode(FORMATS[form].encode(weight))
    assert torch.equal(transforms.to_dense(decoded).codes, dense)
    for quad, nibble in zip(quads, decoded.positions.flatten().tolist(), strict=True):
        taken = [i for i, code in enumerate(quad) if code != 8]
        if len(taken) == 2:
            slots = (taken[0], taken[1])
        else:
            slots = {(): (2, 3), (0,): (0, 2), (1,): (1, 2), (2,): (2, 3), (3,): (2, 3)}[tuple(taken)]
        assert (nibble & 3, nibble >> 2) == slots, quad


def test_other_legal_slots_are_read_and_written_canonically() -> None:
    """A decoder takes any i0 < i1; filler slots elsewhere change bytes, never values."""
    weight = random_weight(64, 64, zeros_per_quad=3, seed=5)
    odd = {
        "B_24": layouts.pack_marlin_24_codes(weight.codes, 4),
        "B_meta": layouts.pack_marlin_24_meta(weight.positions),
        "s": weight.scales.T.contiguous(),
    }
    decoded = FORMATS["marlin_24"].decode(odd)
    assert torch.equal(decoded.positions, weight.positions)
    canonical = FORMATS["marlin_24"].encode(decoded)
    assert not torch.equal(canonical["B_meta"], odd["B_meta"])
    assert same_values(FORMATS["marlin_24"].decode(canonical), weight)


@pytest.mark.parametrize("form", INTEGER)
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_by_the_table_unpack_alone(form: str, ranks: int) -> None:
    """A slice of the packed tensors, cut as the table says, is the packed slice of the weight; along n and along k."""
    n, k, codec = 256, 512, FORMATS[form]
    weight = random_weight(n, k, 4, 32, sparse=form != "marlin")
    tensors = codec.encode(weight)
    table = codec.tensors(n, k, weight.scheme)
    dense = dequantize(weight, torch.float64)
    for rank in range(ranks):
        for along in ("n", "k"):
            part = {}
            for spec in table:
                dim = spec.n_dim if along == "n" else spec.k_dim
                if spec.name not in tensors:
                    continue
                part[spec.name] = tensors[spec.name]
                if dim is not None:
                    step = spec.shape[dim] // ranks
                    part[spec.name] = part[spec.name].narrow(dim, rank * step, step)
            rows, columns = (n // ranks, k) if along == "n" else (n, k // ranks)
            if "weight_shape" in part:
                part["weight_shape"] = torch.tensor([rows, columns])
            if "g_idx" in part and along == "k":
                part["g_idx"] = part["g_idx"] - part["g_idx"][0]
            found = dequantize(codec.decode(part, Declared(4, 32, ours=True, k=k)), torch.float64)
            wanted = dense[rank * rows : (rank + 1) * rows] if along == "n" else dense[:, rank * columns :][:, :columns]
            assert torch.equal(found, wanted), (along, rank)


def test_one_group_of_a_sharded_row_keeps_the_grouped_order() -> None:
    """k / ranks equal to the group leaves one row of scales, still permuted: the whole layer's k decides."""
    weight = random_weight(64, 256, 4, 128)
    tensors = FORMATS["marlin_24"].encode(weight)
    shard = {"B_24": tensors["B_24"][:4], "B_meta": tensors["B_meta"][:4], "s": tensors["s"][:1]}
    right = FORMATS["marlin_24"].decode(shard, Declared(4, 128, k=256))
    assert torch.equal(right.scales, weight.scales[:, :1])
    assert not torch.equal(FORMATS["marlin_24"].decode(shard, Declared(4, 128)).scales, weight.scales[:, :1])


@given(
    bits=st.sampled_from((2, 3)),
    symmetric=st.booleans(),
    form=st.sampled_from(("gptq", "gptq_v2", "ct-pack-quantized")),
    seed=st.integers(0, 999),
)
def test_narrow_codes_are_widened_without_loss(bits: int, symmetric: bool, form: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    n, k, zero = 32, 64, 1 << (bits - 1)
    codes = torch.randint(0, 1 << bits, (n, k), generator=g, dtype=torch.uint8)
    zeros = torch.randint(1, 1 << bits, (n, 2), generator=g, dtype=torch.uint8)
    zeros = torch.full_like(zeros, zero) if symmetric else zeros
    scales = torch.rand(n, 2, generator=g).half()
    truth = (codes.reshape(n, 2, 32).double() - zeros.double().unsqueeze(-1)) * scales.double().unsqueeze(-1)
    if form == "ct-pack-quantized":
        tensors = {
            "weight_packed": layouts.pack_fields(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([n, k]),
            "weight_zero_point": layouts.pack_fields(zeros.T.contiguous(), bits).T.contiguous(),
        }
    else:
        tensors = {
            "qweight": layouts.pack_fields(codes, bits).T.contiguous(),
            "qzeros": layouts.pack_fields(zeros.T.contiguous() - int(form == "gptq"), bits),
            "scales": scales.T.contiguous(),
            "g_idx": (torch.arange(k) // 32).int(),
        }
    weight = FORMATS[form].decode(tensors, Declared(bits, 32))
    assert weight.scheme.bits == 4
    assert torch.equal(dequantize(weight, torch.float64), truth.flatten(1))


def test_zero_points_at_the_ends() -> None:
    """A zero point of 0 has no field in v1, one of 16 none in v2; each is refused there and kept by the other."""
    weight = random_weight(32, 32, 4, None, sparse=False, symmetric=False)
    for end, refusing, holding in ((0, "gptq", "gptq_v2"), (16, "gptq_v2", "gptq")):
        zeros = weight.zeros.clone()
        zeros[3] = end
        at_end = replace(weight, zeros=zeros)
        with pytest.raises(UnsupportedError, match=f"zero point of {end}.*{holding}"):
            FORMATS[refusing].encode(at_end)
        assert same_values(FORMATS[holding].decode(FORMATS[holding].encode(at_end)), at_end)


def test_act_order_and_24_meet_in_gptq_but_not_in_marlin_24() -> None:
    weight = random_weight(64, 128, 4, 32, act_order=True)
    tensors = FORMATS["gptq"].encode(weight)
    found = transforms.find_24(FORMATS["gptq"].decode(tensors, Declared(act_order=True)))
    assert found.scheme.is_sparse
    assert found.group_index is not None
    assert same_values(found, weight)
    with pytest.raises(UnsupportedError, match="act-order group index.*gptq.*hold it"):
        FORMATS["marlin_24"].encode(found)


def test_refusals_name_every_reason_and_the_way_out() -> None:
    weight = random_weight(60, 36, 4, 12, symmetric=False, act_order=True)
    with pytest.raises(UnsupportedError) as caught:
        FORMATS["marlin_24"].encode(weight, "model.layers.3.mlp.up_proj")
    text = str(caught.value)
    for part in ("model.layers.3.mlp.up_proj", "zero points", "act-order", "k = 36", "n = 60", "--pad"):
        assert part in text


@given(
    n=st.integers(1, 70),
    k=st.integers(1, 20).map(lambda i: 4 * i),
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
    density=st.sampled_from((0.2, 0.6, 1.0)),
    form=st.sampled_from(("dense", "ct-sparse-24-bitmask")),
    seed=st.integers(0, 999),
)
def test_float_values_round_trip(n: int, k: int, dtype: torch.dtype, density: float, form: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    dense = torch.randn(n, k, generator=g)
    keep = sparse24.magnitude_mask(dense.abs()) & (torch.rand(n, k, generator=g) < density)
    dense = torch.where(keep, dense, -0.0 * torch.ones(1)).to(dtype)
    weight = transforms.sparse_values(dense)
    tensors = FORMATS[form].encode(weight)
    decoded = FORMATS[form].decode(tensors)
    assert torch.equal(dequantize(decoded, dtype), dense)
    again = FORMATS[form].encode(decoded)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_other_float_dtypes_are_read_exactly(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.5, -0.0, -1.75, 0.0], [0.0, 0.0, -0.0, 0.25]]).to(dtype)
    weight = FORMATS["dense"].decode({"weight": values})
    assert torch.equal(dequantize(weight, torch.float64), values.double())


def test_int8_with_a_scale_becomes_an_8_bit_weight() -> None:
    values = torch.tensor([[-128, 127, 3, -1]], dtype=torch.int8)
    tensors = {
        "shape": torch.tensor([[1], [8]]),
        "compressed": values,
        "bitmask": torch.tensor([[0b1010_0101]], dtype=torch.uint8),
        "weight_scale": torch.tensor([[0.5]], dtype=torch.bfloat16),
    }
    weight = FORMATS["ct-sparse-24-bitmask"].decode(tensors)
    assert weight.scheme == QuantScheme(8)
    assert dequantize(weight).tolist() == [[-64, 0, 63.5, 0, 0, 1.5, 0, -0.5]]
    fp8 = {**tensors, "compressed": values.to(torch.float8_e4m3fn)}
    weight = FORMATS["ct-sparse-24-bitmask"].decode(fp8)
    assert weight.codes.dtype == torch.bfloat16
    assert dequantize(weight)[0, 0] == -64


def test_one_scale_for_a_whole_tensor() -> None:
    weight = random_weight(8, 32, 8, None)
    tensors = {**FORMATS["ct-pack-quantized"].encode(weight), "weight_scale": torch.tensor([0.25]).half()}
    found = FORMATS["ct-pack-quantized"].decode(tensors, Declared(8, -1))
    assert torch.equal(found.scales, torch.full((8, 1), 0.25).half())


def test_scales_outside_half_range_are_refused_unless_unused() -> None:
    weight = random_weight(64, 64, 4, None, dtype=torch.bfloat16)
    scales = weight.scales.clone()
    scales[5] = 1e6
    scales[6] = 1e-12
    with pytest.raises(UnsupportedError, match=r"scale \[5, 0\].*float16's range \(2 such"):
        FORMATS["marlin_24"].encode(replace(weight, scales=scales))
    codes = weight.codes.clone()
    codes[5:7] = 8
    unused = replace(weight, scales=scales, codes=codes)
    assert same_values(FORMATS["marlin_24"].decode(FORMATS["marlin_24"].encode(unused)), unused)


@given(n=st.integers(1, 70), k=st.integers(1, 20).map(lambda i: 4 * i), group=st.sampled_from((None, 16, 20, 64)))
def test_pad_and_crop(n: int, k: int, group: int | None) -> None:
    weight = random_weight(n, k, 4, group)
    padded = transforms.pad(weight, 64, 32)
    assert (padded.n % 64, padded.k % 32) == (0, 0)
    cropped = transforms.crop(padded, n, k)
    assert same_values(cropped, weight)
    assert torch.equal(cropped.scales, weight.scales)
    assert torch.equal(dequantize(padded)[:n, :k], dequantize(weight))
    if padded.n > n:
        codes = padded.codes.clone()
        codes[n] = 3
        with pytest.raises(FormatError, match="padding"):
            transforms.crop(replace(padded, codes=codes), n, k)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [None, 32, 40, 18])
def test_round_to_nearest_rounds_to_nearest(bits: int, group: int | None) -> None:
    dense = torch.randn(8, 96, generator=torch.manual_seed(0))
    dense *= sparse24.magnitude_mask(dense.abs())
    dense[2] = 0
    weight = transforms.round_to_nearest(transforms.sparse_values(dense), bits, group)
    weight.check()
    found, size = dequantize(weight), group or 96
    assert not found[dense == 0].any()
    for row in range(8):
        for k in range(96):
            scale = float(weight.scales[row, k // size])
            # No representable value is nearer; half a step is the most that rounding may cost inside the range.
            assert abs(float(found[row, k]) - float(dense[row, k])) <= scale * 0.5001 + 1e-3 * abs(float(dense[row, k]))


def test_reproject_keeps_the_two_largest() -> None:
    codes = torch.tensor([[1, 15, 8, 9], [8, 8, 3, 8]], dtype=torch.uint8)
    weight = QuantWeight(QuantScheme(4, None, sparsity="dense"), codes, torch.ones(2, 1))
    assert transforms.find_24(weight) is weight
    assert dequantize(transforms.reproject(weight)).tolist() == [[-7, 7, 0, 0], [0, 0, -5, 0]]


def test_three_in_four_names_row_and_column_and_counts() -> None:
    dense = torch.zeros(5, 16)
    dense[3, 9:12] = 1
    dense[4] = 1
    with pytest.raises(FormatError, match=r"mlp\.up: not 2:4: row 3, columns 8\.\.11 hold 3 .*5 of 20.*reproject"):
        FORMATS["dense"].decode({"weight": dense}, None, "mlp.up")


def broken(form: str) -> list[tuple[str, dict[str, torch.Tensor], Declared, str]]:
    """(what was done, tensors, config, text of the error) for one format."""
    codec = FORMATS[form]
    weight = random_weight(64, 64, 4, 32, sparse=form != "marlin")
    tensors = codec.encode(weight)
    scales = next(name for name in ("s", "scales", "scale_packed", "weight_scale") if name in tensors)
    codes = next(name for name in ("B_24", "B", "qweight", "weight_packed") if name in tensors)
    said = Declared(4, 32, ours=True)

    def with_scale(value: float) -> dict[str, torch.Tensor]:
        bad = tensors[scales].clone()
        bad[1, 1] = value
        return {**tensors, scales: bad}

    return [
        ("missing", {k: v for k, v in tensors.items() if k != scales}, said, scales),
        ("extra", {**tensors, "surplus": torch.zeros(1)}, said, "unexpected surplus"),
        ("dtype", {**tensors, codes: tensors[codes].to(torch.int64)}, said, f"{codes} is int64"),
        ("dims", {**tensors, codes: tensors[codes].flatten()}, said, codes),
        ("empty", {**tensors, codes: tensors[codes][:0]}, said, codes),
        ("shape", {**tensors, codes: tensors[codes][:, :-1].contiguous()}, said, "layer3"),
        ("bits", tensors, Declared(8, 32), "8"),
        ("group", tensors, Declared(4, 16), "group_size 16"),
        ("column", tensors, Declared(4, -1), "group_size -1"),
        ("nan", with_scale(float("nan")), said, "finite scales"),
        ("inf", with_scale(float("inf")), said, "finite scales"),
        ("negative", with_scale(-1.0), said, "finite scales >= 0"),
    ]


BROKEN = [(form, *case) for form in INTEGER for case in broken(form)]


@pytest.mark.parametrize(
    ("form", "what", "tensors", "declared", "text"), BROKEN, ids=[f"{b[0]}-{b[1]}" for b in BROKEN]
)
def test_bad_tensors(form: str, what: str, tensors: dict[str, torch.Tensor], declared: Declared, text: str) -> None:
    with pytest.raises(SpearfishError) as caught:
        FORMATS[form].decode(tensors, declared, "layer3")
    assert "layer3" in str(caught.value)
    assert text in str(caught.value)


def test_positions_out_of_order() -> None:
    tensors = FORMATS["marlin_24"].encode(random_weight(64, 64))
    nibbles = layouts.unpack_marlin_24_meta(tensors["B_meta"])
    nibbles[7, 3] = 0b0110  # i0 = 2, i1 = 1
    nibbles[9, 0] = 0b0101  # i0 = i1 = 1
    with pytest.raises(ShapeError, match=r"q_proj: positions\[7, 3\] is 6, .*i0 < i1.* \(2 bad"):
        FORMATS["marlin_24"].decode({**tensors, "B_meta": layouts.pack_marlin_24_meta(nibbles)}, None, "q_proj")


def test_sym_in_the_config_but_not_in_the_zero_points() -> None:
    """A v2 file that says v1 is the common case: zero points come out one too high."""
    tensors = FORMATS["gptq_v2"].encode(random_weight(64, 64))
    with pytest.raises(FormatError, match="checkpoint_format"):
        FORMATS["gptq"].decode(tensors, Declared(4, 128, symmetric=True))


def test_bitmask_faults() -> None:
    codec = FORMATS["ct-sparse-24-bitmask"]
    tensors = codec.encode(transforms.sparse_values(torch.tensor([[1.0, 0, 2, 0, 0, 3, 4, 0]])))
    three = {**tensors, "bitmask": torch.tensor([[0b0110_0111]], dtype=torch.uint8)}
    with pytest.raises(FormatError, match=r"fc: bitmask: row 0, columns 0\.\.3 keep 3"):
        codec.decode(three, None, "fc")
    huge = {**tensors, "shape": torch.tensor([[1 << 30], [1 << 30]])}
    with pytest.raises(ShapeError, match="fc: compressed"):
        codec.decode(huge, None, "fc")
    nan = {**tensors, "compressed": tensors["compressed"] * float("nan")}
    with pytest.raises(ShapeError, match="finite"):
        codec.decode(nan, None, "fc")
    loose = FORMATS["ct-sparse-bitmask"]
    rows = {
        "shape": torch.tensor([1, 8]),
        "compressed": torch.ones(3),
        "bitmask": torch.tensor([[0b0110_0101]], dtype=torch.uint8),
        "row_offsets": torch.tensor([0]),
    }
    with pytest.raises(FormatError, match="keeps 4 values, compressed holds 3"):
        loose.decode(rows, None, "fc")
