"""What a config says, in every place and spelling that was in use; two that disagree are an error naming both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spearfish.checkpoint.config import read_config
from spearfish.errors import FormatError, SpearfishError, UnsupportedError

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def ct(form: str, sparsity: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}} if form != "dense" else {},
        "ignore": ["lm_head"],
        "sparsity_config": sparsity or {},
    }


def folder(path: Path, config: dict[str, Any], separate: dict[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if separate is not None:
        (path / "quantize_config.json").write_text(json.dumps(separate))
    return path


SPELLINGS = [
    ("v1, silent", {"quantization_config": GPTQ}, None, "gptq"),
    ("v1, said", {"quantization_config": {**GPTQ, "checkpoint_format": "gptq"}}, None, "gptq"),
    ("v2", {"quantization_config": {**GPTQ, "checkpoint_format": "gptq_v2"}}, None, "gptq_v2"),
    ("v2 of GPTQModel", {"quantization_config": {**GPTQ, "format": "gptq_v2"}}, None, "gptq_v2"),
    ("marlin_24", {"quantization_config": {**GPTQ, "checkpoint_format": "marlin_24"}}, None, "marlin_24"),
    ("marlin-24", {"quantization_config": {**GPTQ, "checkpoint_format": "marlin-24"}}, None, "marlin_24"),
    ("marlin_24 beside", {}, {**GPTQ, "checkpoint_format": "marlin_24"}, "marlin_24"),
    ("marlin_24 as method", {"quantization_config": {**GPTQ, "quant_method": "gptq_marlin_24"}}, None, "marlin_24"),
    ("marlin by flag", {"quantization_config": {**GPTQ, "is_marlin_format": True}}, None, "marlin"),
    ("marlin flag off", {"quantization_config": {**GPTQ, "is_marlin_format": False}}, None, "gptq"),
    ("marlin by format", {"quantization_config": {**GPTQ, "checkpoint_format": "marlin"}}, None, "marlin"),
    ("marlin as method", {"quantization_config": {"quant_method": "marlin", "group_size": 128}}, None, "marlin"),
    ("no method", {}, {"bits": 4, "group_size": 128, "desc_act": False}, "gptq"),
    ("ct marlin-24", {"quantization_config": ct("marlin-24", {"format": "dense"})}, None, "ct-marlin-24"),
    ("ct old key", {"compression_config": ct("marlin-24")}, None, "ct-marlin-24"),
    ("ct packed", {"quantization_config": ct("pack-quantized")}, None, "ct-pack-quantized"),
    (
        "ct bitmask",
        {"quantization_config": ct("dense", {"format": "sparse-24-bitmask", "targets": ["Linear"]})},
        None,
        "ct-sparse-24-bitmask",
    ),
    (
        "ct int8 bitmask",
        {"quantization_config": ct("int-quantized", {"format": "sparse-24-bitmask"}, num_bits=8, strategy="channel")},
        None,
        "ct-sparse-24-bitmask",
    ),
    (
        "sparsity at the top",
        {"sparsity_config": {"format": "sparse-bitmask", "sparsity_structure": "2:4"}},
        None,
        "ct-sparse-bitmask",
    ),
    ("ct dense label", {"quantization_config": ct("dense", {"format": "dense"})}, None, "dense"),
    (
        "text part",
        {"text_config": {"quantization_config": {**GPTQ, "checkpoint_format": "marlin_24"}}},
        None,
        "marlin_24",
    ),
    ("nothing", {}, None, "dense"),
    ("null", {"quantization_config": None}, None, "dense"),
]


@pytest.mark.parametrize(("config", "separate", "wanted"), [s[1:] for s in SPELLINGS], ids=[s[0] for s in SPELLINGS])
def test_spellings(tmp_path: Path, config: dict[str, Any], separate: dict[str, Any] | None, wanted: str) -> None:
    assert read_config(folder(tmp_path, config, separate))[1].format == wanted


def test_two_places_that_agree(tmp_path: Path) -> None:
    block = {**GPTQ, "checkpoint_format": "marlin_24"}
    assert read_config(folder(tmp_path, {"quantization_config": block}, block))[1].format == "marlin_24"


CONFLICTS = [
    (
        {"quantization_config": GPTQ},
        {**GPTQ, "checkpoint_format": "marlin_24"},
        ("config.json: quantization_config says format 'gptq'", "quantize_config.json says 'marlin_24'"),
    ),
    ({"quantization_config": GPTQ}, {**GPTQ, "bits": 8}, ("bits 4", "quantize_config.json says 8")),
    ({"quantization_config": GPTQ}, {**GPTQ, "group_size": -1}, ("group_size 128", "says -1")),
    ({"quantization_config": GPTQ, "compression_config": ct("marlin-24")}, None, ("'gptq'", "compression_config")),
    (
        {"quantization_config": {**GPTQ, "checkpoint_format": "gptq", "is_marlin_format": True}},
        None,
        ("checkpoint_format says gptq", "is_marlin_format says marlin"),
    ),
    (
        {"quantization_config": {**GPTQ, "checkpoint_format": "marlin_24", "format": "gptq"}},
        None,
        ("checkpoint_format says marlin_24", "format says gptq"),
    ),
]


@pytest.mark.parametrize(("config", "separate", "texts"), CONFLICTS)
def test_conflicts_name_both(
    tmp_path: Path, config: dict[str, Any], separate: dict[str, Any] | None, texts: tuple[str, str]
) -> None:
    with pytest.raises(FormatError) as caught:
        read_config(folder(tmp_path, config, separate))
    for text in texts:
        assert text in str(caught.value)


REFUSED: list[tuple[dict[str, Any], type[SpearfishError], str]] = [
    ({"quant_method": "awq", "bits": 4}, UnsupportedError, "'awq' is not read; spearfish reads gptq"),
    ({**GPTQ, "checkpoint_format": "exl3"}, UnsupportedError, "'exl3'"),
    (ct("nvfp4-pack-quantized"), UnsupportedError, "'nvfp4-pack-quantized'"),
    (ct("int-quantized"), UnsupportedError, "'int-quantized'"),
    ({**GPTQ, "bits": "four"}, FormatError, "bits is 'four'"),
    ({**GPTQ, "bits": 40}, FormatError, "bits is 40"),
    ({**GPTQ, "group_size": 0}, FormatError, "group_size is 0"),
    ({**GPTQ, "sym": "yes"}, FormatError, "sym is 'yes'"),
    ({**GPTQ, "dynamic": {"+:([": {"bits": 8}}}, FormatError, "regular expression"),
    ({**GPTQ, "dynamic": 3}, FormatError, "dynamic"),
    ({**ct("pack-quantized"), "config_groups": {"a": {"targets": ["re:(["], "weights": {}}}}, FormatError, "regular"),
    ({**ct("pack-quantized"), "config_groups": [1]}, FormatError, "config_groups"),
    ({**GPTQ, "spearfish": {"format_version": "2.0"}}, UnsupportedError, "version 2.0, .* up to 1.0. Update"),
    ({**GPTQ, "spearfish": {}}, FormatError, "format_version is None"),
    ({**GPTQ, "spearfish": {"format_version": "1.0", "layers": {"a": 1}}}, FormatError, "spearfish.layers"),
]


@pytest.mark.parametrize(("block", "kind", "text"), REFUSED)
def test_refused(tmp_path: Path, block: dict[str, Any], kind: type[SpearfishError], text: str) -> None:
    with pytest.raises(kind, match=text):
        read_config(folder(tmp_path, {"quantization_config": block}))


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 1, "a": 2}', '"\\ud800"', "[" * 5000])
def test_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FormatError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_newer_minor_version_is_read(tmp_path: Path) -> None:
    block = {**GPTQ, "checkpoint_format": "marlin_24", "spearfish": {"format_version": "1.9"}}
    assert read_config(folder(tmp_path, {"quantization_config": block}))[1].ours is not None


def test_missing_keys_are_noted(tmp_path: Path) -> None:
    _, quant = read_config(folder(tmp_path, {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    assert any("no sym" in note for note in quant.notes)
    assert any("no desc_act" in note for note in quant.notes)


def test_what_is_said_of_single_modules(tmp_path: Path) -> None:
    block = {**GPTQ, "dynamic": {r"+:.*\.down_proj$": {"bits": 8, "group_size": -1}, "-:.*lm_head": {}}}
    _, quant = read_config(folder(tmp_path, {"quantization_config": block}))
    assert (quant.of("layers.0.down_proj").bits, quant.of("layers.0.down_proj").group_size) == (8, -1)
    assert (quant.of("layers.0.up_proj").bits, quant.of("layers.0.up_proj").group_size) == (4, 128)
    packed = ct("pack-quantized")
    packed["config_groups"]["group_1"] = {
        "targets": [r"re:.*down_proj", "model.head"],
        "weights": {"num_bits": 8, "strategy": "channel", "symmetric": False, "actorder": "group"},
    }
    _, quant = read_config(folder(tmp_path, {"quantization_config": packed}))
    for module in ("model.layers.3.down_proj", "model.head"):
        said = quant.of(module)
        assert (said.bits, said.group_size, said.symmetric, said.act_order) == (8, -1, False, True)
    assert quant.of("model.layers.3.up_proj").bits == 4
