"""Every golden file decodes to what its producer packed, or is refused by name; what we can write comes out equal."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from golden_files import golden_files
from spearfish import sparse24
from spearfish.errors import UnsupportedError
from spearfish.formats import FORMATS, Declared, transforms
from spearfish.reference import dequantize
from spearfish.scheme import QuantWeight


@dataclass(frozen=True)
class Golden:
    name: str
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]

    def take(self, *names: str, prefix: str = "") -> dict[str, torch.Tensor]:
        return {name: self.tensors[prefix + name] for name in names if prefix + name in self.tensors}

    def assert_equals(self, truth: str, found: torch.Tensor) -> None:
        """`found` equals the producer's tensor `truth`: the tensor itself, or the hash kept in its place."""
        if truth in self.tensors:
            assert torch.equal(found, self.tensors[truth])
            return
        octets = found.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(octets).hexdigest() == self.metadata[f"sha256:{truth}"]


def load(path: Path) -> Golden:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    return Golden(path.stem, load_file(path), metadata)


def golden(pattern: str) -> pytest.MarkDecorator:
    """Parametrise `case` over the files that match."""
    return pytest.mark.parametrize("case", [pytest.param(load(file), id=file.stem) for file in golden_files(pattern)])


def round_trip(form: str, tensors: dict[str, torch.Tensor], declared: Declared | None = None) -> QuantWeight:
    """Decode, look for 2:4 as a reader does, encode; bytes must come back and the input must be left alone."""
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    weight = transforms.find_24(FORMATS[form].decode(tensors, declared))
    again = FORMATS[form].encode(weight)
    assert set(again) == set(tensors)
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype, name
        assert torch.equal(again[name], tensor), name
        assert torch.equal(before[name], tensor), f"{name} was changed"
    return weight


def dense_codes(weight: QuantWeight) -> torch.Tensor:
    """uint8 [k, n], as the producers keep them."""
    return transforms.to_dense(weight).codes.T


def group_of(case: Golden) -> int:
    said = case.metadata["group_size"]
    return -1 if said == "None" else int(said)


@golden("marlin24_w*.safetensors")
def test_marlin_24(case: Golden) -> None:
    declared = Declared(bits=int(case.metadata["bits"]), group_size=group_of(case))
    weight = round_trip("marlin_24", case.take("B_24", "B_meta", "s"), declared)
    case.assert_equals("q", dense_codes(weight))
    case.assert_equals("s_raw", weight.scales.T)
    case.assert_equals("W_deq", dequantize(weight, torch.float16).T)


@golden("marlin24_degenerate_w*.safetensors")
def test_marlin_24_slot_rule(case: Golden) -> None:
    """Quads of 0 to 4 non-zeros: the positions and the kept codes are those of the original packer."""
    bits, q = int(case.metadata["bits"]), case.tensors["q"].T
    tensors = {**case.take("B_24", "B_meta"), "s": torch.ones(1, q.shape[0], dtype=torch.float16)}
    weight = round_trip("marlin_24", tensors)
    assert torch.equal(weight.codes.T, case.tensors["q_comp"])
    few = ~sparse24.violations(q, zero=1 << (bits - 1))
    assert 0 < int(few.sum()) < few.numel()
    assert torch.equal(weight.positions[few], sparse24.positions_of_nonzero(q != 1 << (bits - 1))[few])


@golden("marlin_w*.safetensors")
def test_dense_marlin(case: Golden) -> None:
    weight = round_trip("marlin", case.take("B", "s"), Declared(group_size=group_of(case)))
    case.assert_equals("q", weight.codes.T)
    case.assert_equals("s_raw", weight.scales.T)


@golden("ist_sparse_marlin*.safetensors")
def test_ist_sparse_marlin_is_refused_by_name(case: Golden) -> None:
    with pytest.raises(UnsupportedError, match=r"layer0: .*IST's Sparse-Marlin"):
        FORMATS["marlin"].decode(case.take("B", "meta", "s"), None, "layer0")


@golden("gptq_w*.safetensors")
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_gptq(case: Golden, version: str) -> None:
    form = FORMATS["gptq" if version == "v1" else "gptq_v2"]
    tensors = case.take("qweight", "scales", "g_idx") | {"qzeros": case.tensors[f"qzeros_{version}"]}
    bits = int(case.metadata["bits"])
    declared = Declared(bits, group_of(case), case.metadata["sym"] == "True", case.metadata["desc_act"] == "True")
    weight = form.decode(tensors, declared)
    assert weight.scheme.symmetric == declared.symmetric
    assert (weight.group_index is not None) == declared.act_order
    shift = (1 << (weight.scheme.bits - 1)) - (1 << (bits - 1))
    case.assert_equals("q", weight.codes.T - shift)
    if weight.zeros is not None:
        assert torch.equal(weight.zeros.T - shift, case.tensors["zero"].to(torch.int16))
    case.assert_equals("W", dequantize(weight, torch.float16))
    if bits in (4, 8):
        round_trip(form.name, tensors, declared)


@golden("ct_marlin24_w*.safetensors")
def test_ct_marlin_24(case: Golden) -> None:
    tensors, declared = case.take("weight_packed", "meta", "scale_packed"), Declared(group_size=group_of(case))
    form = FORMATS["ct-marlin-24"]
    weight = form.decode(tensors, declared)
    case.assert_equals("q", dense_codes(weight))
    case.assert_equals("weight_scale", weight.scales)
    again = form.encode(weight)
    for name in ("weight_packed", "meta"):
        assert torch.equal(again[name], tensors[name])
    # The writers' fault: for k = 256 and groups of 128 they left the scales in natural order. Ours are permuted.
    faulty = weight.k == 256 and declared.group_size == 128
    assert torch.equal(again["scale_packed"], tensors["scale_packed"]) != faulty
    assert torch.equal(form.decode(again, declared.as_ours()).scales, weight.scales)


@golden("ct_packq_w*.safetensors")
def test_ct_pack_quantized(case: Golden) -> None:
    names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    bits = 8 if "_w8_" in case.name else 4
    weight = round_trip("ct-pack-quantized", case.take(*names, prefix="out_"), Declared(bits=bits))
    assert weight.scheme.is_sparse, "these files are 2:4, and looking finds it"
    assert weight.scheme.symmetric == ("_sym_" in case.name)
    signed = dense_codes(weight).T.to(torch.int16) - (1 << (bits - 1))
    case.assert_equals("q", signed.to(torch.int8))
    case.assert_equals("dequantized", dequantize(weight, torch.float16))


@golden("ct_sparse24bitmask_*.safetensors")
def test_ct_sparse_24_bitmask(case: Golden) -> None:
    tensors = case.take("shape", "compressed", "bitmask")
    weight = FORMATS["ct-sparse-24-bitmask"].decode(tensors)
    stored = tensors["compressed"].dtype
    case.assert_equals("weight", dequantize(weight).to(stored))
    if stored == torch.float16:
        round_trip("ct-sparse-24-bitmask", tensors)
    else:
        assert weight.codes.dtype == torch.float16


@golden("ct_sparsebitmask_*.safetensors")
def test_ct_sparse_bitmask(case: Golden) -> None:
    weight = FORMATS["ct-sparse-bitmask"].decode(case.take("shape", "compressed", "bitmask", "row_offsets"))
    case.assert_equals("weight", dequantize(weight, torch.float16))


# Three quads of marlin24_w4_g128_k256_n256, read off by hand: (quad, column, codes, B_24 row, word, shifts of the two
# kept codes, B_meta row, column, shift, nibble).
WORKED = [
    (25, 77, (3, 8, 8, 4), (3, 149, (8, 24)), (3, 141, 4, 0xC)),
    (1, 3, (8, 12, 8, 8), (0, 7, (0, 16)), (0, 68, 4, 0x9)),
    (63, 255, (8, 12, 5, 8), (7, 511, (12, 28)), (7, 511, 12, 0x9)),
    (8, 130, (8, 8, 7, 12), (1, 258, (0, 16)), (1, 320, 0, 0xE)),
]


@pytest.mark.parametrize(("quad", "n", "codes", "place", "meta"), WORKED)
def test_worked_example(
    quad: int, n: int, codes: tuple[int, ...], place: tuple[int, int, tuple[int, int]], meta: tuple[int, ...]
) -> None:
    case = load(golden_files("marlin24_w4_g128_k256_n256.safetensors")[0])
    row, word, shifts = place
    bits = int(case.tensors["B_24"][row, word])
    nibble = meta[3]
    assert [bits >> shift & 15 for shift in shifts] == [codes[nibble & 3], codes[nibble >> 2]]
    assert int(case.tensors["B_meta"][meta[0], meta[1]]) >> meta[2] & 15 == nibble
    weight = FORMATS["marlin_24"].decode(case.take("B_24", "B_meta", "s"))
    assert int(weight.positions[n, quad]) == nibble
    assert tuple(dense_codes(weight)[4 * quad : 4 * quad + 4, n].tolist()) == codes
