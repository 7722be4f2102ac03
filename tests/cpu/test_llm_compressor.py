"""Folders of llm-compressor 0.14: what it prunes, what its GPTQ then spoils, and what becomes of them here.

The golden file holds two of its folders, of one tiny model: SparseGPT 2:4 and then int4, once by GPTQ (which fills up
to a tenth of the groups of four again) and once by rounding (which keeps all). It also holds the logits that
transformers computed from each folder with compressed-tensors itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import spearfish
from golden_files import golden_files
from spearfish import sparse24
from spearfish.checkpoint import convert, inspect, open_checkpoint, verify
from spearfish.checkpoint.conversion import ConvertReport
from spearfish.errors import FormatError
from spearfish.formats import transforms
from spearfish.integrations import transformers as guest

(GOLDEN,) = golden_files("llm_compressor_w4_g32.safetensors")
LAYERS = 7


def folder_of(kind: str, out: Path) -> Path:
    """The files as llm-compressor wrote them."""
    tensors = {}
    with safe_open(GOLDEN, "pt") as golden:
        for full in golden.keys():  # noqa: SIM118  # no mapping
            tree, _, name = full.partition("/")
            if tree in ("both", kind) and name != "logits":
                tensors[name] = golden.get_tensor(full)
        metadata = golden.metadata()
    out.mkdir()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "recipe.yaml"):
        (out / name).write_text(metadata[f"{kind}/{name}"], encoding="utf-8")
    return out


def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return spearfish.load(folder, device="cpu")(load_file(GOLDEN)["ids"]).logits[0]


@pytest.mark.parametrize("kind", ["gptq", "rtn"])
def test_they_run_as_they_are(kind: str, tmp_path: Path) -> None:
    """Equal to what compressed-tensors makes of them, 2:4 or not."""
    folder = folder_of(kind, tmp_path / kind)
    assert verify(folder).problems == []
    assert torch.allclose(logits(folder), load_file(GOLDEN)[f"{kind}/logits"], atol=1e-5)


def test_rounding_keeps_the_pattern_and_converts_without_loss(tmp_path: Path) -> None:
    folder = folder_of("rtn", tmp_path / "rtn")
    assert [row.sparsity for row in inspect(folder).layers] == ["2:4"] * LAYERS
    report = convert(folder, tmp_path / "out", "marlin_24")
    assert [(layer.after, layer.error, layer.dropped) for layer in report.layers] == [
        ("int4 2:4 g32", None, 0)
    ] * LAYERS
    assert torch.equal(logits(tmp_path / "out"), logits(folder))


def test_what_gptq_spoilt_is_measured_and_refused(tmp_path: Path) -> None:
    folder = folder_of("gptq", tmp_path / "gptq")
    rows = inspect(folder).layers
    assert {row.sparsity for row in rows} == {"dense"}
    assert max(row.spoilt or 0 for row in rows) == pytest.approx(0.1006, abs=1e-4)  # of o_proj
    assert all(0 < (row.spoilt or 0) < 0.11 for row in rows)
    with pytest.raises(FormatError) as error:
        convert(folder, tmp_path / "out", "marlin_24")
    message = str(error.value)
    assert message.startswith(f"{LAYERS} layers cannot be converted:")
    assert "model.layers.0.mlp.down_proj: not 2:4: row " in message
    assert "hold more than two" in message
    assert "--reproject" in message
    assert not (tmp_path / "out").exists()


def test_reprojected_it_runs_and_the_damage_is_reported(tmp_path: Path) -> None:
    folder = folder_of("gptq", tmp_path / "gptq")
    report: ConvertReport = convert(folder, tmp_path / "out", "marlin_24", reproject=True)
    assert len(report.layers) == LAYERS
    before, after = open_checkpoint(folder), open_checkpoint(tmp_path / "out")
    for layer in report.layers:
        dense, sparse = before.dense(layer.name), after.dense(layer.name)
        # The damage by its own definition: what of the weight is gone, and the values that went.
        assert layer.error == pytest.approx(float((dense - sparse).norm() / dense.norm()), rel=1e-4)
        assert layer.dropped == int((dense != 0).sum() - (sparse != 0).sum())
        # Only spoilt groups lost anything, and of each the smallest.
        quads, kept = dense.view(-1, 4), sparse.view(-1, 4)
        spoilt = (quads != 0).sum(1) > 2
        assert spoilt.any()
        assert torch.equal(quads[~spoilt], kept[~spoilt])
        lost = (quads - kept).abs()[spoilt].amax(1)
        left = torch.where(kept != 0, kept.abs(), torch.inf)[spoilt].amin(1)
        assert (lost <= left).all()
        assert after.weight(layer.name).scheme.is_sparse
    model = spearfish.load(tmp_path / "out", device="cpu")
    assert len(list(guest.quantised(model))) == LAYERS
    truth, got = load_file(GOLDEN)["gptq/logits"], logits(tmp_path / "out")
    assert 0 < float((got - truth).norm() / truth.norm()) < 0.2
    # Its recipe names a Python class to be called; ours is plain, and theirs is not carried along.
    assert "!!python" in (folder / "recipe.yaml").read_text()
    assert (tmp_path / "out" / "recipe.yaml").read_text().splitlines() == [
        "converted:",
        "  -",
        '    from: "ct-pack-quantized"',
        '    to: "marlin_24"',
        "    reproject: true",
    ]
    assert 'from: "ct-pack-quantized"' in (tmp_path / "out" / "README.md").read_text()


def test_to_a_dense_format_nothing_is_dropped(tmp_path: Path) -> None:
    folder = folder_of("gptq", tmp_path / "gptq")
    report = convert(folder, tmp_path / "out", "gptq")
    assert [(layer.error, layer.dropped) for layer in report.layers] == [(None, 0)] * LAYERS
    assert torch.equal(logits(tmp_path / "out"), logits(folder))


def test_pruned_only_it_is_a_dense_folder_of_2_of_4(tmp_path: Path) -> None:
    """SparseGPT without quantisation: no word on it in the config, the values tell."""
    source = open_checkpoint(folder_of("rtn", tmp_path / "rtn"))
    tensors = {name: source.tensor(name) for name in source.tensor_names}
    tensors |= {f"{name}.weight": source.dense(name, torch.float16) for name in source.linears}
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    (tmp_path / "sparse").mkdir()
    (tmp_path / "sparse" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "sparse" / "model.safetensors", {"format": "pt"})
    report = convert(tmp_path / "sparse", tmp_path / "out", "marlin_24", group_size=32)
    assert {layer.after for layer in report.layers} == {"int4 2:4 g32"}
    assert len(report.layers) == LAYERS
    again = open_checkpoint(tmp_path / "out")
    for name in again.linears:
        mask = transforms.nonzero(again.weight(name))
        assert not sparse24.violations(mask).any()
    # Rounded a second time, to another grid: alike, no more.
    truth, got = load_file(GOLDEN)["rtn/logits"], logits(tmp_path / "out")
    assert float((got - truth).norm() / truth.norm()) < 0.2
