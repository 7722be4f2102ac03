"""Folders: written whole or not at all, converted without loss, refused with reasons, verified and described."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spearfish import sparse24
from spearfish.checkpoint import TARGETS, CheckpointWriter, convert, inspect, open_checkpoint, verify
from spearfish.checkpoint.card import to_yaml
from spearfish.errors import FormatError, SpearfishError, UnsupportedError
from spearfish.formats import transforms
from spearfish.reference import dequantize
from spearfish.scheme import QuantWeight

CONFIG = {"model_type": "llama", "hidden_size": 128, "dtype": "bfloat16", "tie_word_embeddings": True}
LAYERS = ("model.layers.0.q_proj", "model.layers.0.up_proj", "model.layers.10.q_proj", "model.layers.2.down_proj")


def values(n: int, k: int, seed: int, pruned: bool = True) -> torch.Tensor:
    dense = torch.randn(n, k, generator=torch.manual_seed(seed))
    return dense * sparse24.magnitude_mask(dense.abs()) if pruned else dense


def quantised(n: int, k: int, seed: int, bits: int = 4, group: int | None = 128, pruned: bool = True) -> QuantWeight:
    dense = values(n, k, seed, pruned)
    return transforms.round_to_nearest(transforms.sparse_values(dense) if pruned else dense, bits, group)


def plain_tensors() -> dict[str, torch.Tensor]:
    g = torch.manual_seed(99)
    return {
        "model.embed_tokens.weight": torch.randn(32, 128, generator=g).bfloat16(),
        "model.norm.weight": torch.ones(128, dtype=torch.bfloat16),
        "model.layers.0.q_proj.bias": torch.randn(128, generator=g).bfloat16(),
        "model.layers.0.gate.weight": torch.randn(8, 128, generator=g).bfloat16(),
    }


def write(out: Path, weights: dict[str, QuantWeight], form: str = "marlin_24", **options: Any) -> Path:
    with CheckpointWriter(out, config=CONFIG, format=form, **options) as writer:
        for name, tensor in plain_tensors().items():
            writer.add_tensor(name, tensor)
        for name, weight in weights.items():
            writer.add_weight(name, weight)
    return out


def original(out: Path, **options: Any) -> tuple[Path, dict[str, QuantWeight]]:
    """A marlin_24 folder within the limits of the original programs, and its weights."""
    weights = {name: quantised(128, 256, i) for i, name in enumerate(LAYERS)}
    return write(out, weights, **options), weights


def dense_folder(out: Path, tensors: dict[str, torch.Tensor]) -> Path:
    out.mkdir()
    (out / "config.json").write_text(json.dumps(CONFIG))
    save_file({**plain_tensors(), **tensors}, out / "model.safetensors")
    return out


def same(a: QuantWeight, b: QuantWeight) -> bool:
    return torch.equal(dequantize(a, torch.float64), dequantize(b, torch.float64))


def test_write_and_read(tmp_path: Path) -> None:
    out, weights = original(tmp_path / "m", recipe={"method": "rtn", "note": "a: b", "steps": [1, {"x": None}]})
    checkpoint = open_checkpoint(out)
    assert checkpoint.format == "marlin_24"
    assert list(checkpoint.linears) == [LAYERS[0], LAYERS[1], LAYERS[3], LAYERS[2]], "layer 10 comes last"
    assert set(checkpoint.tensor_names) == set(plain_tensors())
    for name, weight in weights.items():
        info = checkpoint.linears[name]
        assert (info.n, info.k, info.scheme, info.format) == (128, 256, weight.scheme, "marlin_24")
        assert same(checkpoint.weight(name), weight)
        assert torch.equal(checkpoint.dense(name, torch.float16), dequantize(weight, torch.float16))
    for name, tensor in plain_tensors().items():
        assert torch.equal(checkpoint.tensor(name), tensor)
    block = checkpoint.config["quantization_config"]
    assert (block["quant_method"], block["checkpoint_format"]) == ("gptq", "marlin_24")
    assert (block["bits"], block["group_size"], block["sym"], block["desc_act"]) == (4, 128, True, False)
    assert block["ignore"] == ["model.layers.0.gate"]
    assert block["spearfish"]["format_version"] == "1.0"
    assert block["spearfish"]["recipe"]["method"] == "rtn"
    assert block["spearfish"]["extended"] == []
    assert json.loads((out / "quantize_config.json").read_text()) == block
    assert (out / "recipe.yaml").read_text().splitlines()[:2] == ['method: "rtn"', 'note: "a: b"']
    card = (out / "README.md").read_text()
    assert "3.125 bits per weight" in card
    assert "Extended" not in card
    assert verify(out).ok


def test_recipe_as_yaml() -> None:
    recipe = {
        "rate": 1e-05,
        "top": float("inf"),
        "on": "yes",
        "a b": None,
        "list": [1.5, {"x": []}, [True]],
        "none": {},
    }
    assert to_yaml(recipe).splitlines() == [
        "rate: 1.0e-05",
        "top: .inf",
        '"on": "yes"',
        '"a b": null',
        "list:",
        "  - 1.5",
        "  -",
        "    x: []",
        "  -",
        "    - true",
        "none: {}",
    ]


def test_shards_and_index(tmp_path: Path) -> None:
    out, weights = original(tmp_path / "m", shard_bytes=30_000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    sizes = [sum(t.numel() * t.itemsize for t in load_file(out / name).values()) for name in files]
    assert max(sizes) <= 30_000
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert all(same(open_checkpoint(out).weight(name), weight) for name, weight in weights.items())


def test_tied_head_is_not_written_twice(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "m", config=CONFIG) as writer:
        writer.add_tensor("model.embed_tokens.weight", torch.ones(8, 64))
        writer.add_tensor("lm_head.weight", torch.ones(8, 64))
        writer.add_weight("a.q", quantised(64, 64, 0))
    assert "lm_head.weight" not in open_checkpoint(tmp_path / "m").tensor_names
    untied = {**CONFIG, "tie_word_embeddings": False}
    with CheckpointWriter(tmp_path / "u", config=untied) as writer:
        shared = torch.ones(8, 64)
        writer.add_tensor("model.embed_tokens.weight", shared)
        writer.add_tensor("lm_head.weight", shared)
        writer.add_weight("a.q", quantised(64, 64, 0))
    assert torch.equal(open_checkpoint(tmp_path / "u").tensor("lm_head.weight"), shared)


def test_files_are_carried_over(tmp_path: Path) -> None:
    source = dense_folder(tmp_path / "src", {})
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "LICENSE", "README.md", "x.bin"):
        (source / name).write_text("{}")
    (source / "quantize_config.json").write_text("{}")
    with CheckpointWriter(tmp_path / "out", source=source) as writer:
        writer.add_weight("a.q", quantised(64, 64, 0))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "generation_config.json", "chat_template.jinja", "LICENSE"} <= names
    assert "x.bin" not in names
    assert (tmp_path / "out" / "README.md").read_text() != "{}"
    assert (tmp_path / "out" / "quantize_config.json").read_text() != "{}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(UnsupportedError, match="x.q"),
        CheckpointWriter(tmp_path / "m", config=CONFIG) as writer,
    ):
        writer.add_weight("a.q", quantised(64, 64, 0))
        writer.add_weight("x.q", transforms.sparse_values(values(64, 64, 0)))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept_unless_told(tmp_path: Path) -> None:
    out, _ = original(tmp_path / "m")
    with pytest.raises(FormatError, match=r"exists.*--overwrite"):
        original(out)
    with pytest.raises(FormatError, match="twice"), CheckpointWriter(out, config=CONFIG, overwrite=True) as writer:
        writer.add_tensor("a", torch.ones(1))
        writer.add_tensor("a", torch.ones(1))
    assert verify(out).ok, "the old folder outlives a failed attempt"
    write(out, {"new.q": quantised(64, 64, 3)}, overwrite=True)
    assert list(open_checkpoint(out).linears) == ["new.q"]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.jpg").write_text("")
    with pytest.raises(FormatError, match="not replaced"):
        original(other, overwrite=True)
    with pytest.raises(FormatError, match="must not be the source"):
        convert(out, out, "gptq", overwrite=True)


@pytest.mark.parametrize("first", [target for target in TARGETS if target not in ("ct-sparse-24-bitmask", "dense")])
@pytest.mark.parametrize("second", TARGETS)
def test_convert_there_and_back(tmp_path: Path, first: str, second: str) -> None:
    """marlin_24 -> first -> second: codes keep every value; values are rounded once, to the model's dtype."""
    out, weights = original(tmp_path / "m")
    assert not [layer for layer in convert(out, tmp_path / "1", first).layers if layer.error is not None]
    report = convert(tmp_path / "1", tmp_path / "2", second)
    assert (report.source_format, report.format) == (first, second)
    assert len(report.layers) == len(LAYERS)
    checkpoint = open_checkpoint(tmp_path / "2")
    assert checkpoint.format == second
    assert verify(tmp_path / "2").ok
    for name, weight in weights.items():
        found = checkpoint.weight(name)
        assert found.scheme.is_sparse, "the pattern is found again"
        if second in ("ct-sparse-24-bitmask", "dense"):
            assert torch.equal(dequantize(found), dequantize(weight, torch.bfloat16).float())
        else:
            assert same(found, weight)
    for name, tensor in plain_tensors().items():
        assert torch.equal(checkpoint.tensor(name), tensor)


def test_dense_folder_to_marlin_24(tmp_path: Path) -> None:
    """Pruned layers are quantised, an unpruned one stays plain, the head and the embedding are left alone."""
    pruned = {f"{name}.weight": values(128, 256, i).bfloat16() for i, name in enumerate(LAYERS)}
    others = {"model.layers.0.k_proj.weight": values(128, 256, 9, pruned=False)}
    source = dense_folder(tmp_path / "d", pruned | others)
    report = convert(source, tmp_path / "m", "marlin_24", bits=8, group_size=-1)
    assert {layer.name for layer in report.layers} == set(LAYERS)
    assert set(report.plain) == {"model.layers.0.k_proj", "model.layers.0.gate"}
    assert all(0 < layer.error < 0.02 for layer in report.layers)
    checkpoint = open_checkpoint(tmp_path / "m")
    for name in LAYERS:
        truth = transforms.round_to_nearest(transforms.sparse_values(pruned[f"{name}.weight"]), 8, None)
        assert same(checkpoint.weight(name), truth)
    assert torch.equal(checkpoint.tensor("model.layers.0.k_proj.weight"), others["model.layers.0.k_proj.weight"])
    with pytest.raises(UnsupportedError, match="2 are not, the first is"):
        convert(source, tmp_path / "n", "marlin_24", require_sparse=True)
    compact = convert(source, tmp_path / "b", "ct-sparse-24-bitmask")
    assert not [layer for layer in compact.layers if layer.error is not None]
    assert compact.bytes_after < 0.75 * compact.bytes_before
    for name in LAYERS:
        assert torch.equal(open_checkpoint(tmp_path / "b").dense(name), pruned[f"{name}.weight"].float())


def test_almost_24_is_refused_or_reprojected(tmp_path: Path) -> None:
    spoilt = values(128, 256, 0)
    spoilt[100, 0:3] = torch.tensor([0.001, 2.0, 3.0])
    spoilt[101, 4:8] = 1
    source = dense_folder(tmp_path / "d", {f"{LAYERS[0]}.weight": spoilt, f"{LAYERS[1]}.weight": values(128, 256, 1)})
    with pytest.raises(FormatError, match=rf"{LAYERS[0]}: not 2:4: row 100, columns 0\.\.3 .* 2 of 8192.*--reproject"):
        convert(source, tmp_path / "m", "marlin_24")
    report = convert(source, tmp_path / "m", "ct-sparse-24-bitmask", reproject=True)
    damage = {layer.name: layer for layer in report.layers}
    lost = (0.001**2 + 1 + 1) ** 0.5
    removed = int((spoilt[100, 0:4] != 0).sum()) - 2 + 2
    assert damage[LAYERS[0]].dropped == removed
    if removed == 3:
        assert damage[LAYERS[0]].error == pytest.approx(lost / float(spoilt.norm()), rel=1e-3)
    assert damage[LAYERS[1]].error is None
    # The same for codes: a packed file that a GPTQ run without the mask has spoilt.
    dense = transforms.to_dense(quantised(128, 256, 0))
    codes = dense.codes.clone()
    codes[7, 8:12] = torch.tensor([15, 9, 1, 8], dtype=torch.uint8)
    write(tmp_path / "p", {LAYERS[0]: QuantWeight(dense.scheme, codes, dense.scales)}, "ct-pack-quantized")
    assert inspect(tmp_path / "p").layers[0].spoilt == 1 / 8192
    with pytest.raises(FormatError, match=r"row 7, columns 8\.\.11"):
        convert(tmp_path / "p", tmp_path / "q", "marlin_24")
    report = convert(tmp_path / "p", tmp_path / "q", "marlin_24", reproject=True)
    assert report.layers[0].dropped == 1
    found = transforms.to_dense(open_checkpoint(tmp_path / "q").weight(LAYERS[0])).codes
    assert found[7, 8:12].tolist() == [15, 8, 1, 8]


def test_mixed_model(tmp_path: Path) -> None:
    """Dense int4, 2:4 int4 and plain layers in one folder, marked as ours."""
    weights = {
        LAYERS[0]: quantised(128, 256, 0),
        LAYERS[1]: quantised(256, 256, 1, pruned=False),
        LAYERS[2]: quantised(128, 256, 2, bits=8, group=64),
    }
    for form, second in (("marlin_24", "marlin"), ("ct-marlin-24", "ct-pack-quantized")):
        out = write(tmp_path / form, weights, form)
        checkpoint = open_checkpoint(out)
        assert [checkpoint.linears[name].format for name in LAYERS[:3]] == [form, second, form]
        assert all(same(checkpoint.weight(name), weight) for name, weight in weights.items())
        assert any("dense layers are stored as" in reason for reason in checkpoint.quant.extended)
        assert "**Extended: needs spearfish.**" in (out / "README.md").read_text()
        assert inspect(out).runs_on == inspect(out).runs_on[:1]
        assert verify(out).ok
    report = convert(tmp_path / "marlin_24", tmp_path / "packed", "ct-pack-quantized")
    assert not [layer for layer in report.layers if layer.error is not None]
    assert all(same(open_checkpoint(tmp_path / "packed").weight(name), weight) for name, weight in weights.items())
    assert verify(tmp_path / "packed").ok
    again = convert(tmp_path / "packed", tmp_path / "again", "marlin_24")
    assert [note for note in again.notes if "stored dense" in note and note.startswith("1 of 3 ") and LAYERS[1] in note]
    assert not any("stored dense" in note for note in report.notes)


def test_padding(tmp_path: Path) -> None:
    weight = quantised(100, 36, 0, group=36)
    name = LAYERS[1]
    with pytest.raises(UnsupportedError, match=r"k = 36 .*n = 100 .*--pad"):
        write(tmp_path / "m", {name: weight})
    write(tmp_path / "p", {name: weight}, "ct-pack-quantized")
    report = convert(tmp_path / "p", tmp_path / "m", "marlin_24", pad=True)
    assert any("padded" in reason for reason in report.extended)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert (checkpoint.linears[name].n, checkpoint.linears[name].k) == (100, 36)
    assert same(checkpoint.weight(name), weight)
    assert verify(tmp_path / "m").ok


def test_every_layer_that_fails_is_reported(tmp_path: Path) -> None:
    weights = {f"model.layers.{i}.fc": quantised(60, 64, i) for i in range(7)} | {
        "model.layers.9.fc": quantised(64, 64, 9)
    }
    source = write(tmp_path / "p", weights, "ct-pack-quantized")
    with pytest.raises(UnsupportedError, match="7 layers cannot be converted") as caught:
        convert(source, tmp_path / "m", "marlin_24")
    lines = str(caught.value).splitlines()
    assert len(lines) == 7
    assert all(f"model.layers.{i}.fc: marlin_24 cannot hold" in lines[i + 1] for i in range(5))
    assert lines[-1] == "  ... and 2 more"
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    dense = write(tmp_path / "g", {LAYERS[0]: quantised(128, 256, 0, pruned=False)}, "gptq")
    with pytest.raises(UnsupportedError, match="no layer is 2:4.*marlin, gptq"):
        convert(dense, tmp_path / "x", "marlin_24")
    with pytest.raises(UnsupportedError, match="cannot convert to 'exl3'.*marlin_24"):
        convert(dense, tmp_path / "x", "exl3")
    unpruned = dense_folder(tmp_path / "d", {})
    with pytest.raises(UnsupportedError, match="spearfish compress"):
        convert(unpruned, tmp_path / "x", "ct-sparse-24-bitmask")
    with pytest.raises(UnsupportedError, match="--bits is 3"):
        convert(dense, tmp_path / "x", "gptq", bits=3)
    assert not (tmp_path / "x").exists()


def test_convert_gptq_act_order(tmp_path: Path) -> None:
    """2:4 with act-order: found in a GPTQ file, refused by marlin_24 by name, kept by pack-quantized."""
    weight = quantised(128, 256, 0, group=64)
    index = torch.randperm(256, generator=torch.manual_seed(0)).int() // 64
    ordered = QuantWeight(weight.scheme, weight.codes, weight.scales, weight.positions, None, index)
    write(tmp_path / "g", {LAYERS[0]: ordered}, "gptq")
    assert inspect(tmp_path / "g").layers[0].act_order
    with pytest.raises(UnsupportedError, match=rf"{LAYERS[0]}: marlin_24 cannot hold.*act-order.*ct-pack-quantized"):
        convert(tmp_path / "g", tmp_path / "m", "marlin_24")
    convert(tmp_path / "g", tmp_path / "p", "ct-pack-quantized")
    assert same(open_checkpoint(tmp_path / "p").weight(LAYERS[0]), ordered)


def test_foreign_ct_marlin_24_of_256(tmp_path: Path) -> None:
    """A k = 256, group 128 file of the original writer has its scales in natural order; a converted one is right."""
    weight = quantised(128, 256, 0)
    out = write(tmp_path / "o", {LAYERS[0]: weight}, "ct-marlin-24")
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]["spearfish"]
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(out / "model.safetensors")
    tensors[f"{LAYERS[0]}.scale_packed"] = weight.scales.T.contiguous()
    save_file(tensors, out / "model.safetensors")
    assert same(open_checkpoint(out).weight(LAYERS[0]), weight)
    convert(out, tmp_path / "m", "ct-marlin-24")
    assert same(open_checkpoint(tmp_path / "m").weight(LAYERS[0]), weight)


def test_activation_scales_are_left_out(tmp_path: Path) -> None:
    out = write(tmp_path / "p", {LAYERS[0]: quantised(128, 256, 0)}, "ct-pack-quantized")
    tensors = load_file(out / "model.safetensors")
    tensors[f"{LAYERS[0]}.input_scale"] = torch.ones(1)
    save_file(tensors, out / "model.safetensors")
    report = convert(out, tmp_path / "m", "marlin_24")
    assert any("activations" in note for note in report.notes)
    assert f"{LAYERS[0]}.input_scale" not in open_checkpoint(tmp_path / "m").entries


def bitmask(tensor: torch.Tensor, name: str, flat_prefix: bool) -> dict[str, torch.Tensor]:
    """A parameter as the unstructured writer stored it, under `P.weight.*` (older) or `P.*`."""
    kept = tensor != 0
    counts = kept.sum(-1)
    prefix = name.removesuffix(".weight") if flat_prefix else name
    padded = torch.nn.functional.pad(kept, (0, -kept.shape[-1] % 8)).reshape(*kept.shape[:-1], -1, 8)
    return {
        f"{prefix}.shape": torch.tensor(tensor.shape),
        f"{prefix}.compressed": tensor[kept],
        f"{prefix}.bitmask": (padded * 2 ** torch.arange(8)).sum(-1).to(torch.uint8),
        f"{prefix}.row_offsets": counts.cumsum(0) - counts,
    }


@pytest.mark.parametrize("flat_prefix", [False, True])
def test_sparse_bitmask_folder(tmp_path: Path, flat_prefix: bool) -> None:
    """A file whose writer compressed every parameter: embeddings and norms come back as tensors."""
    sparse, loose = values(64, 36, 0), values(64, 36, 1, pruned=False)
    loose[:, 1] = 0
    embedding, norm = torch.randn(10, 36), torch.randn(36)
    tensors = {"model.norm.weight": norm, "model.embed_tokens.weight": embedding}
    tensors |= {"model.layers.0.q_proj.weight": sparse, "model.layers.0.k_proj.weight": loose}
    source = tmp_path / "s"
    source.mkdir()
    config = {**CONFIG, "sparsity_config": {"format": "sparse-bitmask", "global_sparsity": 0.5}}
    (source / "config.json").write_text(json.dumps(config))
    packed = {}
    for name, tensor in tensors.items():
        packed |= bitmask(tensor, name, flat_prefix)
    save_file(packed, source / "model.safetensors")
    checkpoint = open_checkpoint(source)
    assert list(checkpoint.linears) == ["model.layers.0.k_proj", "model.layers.0.q_proj"]
    assert verify(source).ok
    with pytest.raises(FormatError, match="k_proj: not 2:4"):
        checkpoint.weight("model.layers.0.k_proj")
    convert(source, tmp_path / "d", "dense")
    found = open_checkpoint(tmp_path / "d")
    assert set(found.entries) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found.tensor(name), tensor)
    report = convert(source, tmp_path / "b", "ct-sparse-24-bitmask")
    assert report.plain == ["model.layers.0.k_proj"]
    assert torch.equal(open_checkpoint(tmp_path / "b").dense("model.layers.0.q_proj"), sparse)


def test_an_unstructured_bitmask_folder_is_written_dense(tmp_path: Path) -> None:
    """Nothing in it is 2:4, so nothing else can be made of it; but what it holds is not lost."""
    loose = torch.randn(64, 36)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "config.json").write_text(json.dumps({**CONFIG, "sparsity_config": {"format": "sparse-bitmask"}}))
    save_file(bitmask(loose, "model.layers.0.k_proj.weight", False), tmp_path / "s" / "model.safetensors")
    for to in ("marlin_24", "gptq", "ct-sparse-24-bitmask"):
        with pytest.raises(UnsupportedError, match="nothing to"):
            convert(tmp_path / "s", tmp_path / "out", to)
    convert(tmp_path / "s", tmp_path / "out", "dense")
    found = open_checkpoint(tmp_path / "out")
    assert found.format == "dense"
    assert torch.equal(found.tensor("model.layers.0.k_proj.weight"), loose)


def test_inspect_notes_what_is_almost_24(tmp_path: Path) -> None:
    spoilt = values(128, 256, 0)
    spoilt[3, 0:4] = 1
    found = inspect(dense_folder(tmp_path / "d", {f"{LAYERS[0]}.weight": spoilt}))
    assert found.layers == []
    assert any(LAYERS[0] in note and "--reproject" in note for note in found.notes)


def test_inspect_says_why_pruning_alone_saves_nothing(tmp_path: Path) -> None:
    plain = inspect(dense_folder(tmp_path / "p", {f"{LAYERS[0]}.weight": torch.ones(128, 256)}))
    pruned = inspect(dense_folder(tmp_path / "q", {f"{LAYERS[0]}.weight": values(128, 256, 0)}))
    assert not any("--to marlin_24" in note for note in plain.notes)
    assert any("zeros take as much room" in note and "--to marlin_24" in note for note in pruned.notes)


def test_inspect_counts(tmp_path: Path) -> None:
    out, weights = original(tmp_path / "m")
    found = inspect(out)
    assert found.format == "marlin_24"
    assert found.weights == 4 * 128 * 256
    assert found.bits_per_weight == 3.125
    row = found.layers[0]
    truth = float((dequantize(weights[row.name]) == 0).double().mean())
    assert (row.bits, row.group_size, row.sparsity, row.spoilt) == (4, 128, "2:4", 0)
    assert row.zeros == pytest.approx(truth)
    assert found.plain_linears == ["model.layers.0.gate"]
    assert any("vLLM 0.4.3 to 0.14.1" in line for line in found.runs_on)
    fast = inspect(out, measure=False)
    assert fast.layers[0].zeros is None
    packed = write(tmp_path / "p", {LAYERS[0]: quantised(128, 256, 0)}, "ct-pack-quantized")
    assert inspect(packed).layers[0].sparsity == "2:4"


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_verify_reports_every_problem(tmp_path: Path) -> None:
    out, _ = original(tmp_path / "m")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYERS[0]}.s"][0, 3] = float("nan")
        tensors[f"{LAYERS[1]}.B_meta"][0, 0] = 0
        tensors.pop(f"{LAYERS[2]}.s")
        tensors["model.norm.weight"][5] = float("inf")
        tensors["model.layers.0.q_proj.bias"] = torch.zeros(7)

    edit(out, spoil)
    report = verify(out)
    where = [problem.where for problem in report.problems]
    assert set(where) == {*LAYERS[:3], "model.norm.weight"}
    text = {problem.where: problem.what for problem in report.problems}
    assert "finite" in text[LAYERS[0]]
    assert "i0 < i1" in text[LAYERS[1]]
    assert "s" in text[LAYERS[2]]
    assert "missing" in text[LAYERS[2]]
    assert "[5] is inf" in text["model.norm.weight"]


def test_verify_looks_at_biases_marks_and_damage(tmp_path: Path) -> None:
    out, _ = original(tmp_path / "m")
    edit(out, lambda tensors: tensors.update({"model.layers.0.q_proj.bias": torch.zeros(7)}))
    assert "bias has shape [7], wanted [128]" in verify(out).problems[0].what
    small = write(tmp_path / "s", {"a.q": quantised(64, 96, 0)})
    config = json.loads((small / "config.json").read_text())
    config["quantization_config"]["spearfish"]["extended"] = []
    config["quantization_config"]["spearfish"]["layers"] = {"b.q": {"bits": 8}}
    (small / "config.json").write_text(json.dumps(config))
    (small / "quantize_config.json").unlink()
    assert [problem.what[:20] for problem in verify(small).problems] == ["not marked as extend", "spearfish.layers nam"]
    (small / "model.safetensors").write_bytes((small / "model.safetensors").read_bytes()[:-1])
    assert "cut off" in verify(small).problems[0].what
    assert "no such folder" in verify(tmp_path / "nowhere").problems[0].what


def test_config_that_contradicts_the_tensors(tmp_path: Path) -> None:
    out, _ = original(tmp_path / "m")
    (out / "quantize_config.json").unlink()
    good = json.loads((out / "config.json").read_text())
    for change, text in (
        ({"bits": 8}, "config says 8 bits"),
        ({"group_size": 64}, "group_size 64, which is 4 group"),
        ({"checkpoint_format": "gptq"}, "says gptq, but the layer's tensors .* are those of marlin_24"),
        ({"checkpoint_format": "marlin"}, "says marlin"),
    ):
        config = {**good, "quantization_config": {**good["quantization_config"], **change}}
        (out / "config.json").write_text(json.dumps(config))
        with pytest.raises(FormatError, match=text):
            open_checkpoint(out)


@pytest.mark.parametrize("form", [target for target in TARGETS if target not in ("marlin", "dense")])
def test_quantised_tensors_without_a_config(tmp_path: Path, form: str) -> None:
    weight = quantised(128, 256, 0)
    if form == "ct-sparse-24-bitmask":
        weight = transforms.sparse_values(dequantize(weight, torch.float16))
    out = write(tmp_path / "m", {LAYERS[0]: weight}, form)
    (out / "config.json").write_text(json.dumps(CONFIG))
    (out / "quantize_config.json").unlink(missing_ok=True)
    with pytest.raises(FormatError, match="belongs to a quantised format"):
        open_checkpoint(out)


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such folder"):
        open_checkpoint(tmp_path / "x")
    with pytest.raises(FormatError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(FormatError, match=r"pytorch_model\.bin, which is not read"):
        open_checkpoint(tmp_path)
    out, _ = original(tmp_path / "m", shard_bytes=40_000)
    file = sorted(out.glob("*.safetensors"))[0]
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(FormatError, match="missing. Fetch it again"):
        open_checkpoint(out)
    file.write_bytes(content)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/x.safetensors"}}))
    with pytest.raises(FormatError, match="not the name of a safetensors file in this folder"):
        open_checkpoint(out)
    index["weight_map"]["ghost"] = file.name
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="ghost is not in"):
        open_checkpoint(out)


KILLED = """
import sys
from spearfish.checkpoint import convert
for i in range(1000):
    convert(sys.argv[1], sys.argv[2], "gptq" if i % 2 else "ct-pack-quantized", overwrite=True,
            progress=lambda *_: print("step", flush=True))
"""


def test_a_killed_convert_leaves_nothing_half_written(tmp_path: Path) -> None:
    """SIGKILL at many points, with and without an older folder in place: it is whole, old or new, or not there."""
    source, weights = original(tmp_path / "src", shard_bytes=30_000)
    out = tmp_path / "out"
    seen = set()
    for attempt in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(source), str(out)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        for _ in range(1 + 5 * attempt):
            process.stdout.readline()
        time.sleep(0.003 * attempt)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        seen.add(out.exists())
        if out.exists():
            assert verify(out).ok
            assert all(same(open_checkpoint(out).weight(name), weight) for name, weight in weights.items())
    assert True in seen
    convert(source, out, "gptq", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"], "the next run clears what was left"
    assert verify(source).ok


def test_a_folder_that_stepped_aside_is_put_back(tmp_path: Path) -> None:
    """A kill between the two renames of an overwrite: the next writer restores the old folder first."""
    out, weights = original(tmp_path / "m")
    out.rename(tmp_path / ".m.previous")
    with pytest.raises(SpearfishError), CheckpointWriter(out, config=CONFIG, overwrite=True):
        raise FormatError("stop")
    assert same(open_checkpoint(out).weight(LAYERS[0]), weights[LAYERS[0]])
