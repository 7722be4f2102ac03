"""The guest in transformers: what it claims and what it leaves alone, saving, dequantising, adapters, the server."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.quantizers import auto

import spearfish
import tiny
from spearfish import models, reference, sparse24
from spearfish.checkpoint import CheckpointWriter, convert
from spearfish.cli import compress as cli_compress
from spearfish.errors import QuantizationError, UnsupportedError
from spearfish.integrations import transformers as guest
from spearfish.scheme import QuantScheme, QuantWeight

PROMPT = torch.tensor([[5, 77, 301, 9, 150]])
QUANTISED = ("marlin_24", "gptq", "gptq_v2", "ct-marlin-24", "ct-pack-quantized")
HALF = ("dense", "ct-sparse-24-bitmask")
ASKED = "dense: the plain path was asked for"


def write(folder: Path, model: nn.Module, weights: dict[str, QuantWeight], form: str = "marlin_24") -> None:
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    with CheckpointWriter(folder, config=config, format=form) as writer:
        for name, weight in weights.items():
            writer.add_weight(name, weight)
        for name, tensor in model.state_dict().items():
            if name.removesuffix(".weight") not in weights:
                writer.add_tensor(name, tensor)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A folder of the same int4 2:4 model in every format (n and k as the strictest of them wants), and its twin."""
    root = tmp_path_factory.mktemp("formats")
    model = tiny.llama(bias=True, hidden_size=256, num_key_value_heads=4)
    weights = {name: tiny.round_to_nearest(layer.weight, group=128) for name, layer in tiny.linears(model).items()}
    write(root / "marlin_24", model, weights)
    for form in QUANTISED[1:]:
        convert(root / "marlin_24", root / form, form)
    for form in HALF:
        convert(root / "marlin_24", root / form, form, dtype="float32")
    twin = copy.deepcopy(model)
    for name, weight in weights.items():
        twin.get_submodule(name).weight.data = reference.dequantize(weight)
    return root, twin


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(PROMPT).logits


@pytest.mark.parametrize("form", [*QUANTISED, *HALF])
def test_every_format_loads_to_the_same_model(made: tuple[Path, nn.Module], form: str) -> None:
    root, twin = made
    model = spearfish.load(root / form, device="cpu")
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(layer, spearfish.QuantLinear)
    assert layer.scheme.sparsity == "2:4"
    assert layer.scheme.bits == (16 if form in HALF else 4)
    assert torch.equal(logits(model), logits(twin))


@pytest.mark.parametrize("form", [*QUANTISED, "ct-sparse-24-bitmask"])
def test_plain_from_pretrained_loads_what_we_write(made: tuple[Path, nn.Module], form: str) -> None:
    root, twin = made
    model, info = AutoModelForCausalLM.from_pretrained(root / form, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(model), logits(twin))


@pytest.mark.parametrize("form", [*QUANTISED, *HALF])
def test_saving_writes_the_same_tensors_and_config(made: tuple[Path, nn.Module], form: str, tmp_path: Path) -> None:
    root, twin = made
    spearfish.load(root / form, device="cpu").save_pretrained(tmp_path / "again")
    before, after = load_file(root / form / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (root / form, tmp_path / "again"))
    assert new.get("quantization_config") == old.get("quantization_config")
    assert torch.equal(logits(spearfish.load(tmp_path / "again", device="cpu")), logits(twin))


def test_saving_over_the_folder_that_was_loaded(made: tuple[Path, nn.Module], tmp_path: Path) -> None:
    root, twin = made
    shutil.copytree(root / "marlin_24", tmp_path / "m")
    spearfish.load(tmp_path / "m", device="cpu").save_pretrained(tmp_path / "m")
    assert torch.equal(logits(spearfish.load(tmp_path / "m", device="cpu")), logits(twin))


def test_dequantised_is_a_plain_model(made: tuple[Path, nn.Module], tmp_path: Path) -> None:
    root, twin = made
    model = spearfish.load(root / "marlin_24", device="cpu")
    model.save_pretrained(tmp_path / "before")  # turns the dtype in the config into a word
    model = model.dequantize()
    assert not list(guest.quantised(model))
    assert torch.equal(logits(model), logits(twin))
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)), logits(twin))


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}])
def test_device_maps(made: tuple[Path, nn.Module], device_map: Any) -> None:
    if device_map == "auto" and torch.cuda.is_available():
        device_map = "cpu"
    root, twin = made
    model = AutoModelForCausalLM.from_pretrained(root / "gptq", dtype=torch.float32, device_map=device_map)
    assert torch.equal(logits(model), logits(twin))


def test_gptq_by_name_is_the_plain_path(made: tuple[Path, nn.Module]) -> None:
    """As in vLLM, where asking for the slower method forces it; a file that can only be ours stays ours."""
    root, twin = made

    def paths(folder: Path, quantization: str | None) -> set[str]:
        model = spearfish.load(folder, device="cpu", quantization=quantization)
        assert torch.equal(logits(model), logits(twin))
        assert all(layer.plain == (layer.prepared.path == ASKED) for _, layer in guest.quantised(model))
        return {layer.prepared.path for _, layer in guest.quantised(model)}

    kernels = {"dense: the device is cpu"}
    assert paths(root / "gptq", "gptq") == {ASKED}
    assert paths(root / "gptq", None) == paths(root / "gptq", "gptq_marlin") == kernels
    assert paths(root / "marlin_24", "gptq") == kernels
    with pytest.raises(QuantizationError, match="'gptq' was asked for, .* 'compressed-tensors'"):
        spearfish.load(root / "ct-marlin-24", device="cpu", quantization="gptq")


def test_automatic_maps_see_the_size_in_the_file() -> None:
    placeholder = guest.Placeholder(nn.Linear(64, 32, bias=False), nbytes=1000)
    assert sum(buffer.nbytes for buffer in placeholder.buffers()) == 1000
    assert not placeholder.state_dict()


def test_continuous_batching(made: tuple[Path, nn.Module]) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    root, twin = made
    prompts = [[5, 77, 301], [9, 150, 33, 4, 8]]
    settings = GenerationConfig(
        max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False
    )
    model = spearfish.load(root / "marlin_24", device="cpu")
    answers = model.generate_batch(
        inputs=prompts, generation_config=settings, continuous_batching_config=ContinuousBatchingConfig(num_blocks=16)
    )
    got = sorted(output.generated_tokens for output in answers.values())
    wanted = [
        twin.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert got == sorted(wanted)


def test_registering_twice_changes_nothing() -> None:
    configs, quantisers = dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING), dict(auto.AUTO_QUANTIZER_MAPPING)
    guest.register()
    assert configs == auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    assert quantisers == auto.AUTO_QUANTIZER_MAPPING
    assert not isinstance(configs["gptq"].original, guest.Switch)


PLAIN_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
ASYMMETRIC_GPTQ = {**PLAIN_GPTQ, "sym": False}
PLAIN_CT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}}},
}


@pytest.mark.parametrize(
    ("block", "ours"),
    [
        (PLAIN_GPTQ, True),  # taken over as gptq_marlin, as it was in vLLM
        ({**PLAIN_GPTQ, "checkpoint_format": "gptq_v2"}, True),
        (ASYMMETRIC_GPTQ, False),
        ({**PLAIN_GPTQ, "bits": 3}, False),
        ({**PLAIN_GPTQ, "checkpoint_format": "marlin_24"}, True),
        ({**PLAIN_GPTQ, "checkpoint_format": "marlin"}, True),
        ({**PLAIN_GPTQ, "is_marlin_format": True}, True),
        ({**PLAIN_GPTQ, "spearfish": {"format_version": "1.0"}}, True),
        (PLAIN_CT, False),
        ({**PLAIN_CT, "format": "marlin-24"}, True),
        ({**PLAIN_CT, "format": "dense", "sparsity_config": {"format": "sparse-24-bitmask"}}, True),
        ({**PLAIN_CT, "format": "nvfp4-pack-quantized"}, False),
        ({**PLAIN_CT, "format": 7, "config_groups": 3}, False),
    ],
)
def test_what_is_claimed(block: dict[str, Any], ours: bool) -> None:
    assert guest.is_ours(block) is ours


def test_other_files_go_to_the_original(made: tuple[Path, nn.Module], tmp_path: Path) -> None:
    """A GPTQ file that is not ours ends where it would without us: in the original's demand for its own package."""
    folder = tmp_path / "m"
    shutil.copytree(made[0] / "gptq", folder)
    (folder / "quantize_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": ASYMMETRIC_GPTQ}))
    switch = auto.AUTO_QUANTIZATION_CONFIG_MAPPING["gptq"]
    assert type(switch.from_dict(ASYMMETRIC_GPTQ)).__name__ == "GPTQConfig"
    with pytest.raises(ImportError, match="optimum"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(spearfish.load(folder, device="cpu")), logits(made[1])), "load takes every format"


def test_hosts_without_us_fail_loudly(made: tuple[Path, nn.Module]) -> None:
    """Never random weights and nonsense: transformers alone stops at every format that we write, but plain dense."""
    program = (
        "import sys\n"
        "from transformers import AutoModelForCausalLM\n"
        "for folder in sys.argv[1:]:\n"
        "    try:\n"
        "        AutoModelForCausalLM.from_pretrained(folder)\n"
        "    except Exception as error:\n"
        "        print('refused', type(error).__name__)\n"
        "    else:\n"
        "        print('LOADED', folder)\n"
        "print([name for name in sys.modules if name.startswith('spearfish')])\n"
    )
    folders = [str(made[0] / form) for form in (*QUANTISED, "ct-sparse-24-bitmask")]
    result = subprocess.run([sys.executable, "-c", program, *folders], capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert lines[-1] == "[]"
    assert [line.split()[0] for line in lines[:-1]] == ["refused"] * len(folders)


def test_a_config_that_lies_in_a_file_of_its_own(
    made: tuple[Path, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoGPTQ wrote quantize_config.json alone; what is saved again carries the block in config.json."""
    folder = tmp_path / "m"
    shutil.copytree(made[0] / "gptq", folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    block = {key: value for key, value in PLAIN_GPTQ.items() if key != "quant_method"}
    (folder / "quantize_config.json").write_text(json.dumps(block))
    model = spearfish.load(folder, device="cpu")
    assert torch.equal(logits(model), logits(made[1]))
    monkeypatch.setattr(models, "load_tokenizer", lambda folder: None)
    assert torch.equal(logits(cli_compress._open(str(folder), "cpu")[0]), logits(made[1]))  # as evaluate does
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"] == PLAIN_GPTQ


def test_old_bitmask_files_with_everything_compressed(made: tuple[Path, nn.Module], tmp_path: Path) -> None:
    """sparse-bitmask, unstructured, embeddings and head too: such layers become plain linears."""
    twin = copy.deepcopy(made[1])
    torch.manual_seed(0)
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    twin.get_submodule("model.layers.0.mlp.up_proj").weight.data.normal_()
    state = twin.state_dict()
    tensors = {name: tensor.clone() for name, tensor in state.items() if name not in names}
    for name in names:
        dense = state[name] * (torch.rand_like(state[name]) < 0.5)
        twin.get_parameter(name).data = dense
        mask = dense != 0
        bits = mask.reshape(dense.shape[0], -1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8)
        counts = mask.sum(1)
        tensors |= {
            f"{name}.compressed": dense[mask],
            f"{name}.bitmask": bits.sum(-1).to(torch.uint8),
            f"{name}.shape": torch.tensor(dense.shape),
            f"{name}.row_offsets": counts.cumsum(0) - counts,
        }
    config = {**twin.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    sparsity = {"format": "sparse-bitmask", "targets": ["Linear"]}
    config["compression_config"] = {"quant_method": "compressed-tensors", "sparsity_config": sparsity}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = spearfish.load(tmp_path, device="cpu")
    assert type(model.get_submodule("model.layers.0.mlp.up_proj")) is nn.Linear
    assert torch.equal(logits(model), logits(twin))


def test_mixed_layers(tmp_path: Path) -> None:
    """2:4 int4, dense int4 and untouched layers in one model."""
    model = tiny.llama(hidden_size=256, num_key_value_heads=4)
    weights = {
        name: tiny.round_to_nearest(layer.weight, group=128, sparse="down_proj" not in name)
        for name, layer in tiny.linears(model).items()
        if "o_proj" not in name
    }
    write(tmp_path / "m", model, weights)
    twin = copy.deepcopy(model)
    for name, weight in weights.items():
        twin.get_submodule(name).weight.data = reference.dequantize(weight)
    loaded = spearfish.load(tmp_path / "m", device="cpu")
    assert torch.equal(logits(loaded), logits(twin))
    kinds = {str(module.scheme) for _, module in guest.quantised(loaded)}
    assert kinds == {"int4 2:4 g128", "int4 dense g128"}


def test_a_state_dict_is_refused(made: tuple[Path, nn.Module]) -> None:
    config = json.loads((made[0] / "marlin_24" / "config.json").read_text())
    quantizer = guest.FileQuantizer(guest.FileConfig(config["quantization_config"]))
    with pytest.raises(UnsupportedError, match="from its folder"):
        quantizer.preprocess_model(made[1])


def test_adapters_train_on_a_frozen_base(made: tuple[Path, nn.Module], tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    root, twin = made
    torch.manual_seed(0)
    settings = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    base = spearfish.load(root / "marlin_24", device="cpu")
    frozen = {name: layer.weight.codes.clone() for name, layer in guest.quantised(base)}
    model = get_peft_model(base, settings).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert 0 < sum(parameter.numel() for parameter in trained) < 50_000
    optimiser = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(input_ids=PROMPT, labels=PROMPT).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert all(
        torch.equal(layer.weight.codes, frozen[name.removeprefix("base_model.model.").replace(".base_layer", "")])
        for name, layer in guest.quantised(model)
    )
    trained_logits = logits(model.eval())
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(twin))

    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(spearfish.load(root / "marlin_24", device="cpu"), tmp_path / "adapter")
    assert torch.equal(logits(again), trained_logits)

    # The same adapter on the dense twin, through PEFT's own layer: the truth for ours.
    dense = PeftModel.from_pretrained(copy.deepcopy(twin), tmp_path / "adapter")
    assert torch.allclose(logits(dense), trained_logits, atol=1e-4)


def test_all_linear_means_ours_too(tmp_path: Path) -> None:
    """PEFT looks for nn.Linear: in a mixed model it would train the few plain ones and say nothing."""
    from peft import LoraConfig, get_peft_model

    model = tiny.llama()
    weights = {
        name: tiny.round_to_nearest(layer.weight) for name, layer in tiny.linears(model).items() if "o_proj" not in name
    }
    write(tmp_path / "m", model, weights)
    base = spearfish.load(tmp_path / "m", device="cpu")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted.add_adapter("second", LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    for adapter in ("default", "second"):
        found = {name.split(".lora_A")[0] for name, _ in adapted.named_modules() if name.endswith(f"lora_A.{adapter}")}
        assert found == {f"base_model.model.{name}" for name in tiny.linears(model)}
    adapted(input_ids=PROMPT, labels=PROMPT).loss.backward()
    assert adapted.get_submodule("base_model.model.model.layers.0.mlp.up_proj.lora_B.default").weight.grad.any()


def test_gradients_reach_the_input_as_through_the_twin(made: tuple[Path, nn.Module]) -> None:
    root, twin = made
    model = spearfish.load(root / "ct-marlin-24", device="cpu")
    grads = []
    for each in (model, twin):
        embedded = each.get_input_embeddings()(PROMPT).detach().requires_grad_(True)
        each(inputs_embeds=embedded, labels=PROMPT).loss.backward()
        grads.append(embedded.grad)
    assert torch.equal(*grads)
    assert grads[0].abs().sum() > 0


def test_serve_answers_over_http(made: tuple[Path, nn.Module], tmp_path: Path) -> None:
    """The thin wrapper of transformers' own server, on a file that transformers alone could not run."""
    import os
    import socket

    root, twin = made
    folder = tmp_path / "tiny"
    shutil.copytree(root / "marlin_24", folder)
    tiny.save_tokenizer(folder, chat=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("spearfish"), "serve", folder, "--port", str(port), "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path)}
    server = subprocess.Popen([*command, "--dtype", "float32"], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        body = {
            "model": str(folder),
            "messages": [{"role": "user", "content": "the old bridge"}],
            "max_tokens": 8,
            "temperature": 0,
            "seed": 1,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        for _ in range(240):  # a busy machine may take long to import everything
            time.sleep(0.5)
            if server.poll() is not None:
                pytest.fail(f"the server ended: {server.stderr.read()}")
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    answer = json.load(reply)
                break
            except urllib.error.URLError as error:
                if not isinstance(error.reason, ConnectionRefusedError):
                    raise
        else:
            pytest.fail("the server did not come up in two minutes")
    finally:
        server.terminate()
        server.wait(20)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = twin.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    wanted = tokenizer.decode(tokens, skip_special_tokens=True)
    assert answer["choices"][0]["message"]["content"].strip() == wanted.strip()


def test_sixteen_bit_values_that_are_not_all_2_of_4(tmp_path: Path) -> None:
    """A dense folder in which only some layers are 2:4: those are found, the others stay plain."""
    model = tiny.llama()
    for name, layer in tiny.linears(model).items():
        if "mlp" in name:
            layer.weight.data *= sparse24.magnitude_mask(layer.weight.abs())
    model.save_pretrained(tmp_path)
    loaded = spearfish.load(tmp_path, device="cpu")
    found = {name for name, _ in guest.quantised(loaded)}
    assert found == {name for name in tiny.linears(model) if "mlp" in name}
    assert {layer.scheme for _, layer in guest.quantised(loaded)} == {QuantScheme(16)}
    assert torch.equal(logits(loaded), logits(model))
