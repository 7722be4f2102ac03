"""Shards of packed files against shards of the decoded weight, for every format and 1, 2, 4 and 8 ranks."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from golden_files import golden_files
from spearfish import sparse24
from spearfish.errors import ShapeError, UnsupportedError
from spearfish.formats import FORMATS, Declared, transforms
from spearfish.quantization.shard import Stored, Window, crop, cut, decode, why_not
from spearfish.reference import dequantize
from spearfish.scheme import QuantScheme, QuantWeight
from tiny import round_to_nearest

RANKS = (1, 2, 4, 8)


def values(n: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n + k)
    return torch.randn(n, k, generator=generator)


def quantised(n: int, k: int, bits: int, group: int | None, sparse: bool = True) -> QuantWeight:
    return round_to_nearest(values(n, k), bits, group, sparse)


def asymmetric(n: int, k: int, bits: int, group: int | None) -> QuantWeight:
    weight = quantised(n, k, bits, group, sparse=False)
    generator = torch.Generator().manual_seed(1)
    assert weight.scales is not None
    zeros = torch.randint(1, 1 << bits, weight.scales.shape, generator=generator, dtype=torch.int16)
    return QuantWeight(QuantScheme(bits, group, False, "dense"), weight.codes, weight.scales, zeros=zeros)


def half(n: int, k: int) -> QuantWeight:
    dense = values(n, k).half()
    return transforms.sparse_values(dense * sparse24.magnitude_mask(dense.abs()))


# Format, weight, whether the file says that it is ours. k / 8 is one group of 128 in the first ones: the scales of a
# shard then look like one scale per column, but stand in the order of many.
CASES = {
    "marlin_24 int4": ("marlin_24", quantised(512, 1024, 4, 128), False),
    "marlin_24 int8": ("marlin_24", quantised(512, 1024, 8, 128), False),
    "marlin_24 per column": ("marlin_24", quantised(256, 256, 4, None), False),
    "marlin_24 cut groups and tiles": ("marlin_24", quantised(192, 1184, 4, 128), False),
    "marlin int4": ("marlin", quantised(512, 1024, 4, 128, sparse=False), False),
    "marlin per column": ("marlin", quantised(192, 160, 4, None, sparse=False), False),
    "gptq": ("gptq", quantised(512, 1024, 4, 128), False),
    "gptq asymmetric": ("gptq", asymmetric(96, 1184, 8, 32), False),
    "gptq_v2": ("gptq_v2", asymmetric(160, 384, 4, 128), False),
    "ct-marlin-24": ("ct-marlin-24", quantised(256, 1024, 4, 128), False),
    "ct-marlin-24, two groups, other writers": ("ct-marlin-24", quantised(128, 256, 4, 128), False),
    "ct-marlin-24, two groups, ours": ("ct-marlin-24", quantised(128, 256, 4, 128), True),
    "ct-pack-quantized": ("ct-pack-quantized", quantised(200, 1024, 4, 128, sparse=False), False),
    "ct-pack-quantized asymmetric": ("ct-pack-quantized", asymmetric(200, 384, 4, 64), False),
    "ct-pack-quantized ragged": ("ct-pack-quantized", quantised(72, 1000, 4, 128), False),
    "ct-pack-quantized int8 per row": ("ct-pack-quantized", quantised(24, 40, 8, None), False),
    "ct-sparse-24-bitmask": ("ct-sparse-24-bitmask", half(200, 1056), False),
    "dense": ("dense", half(72, 96), False),
}


def stored_of(form: str, weight: QuantWeight, ours: bool) -> tuple[Stored, dict[str, torch.Tensor]]:
    """The file's tensors, and what the headers and the config say of them."""
    tensors = FORMATS[form].encode(weight)
    scheme = weight.scheme
    declared = Declared(group_size=scheme.group_size or -1, bits=scheme.bits if scheme.bits < 16 else None, ours=ours)
    about = FORMATS[form].describe(tensors, declared)
    if form == "ct-marlin-24" and not ours and about.k == 2 * (scheme.group_size or 0):
        # The writers' fault: natural order.
        assert weight.scales is not None
        tensors = {**tensors, "scale_packed": weight.scales.T.contiguous()}
    return Stored("layer", FORMATS[form], about.n, about.k, about.scheme, about.bits, declared), tensors


def windows(n: int, k: int, ranks: int) -> list[Window]:
    """One window per rank, for column-parallel and for row-parallel layers."""
    found = []
    if n % ranks == 0:
        step = n // ranks
        found += [Window(r * step, (r + 1) * step, 0, k) for r in range(ranks)]
    if k % ranks == 0:
        step = k // ranks
        found += [Window(0, n, r * step, (r + 1) * step) for r in range(ranks)]
    return found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES)
def test_a_shard_of_the_file_is_the_shard_of_the_weight(case: str, ranks: int) -> None:
    form, weight, ours = CASES[case]
    stored, tensors = stored_of(form, weight, ours)
    whole = dequantize(weight)
    as_stored = weight if stored.scheme.is_sparse else transforms.to_dense(weight)
    seen = 0
    for window in windows(weight.n, weight.k, ranks):
        reason = why_not(stored, window)
        if reason:
            assert stored.scheme.is_sparse and (window.k_start % 4 or window.k_stop % 4), reason
            with pytest.raises(UnsupportedError, match="quad"):
                decode(stored, window, tensors)
            continue
        pieces = {local: cut(stored, window, local, tensor) for local, tensor in tensors.items()}
        shard = decode(stored, window, pieces)
        wanted = whole[window.n_start : window.n_stop, window.k_start : window.k_stop]
        assert torch.equal(dequantize(shard), wanted)
        # Whatever the shard was cut from, it is a weight like any other: the reference of the shard itself.
        assert torch.equal(dequantize(crop(as_stored, window)), wanted)
        seen += 1
    assert seen


def shard_then_pack_cases() -> list[tuple[str, int]]:
    return [(case, ranks) for case in CASES if "cut" not in case and "ragged" not in case for ranks in RANKS]


@pytest.mark.parametrize(("case", "ranks"), shard_then_pack_cases())
def test_a_shard_of_the_file_has_the_bytes_of_the_packed_shard(case: str, ranks: int) -> None:
    """Shard, then pack, gives the same words as pack, then shard, wherever the file can be cut there at all."""
    form, weight, ours = CASES[case]
    stored, tensors = stored_of(form, weight, ours)
    size = weight.scheme.group_size or 1
    for window in windows(weight.n, weight.k, ranks):
        borders_n = (window.n_start % 64, window.n_stop % 64) == (0, 0) or window.n_stop - window.n_start == weight.n
        borders_k = all(place % max(size, 32) == 0 or place == weight.k for place in (window.k_start, window.k_stop))
        if not (borders_n and borders_k):
            continue
        packed = FORMATS[form].encode(crop(weight, window))
        for local, tensor in tensors.items():
            piece = cut(stored, window, local, tensor)
            if local in ("weight_shape", "shape") or (local == "g_idx" and window.k_start):
                continue  # sizes and group numbers count from the shard's own beginning
            if piece.dtype == torch.float16 and local in ("s", "scale_packed"):
                continue  # their order depends on the whole; the test above compares what they mean
            assert torch.equal(piece, packed[local]), local


def test_a_shard_of_one_group_is_not_read_as_one_scale_per_column() -> None:
    form, weight, ours = CASES["marlin_24 int4"]
    stored, tensors = stored_of(form, weight, ours)
    window = Window(0, weight.n, 128, 256)
    pieces = {local: cut(stored, window, local, tensor) for local, tensor in tensors.items()}
    assert pieces["s"].shape[0] == 1
    naive = FORMATS[form].decode(pieces)  # as a kernel that counts the rows of s would take it
    wanted = dequantize(weight)[:, 128:256]
    assert not torch.equal(dequantize(naive), wanted)
    assert torch.equal(dequantize(decode(stored, window, pieces)), wanted)


def test_pieces_are_no_larger_than_they_must_be() -> None:
    form, weight, ours = CASES["marlin_24 int4"]
    stored, tensors = stored_of(form, weight, ours)
    for window, share in ((Window(64, 128, 0, 1024), 8), (Window(0, 512, 256, 384), 8), (Window(10, 20, 0, 1024), 8)):
        for local, tensor in tensors.items():
            assert cut(stored, window, local, tensor).numel() * share == tensor.numel()


def test_a_border_inside_a_group_makes_smaller_groups() -> None:
    weight = quantised(64, 1184, 4, 128)
    shard = crop(weight, Window(0, 64, 148, 296))
    assert shard.scheme.group_size == 4
    assert shard.groups == 37
    assert torch.equal(dequantize(shard), dequantize(weight)[:, 148:296])


def test_a_file_without_rows_to_cut_is_read_whole() -> None:
    tensors = load_file(golden_files("ct_sparsebitmask_fp16_n256_k256.safetensors")[0])
    tensors = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
    form = FORMATS["ct-sparse-bitmask"]
    locals_ = {name: tensors[name] for name in ("shape", "compressed", "bitmask", "row_offsets")}
    whole = dequantize(form.decode(locals_))
    stored = Stored("layer", form, 256, 256, QuantScheme(16), 16, Declared())
    window = Window(3, 99, 64, 128)
    pieces = {local: cut(stored, window, local, tensor) for local, tensor in locals_.items()}
    assert torch.equal(dequantize(decode(stored, window, pieces)), whole[3:99, 64:128])


def test_unpacked_zero_points_of_old_files_are_cut_too() -> None:
    weight = asymmetric(96, 256, 4, 64)
    stored, tensors = stored_of("ct-pack-quantized", weight, False)
    assert weight.zeros is not None
    tensors["weight_zero_point"] = (weight.zeros - 8).to(torch.int8)
    window = Window(32, 64, 0, 256)
    pieces = {local: cut(stored, window, local, tensor) for local, tensor in tensors.items()}
    assert torch.equal(dequantize(decode(stored, window, pieces)), dequantize(weight)[32:64])


def test_what_has_no_answer_is_refused_with_the_reason() -> None:
    form = FORMATS["gptq"]
    scheme = QuantScheme(4, 128, sparsity="dense")
    act_order = Stored("model.o_proj", form, 64, 256, scheme, 4, Declared(act_order=True))
    assert "act-order" in (why_not(act_order, Window(0, 64, 0, 128)) or "")
    assert why_not(act_order, Window(0, 32, 0, 256)) is None
    three_bits = Stored("model.o_proj", form, 64, 256, scheme, 3, Declared())
    assert "3 bits" in (why_not(three_bits, Window(0, 32, 0, 256)) or "")
    assert "not all inside" in (why_not(three_bits, Window(0, 65, 0, 256)) or "")
    with pytest.raises(UnsupportedError, match=r"model\.o_proj: its groups are out of order"):
        decode(act_order, Window(0, 64, 0, 128), {})
    with pytest.raises(UnsupportedError, match="quad"):
        crop(quantised(64, 128, 4, None), Window(0, 64, 2, 64))
    indexed = quantised(64, 128, 4, 64, sparse=False)
    indexed = QuantWeight(
        indexed.scheme, indexed.codes, indexed.scales, group_index=torch.arange(128, dtype=torch.int32) % 2
    )
    with pytest.raises(UnsupportedError, match="act-order"):
        crop(indexed, Window(0, 64, 0, 64))
    assert torch.equal(dequantize(crop(indexed, Window(8, 16, 0, 128))), dequantize(indexed)[8:16])


def test_act_order_that_the_config_does_not_confess_is_seen() -> None:
    weight = transforms.to_dense(quantised(64, 256, 4, 128))
    stored, tensors = stored_of("gptq", weight, False)
    tensors["g_idx"] = tensors["g_idx"].flip(0)
    window = Window(0, 64, 128, 256)
    pieces = {local: cut(stored, window, local, tensor) for local, tensor in tensors.items()}
    with pytest.raises(UnsupportedError, match="act-order"):
        decode(stored, window, pieces)
    tensors["g_idx"] = torch.full((256,), -1, dtype=torch.int32)
    pieces = {local: cut(stored, window, local, tensor) for local, tensor in tensors.items()}
    assert torch.equal(dequantize(decode(stored, window, pieces)), dequantize(weight)[:, 128:])


def test_a_tensor_of_another_layer_is_refused() -> None:
    form, weight, ours = CASES["marlin_24 int4"]
    stored, tensors = stored_of(form, weight, ours)
    with pytest.raises(ShapeError, match="layer: B_24 has shape"):
        cut(stored, Window(0, 64, 0, 1024), "B_24", tensors["B_24"][:, :-1])
