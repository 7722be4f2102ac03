"""inspect, convert and verify as typed: what is printed, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spearfish import sparse24
from spearfish.checkpoint import CheckpointWriter, open_checkpoint
from spearfish.cli import main
from spearfish.formats import transforms


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    code = ended.value.code
    return int(code or 0), " ".join(out.split()), " ".join(err.split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"model_type": "llama", "dtype": "float16"}
    with CheckpointWriter(tmp_path / "m", config=config) as writer:
        for i in range(12):
            dense = torch.randn(128, 128, generator=torch.manual_seed(i))
            pruned = transforms.sparse_values(dense * sparse24.magnitude_mask(dense.abs()))
            writer.add_weight(f"model.layers.{i}.q_proj", transforms.round_to_nearest(pruned, 4, 128))
        writer.add_tensor("lm_head.weight", torch.ones(8, 128))
    return tmp_path / "m"


def test_inspect(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, out, _ = run(capsys, "inspect", folder)
    assert code == 0
    for text in (
        "marlin_24",
        "12 linear, 196,608 weights",
        "3.125 bits per weight",
        "model.layers.*.q_proj 12 128 128 4",
    ):
        assert text in out
    assert "Left plain lm_head" in out
    assert "vLLM 0.4.3" in out
    _, out, _ = run(capsys, "inspect", folder, "--layers", "--fast")
    assert "model.layers.11.q_proj 128 128 4 128 yes - 3.125" in out
    _, out, err = run(capsys, "inspect", folder, "--json")
    assert json.loads(out)["layers"][0]["sparsity"] == "2:4"
    assert err == ""


def test_convert(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    code, out, _ = run(capsys, "convert", folder, tmp_path / "g", "--to", "gptq")
    assert code == 0
    assert "Every value was kept." in out
    assert f"Next: spearfish inspect {tmp_path / 'g'}" in out
    assert open_checkpoint(tmp_path / "g").format == "gptq"
    code, out, _ = run(capsys, "convert", folder, tmp_path / "d", "--to", "dense", "--dtype", "bfloat16")
    assert "12 layers changed in value: relative error 0.00" in out
    code, _, err = run(capsys, "convert", folder, tmp_path / "g", "--to", "marlin")
    assert code == 1
    assert err.startswith("error:")
    assert "--overwrite" in err
    code, _, err = run(capsys, "convert", folder, tmp_path / "x", "--to", "marlin-25")
    assert (code, "there are marlin_24, gptq" in err) == (1, True)
    code, out, _ = run(capsys, "convert", folder, tmp_path / "j", "--to", "gptq", "--json")
    assert json.loads(out)["format"] == "gptq"


def test_verify(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, out, _ = run(capsys, "verify", folder)
    assert (code, out) == (0, "Good: marlin_24, 12 layers and 1 other tensor checked.")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.q_proj.s"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    code, out, _ = run(capsys, "verify", folder)
    assert code == 1
    assert "model.layers.3.q_proj: scales[0, 0] is nan, wanted finite scales >= 0 (1 bad in all)" in out
    assert "Bad: 1 problem." in out
    code, out, _ = run(capsys, "verify", folder, "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False
    code, out, _ = run(capsys, "verify", folder.parent / "none")
    assert (code, "no such folder" in out) == (1, True)


def test_names_with_brackets_are_only_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = tmp_path / "m[/red]"
    dense = torch.randn(64, 64) * sparse24.magnitude_mask(torch.randn(64, 64))
    with CheckpointWriter(source, config={}) as writer:
        writer.add_weight("[/b][red]layer.q", transforms.round_to_nearest(transforms.sparse_values(dense), 4, None))
    for arguments in (("inspect", source), ("convert", source, tmp_path / "[x]", "--to", "gptq"), ("verify", source)):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        assert arguments[0] == "verify" or "m[/red]" in out
