"""Whole models in a real vLLM on a CPU, in float32: token for token what their dense twins say."""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from conftest import Shop
from spearfish.checkpoint.config import OUR_KEY
from spearfish.checkpoint.reader import BITMASK_PARTS

PROMPTS = ([1, 5, 7, 9, 30], [1, 100, 200, 3], list(range(2, 40)))
TOKENS = 16
_twins: dict[Path, Any] = {}


def run(folder: Path, adapter: Path | None = None, **options: Any) -> tuple[list[list[int]], LLM]:
    """The tokens that greedy decoding gives, and the engine."""
    settings = {"enforce_eager": True, "dtype": "float32", "max_model_len": 128, "enable_lora": adapter is not None}
    engine = LLM(str(folder), **{**settings, **options})
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    request = None if adapter is None else LoRARequest("adapter", 1, str(adapter))
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    answers = engine.generate(prompts, greedy, use_tqdm=False, lora_request=request)
    return [list(answer.outputs[0].token_ids) for answer in answers], engine


def tokens(folder: Path, **options: Any) -> list[list[int]]:
    found, engine = run(folder, **options)
    del engine
    gc.collect()
    return found


def twin(shop: Shop) -> list[list[int]]:
    """What the dense model says, in vLLM itself."""
    if shop.dense not in _twins:
        _twins[shop.dense] = tokens(shop.dense)
    return _twins[shop.dense]


def as_written_by_others(folder: Path) -> Path:
    """The same folder without our key in its config."""
    out = folder.with_name(folder.name + "-foreign")
    if not out.exists():
        out.mkdir()
        for file in folder.iterdir():
            if file.suffix == ".json" and "config" in file.name:
                block = json.loads(file.read_text())
                block.get("quantization_config", block).pop(OUR_KEY, None)
                (out / file.name).write_text(json.dumps(block))
            else:
                (out / file.name).write_bytes(file.read_bytes())
    return out


def quantisation_of(engine: LLM) -> str:
    return str(engine.llm_engine.vllm_config.model_config.quantization)


@pytest.mark.parametrize(
    ("form", "method"),
    [
        ("marlin_24", "gptq_marlin_24"),
        ("marlin", "marlin"),
        ("ct-marlin-24", "gptq_marlin_24"),
        ("ct-pack-quantized", "gptq_marlin_24"),
        ("gptq", "gptq_marlin_24"),
    ],
)
def test_every_quantised_format(int4: Shop, form: str, method: str) -> None:
    found, engine = run(int4.as_format(form))
    assert found == twin(int4)
    assert quantisation_of(engine) == method


@pytest.mark.parametrize("form", ["marlin_24", "ct-pack-quantized"])
def test_files_of_other_writers(int4: Shop, form: str) -> None:
    found, engine = run(as_written_by_others(int4.as_format(form)))
    assert found == twin(int4)
    assert quantisation_of(engine) == "gptq_marlin_24"


def test_sixteen_bits_and_tied_embeddings(half: Shop) -> None:
    found, engine = run(half.as_format("ct-sparse-24-bitmask"))
    assert found == twin(half)
    assert quantisation_of(engine) == "sparse24"


def test_old_names_of_bitmask_files(half: Shop, tmp_path: Path) -> None:
    """The oldest writers put the parameter's own name in front, and the block under another key."""
    new, old = half.as_format("ct-sparse-24-bitmask"), tmp_path / "old"
    shutil.copytree(new, old)
    parts = tuple(f".{part}" for part in BITMASK_PARTS)
    tensors = load_file(new / "model.safetensors")
    renamed = {
        f"{name.rpartition('.')[0]}.weight.{name.rpartition('.')[2]}" if name.endswith(parts) else name: tensor
        for name, tensor in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    save_file(renamed, old / "model.safetensors", {"format": "pt"})
    config = json.loads((old / "config.json").read_text())
    block = config.pop("quantization_config")
    block.pop(OUR_KEY)
    (old / "config.json").write_text(json.dumps(config | {"compression_config": block}))
    found, engine = run(old)
    assert found == twin(half)
    assert quantisation_of(engine) == "sparse24"


def test_layers_of_many_kinds_in_one_fused_layer(mixed: Shop) -> None:
    assert tokens(mixed.as_format("marlin_24")) == twin(mixed)


def test_a_dense_folder_stays_with_vllm(int4: Shop) -> None:
    _, engine = run(int4.dense)
    assert quantisation_of(engine) == "None"


def test_compiled(int4: Shop) -> None:
    """vLLM's compilation: one graph without a break, or it raises."""
    assert tokens(int4.as_format("marlin_24"), enforce_eager=False) == twin(int4)


def test_compiled_with_parts_of_many_kinds(mixed: Shop) -> None:
    assert tokens(mixed.as_format("marlin_24"), enforce_eager=False) == twin(mixed)


def test_invented_weights(mixed: Shop, tmp_path: Path) -> None:
    """--load-format dummy, which people measure with: from a folder with weights, and from one with a config only."""
    folder = mixed.as_format("marlin_24")
    assert tokens(folder, load_format="dummy") != twin(mixed)
    for file in folder.glob("*.json*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert len(tokens(tmp_path, load_format="dummy")) == len(PROMPTS)


def test_an_adapter_on_top(int4: Shop, tmp_path: Path) -> None:
    """A LoRA adapter on the quantised model says what it says on the dense twin, and not what the base says."""
    generator = torch.Generator().manual_seed(3)
    tensors, rank = {}, 4
    for name in int4.weights:
        n, k = int4.weights[name].n, int4.weights[name].k
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, k, generator=generator) * 0.2
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(n, rank, generator=generator) * 0.2
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in int4.weights})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    adapted = tokens(int4.as_format("marlin_24"), adapter=tmp_path, max_lora_rank=8)
    assert adapted == tokens(int4.dense, adapter=tmp_path, max_lora_rank=8)
    assert adapted != twin(int4)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read()
    return json.loads(text) if text else None


@pytest.mark.timeout(600)
def test_the_server_with_two_ranks(mixed: Shop, tmp_path: Path) -> None:
    """The OpenAI server on loopback, tensor-parallel, with no flag that says what the file is. Each rank's o_proj keeps
    one group of 64, and its config travels with the patterns of the layers that differ."""
    port = free_port()
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(mixed.as_format("marlin_24"))]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--tensor-parallel-size", "2", "--enforce-eager", "--dtype", "float32", "--max-model-len", "128"]
    log = tmp_path / "server.log"
    with log.open("w") as sink:
        server = subprocess.Popen(command, env=environment, stdout=sink, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 500
        while True:
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not come up:\n{log.read_text()[-4000:]}")
            try:
                ask(port, "/health")
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(1)
        body = {"model": "tiny", "prompt": PROMPTS, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = ask(port, "/v1/completions", {**body, "return_token_ids": True})
        assert [choice["token_ids"] for choice in answer["choices"]] == twin(mixed)
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
