"""`spearfish.load` and `spearfish generate`: the tokens of the dense model that holds the dequantised weights."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spearfish
import tiny
from spearfish import reference
from spearfish.checkpoint import CheckpointWriter
from spearfish.errors import FormatError, SpearfishError, UnsupportedError
from spearfish.scheme import QuantWeight

PROMPT = torch.tensor([[5, 77, 301, 9, 150]])


def save(folder: Path, model: nn.Module, weights: dict[str, QuantWeight], form: str = "marlin_24") -> nn.Module:
    """Write `model` with `weights` in the place of its linears; returns its dense twin."""
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    with CheckpointWriter(folder, config=config, format=form) as writer:
        for name, weight in weights.items():
            writer.add_weight(name, weight)
        for name, tensor in model.state_dict().items():
            if name.removesuffix(".weight") not in weights:
                writer.add_tensor(name, tensor)
    twin = copy.deepcopy(model)
    for name, weight in weights.items():
        twin.get_submodule(name).weight.data = reference.dequantize(weight)
    return twin


def greedy(model: Any, tokens: int = 24) -> list[int]:
    with torch.inference_mode():
        return model.generate(PROMPT.to(model.device), max_new_tokens=tokens, do_sample=False)[0].tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A marlin_24 folder of a tiny Llama with biases, and its dense twin."""
    folder = tmp_path_factory.mktemp("load") / "tiny"
    model = tiny.llama(bias=True)
    weights = {name: tiny.round_to_nearest(layer.weight) for name, layer in tiny.linears(model).items()}
    twin = save(folder, model, weights)
    tiny.save_tokenizer(folder, chat=True)
    return folder, twin


def test_same_logits_and_tokens_as_the_dense_twin(saved: tuple[Path, nn.Module]) -> None:
    folder, twin = saved
    model = spearfish.load(folder, device="cpu")
    kinds = {type(model.get_submodule(name)) for name in tiny.linears(twin)}
    assert kinds == {spearfish.QuantLinear}
    assert model.dtype == torch.float32
    assert not model.training
    with torch.inference_mode():
        assert torch.equal(model(PROMPT).logits, twin(PROMPT).logits)
    assert greedy(model) == greedy(twin)
    assert len(set(greedy(twin))) > 8, "a model that repeats one token would prove nothing"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [None, 32])
def test_schemes(tmp_path: Path, bits: int, group: int | None) -> None:
    model = tiny.llama(seed=bits)
    weights = {name: tiny.round_to_nearest(layer.weight, bits, group) for name, layer in tiny.linears(model).items()}
    twin = save(tmp_path / "m", model, weights)
    assert greedy(spearfish.load(tmp_path / "m", device="cpu"), 8) == greedy(twin, 8)


def test_layers_left_alone_and_tied_embeddings(tmp_path: Path) -> None:
    model = tiny.llama(tie_word_embeddings=True)
    chosen = {name: layer for name, layer in tiny.linears(model).items() if "mlp" in name}
    twin = save(tmp_path / "m", model, {name: tiny.round_to_nearest(layer.weight) for name, layer in chosen.items()})
    loaded = spearfish.load(tmp_path / "m", device="cpu")
    assert type(loaded.get_submodule("model.layers.0.self_attn.q_proj")) is nn.Linear
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert greedy(loaded) == greedy(twin)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_compute_types(saved: tuple[Path, nn.Module], dtype: torch.dtype, tmp_path: Path) -> None:
    """The weights are rounded once, from float32 to the compute type: the file's scales never are."""
    from transformers import LlamaForCausalLM

    folder, twin = saved
    twin.save_pretrained(tmp_path)
    model = spearfish.load(folder, dtype=dtype, device="cpu")
    assert model.dtype == dtype
    with torch.inference_mode():
        assert torch.equal(model(PROMPT).logits, LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)(PROMPT).logits)


def test_a_copy_holds_the_same_weights(saved: tuple[Path, nn.Module]) -> None:
    folder, twin = saved
    model = copy.deepcopy(spearfish.load(folder, dtype=torch.bfloat16, device="cpu"))
    layer = model.get_submodule("model.layers.1.mlp.down_proj")
    assert torch.equal(reference.dequantize(layer.weight), twin.get_submodule("model.layers.1.mlp.down_proj").weight)


def test_a_layer_that_the_model_has_not(tmp_path: Path) -> None:
    model = tiny.llama()
    weights = {name: tiny.round_to_nearest(layer.weight) for name, layer in tiny.linears(model).items()}
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    with CheckpointWriter(tmp_path / "m", config=config) as writer:
        for name, weight in weights.items():
            writer.add_weight(name, weight)
        for name, tensor in model.state_dict().items():
            if name.removesuffix(".weight") not in weights:
                writer.add_tensor(name, tensor)
    with pytest.raises(FormatError, match=r"layer model\.layers\.1\.\w+\.\w+, which LlamaForCausalLM does not have"):
        spearfish.load(tmp_path / "m")


def test_a_size_that_config_contradicts(saved: tuple[Path, nn.Module], tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "m"
    shutil.copytree(saved[0], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 320}))
    message = r"mlp\.\w+_proj is \[\d+, \d+\] in the file, but config.json makes it \[(320, 128|128, 320)\]"
    with pytest.raises(FormatError, match=message):
        spearfish.load(folder)


def test_a_missing_tensor_is_not_made_up(tmp_path: Path) -> None:
    """transformers would fill it at random with a warning."""
    model = tiny.llama()
    chosen = {name: tiny.round_to_nearest(layer.weight) for name, layer in tiny.linears(model).items()}
    lost = "model.layers.1.post_attention_layernorm.weight"
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    with CheckpointWriter(tmp_path / "m", config=config) as writer:
        for name, weight in chosen.items():
            writer.add_weight(name, weight)
        for name, tensor in model.state_dict().items():
            if name.removesuffix(".weight") not in chosen and name != lost:
                writer.add_tensor(name, tensor)
    with pytest.raises(FormatError, match=f"lacks 1 tensors that a LlamaForCausalLM needs: {lost}"):
        spearfish.load(tmp_path / "m")


def test_offloading_is_refused(saved: tuple[Path, nn.Module]) -> None:
    with pytest.raises(UnsupportedError, match="cannot be offloaded"):
        spearfish.load(saved[0], device_map={"model": "cpu", "lm_head": "disk"})
    with pytest.raises(UnsupportedError, match="not both"):
        spearfish.load(saved[0], device="cpu", device_map="cpu")


def test_damaged_folders_end_in_our_errors(saved: tuple[Path, nn.Module], tmp_path: Path) -> None:
    import shutil

    with pytest.raises(FormatError, match="no such folder"):
        spearfish.load(tmp_path / "nowhere")
    folder = tmp_path / "m"
    shutil.copytree(saved[0], folder)
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(SpearfishError, match="safetensors"):
        spearfish.load(folder)


def spearfish_command(*words: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("spearfish"), *words]
    return subprocess.run(command, capture_output=True, text=True, input=text)


def test_generate_prints_the_answer_alone(saved: tuple[Path, nn.Module]) -> None:
    from transformers import AutoTokenizer

    folder, twin = saved
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("the old bridge", return_tensors="pt")
    tokens = twin.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    wanted = tokenizer.decode(tokens, skip_special_tokens=True)
    result = spearfish_command("generate", folder, "the old bridge", "--raw", "-n", "12", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert result.stdout == wanted + "\n"
    assert "14 quantised layers" in result.stderr
    assert "tokens/s" in result.stderr
    assert "Warning" not in result.stderr


def test_generate_uses_the_chat_template_and_the_seed(
    saved: tuple[Path, nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    from spearfish import cli

    def answer(*options: str) -> str:
        with pytest.raises(SystemExit) as stop:
            cli.main(["generate", str(saved[0]), "the old bridge", "-n", "8", "--device", "cpu", *options])
        assert not stop.value.code
        return capsys.readouterr().out

    assert answer() != answer("--raw")
    sampled = answer("--temperature", "1", "--seed", "3")
    assert sampled == answer("--temperature", "1", "--seed", "3")
    assert sampled != answer("--temperature", "1", "--seed", "4")


def test_generate_refuses_the_tokenizer_of_another_model(
    saved: tuple[Path, nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    from spearfish import cli

    folder = shutil.copytree(saved[0], tmp_path / "mixed")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"word{i}" for i in range(saved[1].get_input_embeddings().weight.shape[0])])
    tokenizer.save_pretrained(folder)
    last = len(tokenizer) - 1
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", str(folder), tokenizer.convert_ids_to_tokens(last), "--raw", "--device", "cpu"])
    assert stop.value.code == 1
    assert f"gives token {last}, the model has" in capsys.readouterr().err


def test_serve_tells_a_folders_faults_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from spearfish import cli

    with pytest.raises(SystemExit) as stop:
        cli.main(["serve", str(tmp_path), "--port", "1"])
    assert stop.value.code == 1
    assert capsys.readouterr().err == f"error: {tmp_path}: no config.json in this folder; is it a checkpoint?\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "hello"], "nowhere is no folder"),
        (["FOLDER", "  "], "the prompt is empty"),
        (["EMPTY", "hello"], "no config.json in this folder"),
    ],
)
def test_generate_refuses_in_one_line(
    words: list[str], message: str, saved: tuple[Path, nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from spearfish import cli

    places = {"FOLDER": str(saved[0]), "EMPTY": str(tmp_path)}
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", *[places.get(word, word) for word in words]])
    out, err = capsys.readouterr()
    assert stop.value.code == 1
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
