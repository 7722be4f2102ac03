"""The guest in transformers on a GPU: a small model that has learnt something generates with our kernels.

Nothing is downloaded: a Llama with grouped-query attention learns a few lines by heart, 2:4 from the start, and is then
rounded to int4. Its tokens and logits are compared with those of the dequantised model in float32, by the rule of
docs/integrations.md ("Same tokens").
"""

from __future__ import annotations

import copy
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu_reference import ROUNDING

import spearfish
import tiny
from spearfish import reference, sparse24
from spearfish.checkpoint import CheckpointWriter, convert
from spearfish.integrations import transformers as guest
from spearfish.kernels import matmul as product
from spearfish.scheme import QuantWeight

DEVICE = "cuda"
DTYPES = tuple(ROUNDING)
LAYERS, LINEARS = 4, 28
LINES, LENGTH, PROMPT = 4, 48, 16


@dataclass
class Made:
    """What was learnt [lines, length], the folder of the int4 2:4 model, its weights, and its float32 twin."""

    lines: torch.Tensor
    folder: Path
    weights: dict[str, QuantWeight]
    twin: Any


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    model = tiny.llama(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.05,
    )
    lines = torch.randint(2, 2048, (LINES, LENGTH), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    learn(model.to(DEVICE), lines)
    model.cpu()
    weights = {name: tiny.round_to_nearest(layer.weight, group=128) for name, layer in tiny.linears(model).items()}
    folder = tmp_path_factory.mktemp("learnt") / "model"
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    with CheckpointWriter(folder, config=config) as writer:
        for name, weight in weights.items():
            writer.add_weight(name, weight)
        for name, tensor in model.state_dict().items():
            if name.removesuffix(".weight") not in weights:
                writer.add_tensor(name, tensor)
    twin = spearfish.load(folder, dtype=torch.float32, device=DEVICE).dequantize()
    for name, weight in weights.items():
        assert torch.equal(twin.get_submodule(name).weight.cpu(), reference.dequantize(weight)), name
    return Made(lines, folder, weights, twin)


def learn(model: Any, lines: torch.Tensor) -> None:
    """The lines by heart, with the linears 2:4 all along."""
    model.requires_grad_(True)
    masks = {layer: sparse24.magnitude_mask(layer.weight.detach().abs()) for layer in tiny.linears(model).values()}
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(60):
        for layer, mask in masks.items():
            layer.weight.data *= mask
        loss = model(input_ids=lines, labels=lines).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    for layer, mask in masks.items():
        layer.weight.data *= mask
    model.requires_grad_(False)
    assert float(loss.detach()) < 0.1, "nothing was learnt, so tokens would be chosen by chance"


@dataclass
class Ran:
    """The products that our kernels made: (family of kernels, tokens, n, k) for each."""

    calls: list[tuple[str, int, int, int]] = field(default_factory=list)

    def families(self, tokens: int) -> set[str]:
        return {family for family, m, _, _ in self.calls if m == tokens}

    def count(self, tokens: int) -> int:
        return sum(m == tokens for _, m, _, _ in self.calls)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Notes every launch from here on."""
    seen, choose = Ran(), product.choose

    @dataclass
    class Spy:
        family: Any

        def bind(self, config: Any, problem: Any, device: int) -> Any:
            bound, call = self.family.bind(config, problem, device), (self.family.name, *sizes(problem))

            def launch(*tensors: Any) -> None:
                seen.calls.append(call)
                bound(*tensors)

            return launch

    def sizes(problem: Any) -> tuple[int, int, int]:
        return problem.m, problem.n, problem.k

    def spying(*arguments: Any) -> tuple[Any, Any]:
        family, config = choose(*arguments)
        return Spy(family), config

    monkeypatch.setattr(product, "choose", spying)
    monkeypatch.setattr(product, "_bound", {})  # launches that were bound before have no spy
    return seen


def load(made: Made, dtype: torch.dtype) -> Any:
    """The model as our loader gives it, and as plain `from_pretrained` does."""
    if dtype == torch.float16:
        model = spearfish.load(made.folder, dtype=dtype, device=DEVICE)
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(made.folder, dtype=dtype, device_map="auto")
    layers = dict(guest.quantised(model))
    assert layers.keys() == made.weights.keys()
    for name, layer in layers.items():
        assert layer.prepared.stream is not None, f"{name}: {layer.prepared.path}"
        assert layer.prepared.dense is None
        assert layer.prepared.device.type == torch.device(DEVICE).type
    return model


def allowance(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """By how much a logit may differ from the twin's [..., vocabulary]: the rule of docs/integrations.md."""
    roundings = 16 * LAYERS + 4
    return ROUNDING[dtype] * roundings * logits.square().mean(-1).sqrt()


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids, use_cache=False).logits.float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_tokens_as_the_dequantised_model(made: Made, ran: Ran, dtype: torch.dtype) -> None:
    """Prefill and then one token at a time, for several lines at once and for one."""
    model = load(made, dtype)
    decided = chosen = 0
    for prompts in (made.lines[:, :PROMPT], made.lines[:1, :PROMPT]):
        batch, steps = len(prompts), LENGTH - PROMPT
        ran.calls.clear()
        ids = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=steps, do_sample=False, pad_token_id=0
        )
        assert ids.shape == (batch, LENGTH)
        # Every quantised layer once for the prompt, and once for each token but the last, by a kernel that reads the
        # packed weight: never dequantised for the library.
        assert ran.count(batch * PROMPT) == LINEARS
        assert ran.count(batch) == LINEARS * (steps - 1)
        assert len(ran.calls) == LINEARS * steps
        assert ran.families(batch * PROMPT) | ran.families(batch) <= {"portable", "hopper"}
        if product.kernel_choice() != "auto":
            assert ran.families(batch) == {product.kernel_choice()}

        truth = logits_of(made.twin, ids[:, :-1])[:, PROMPT - 1 :]
        best = truth.max(-1).values
        gap = best - truth.gather(-1, ids[:, PROMPT:, None])[..., 0]
        tie = 2 * allowance(truth, dtype)
        wrong = gap > tie
        assert not wrong.any(), f"line, step {wrong.nonzero()[0].tolist()}: {gap[wrong][0]:.3f} below the twin's best"
        decided += int((best - truth.topk(2).values[..., 1] > tie).sum())
        chosen += gap.numel()
    assert decided > 0.9 * chosen, f"only {decided} of {chosen} tokens are beyond a tie: the test has no force"
    print(f"{dtype}: {decided} of {chosen} tokens decided; kernels: {', '.join(sorted({c[0] for c in ran.calls}))}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_within_the_allowance(made: Made, ran: Ran, dtype: torch.dtype) -> None:
    """What the rule of ties rests on, on lines that were learnt and on noise."""
    noise = torch.randint(2, 2048, (LINES, LENGTH), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    model = load(made, dtype)
    for ids in (made.lines, noise):
        truth = logits_of(made.twin, ids)
        off = (logits_of(model, ids) - truth).abs().amax(-1) / allowance(truth, dtype)
        print(f"{dtype}: at most {float(off.max()):.0%} of the allowance")
        assert float(off.max()) <= 1
        assert float(off.max()) > 0, "equal to the float32 twin: no rounding, so no kernel, took place"
    assert ran.count(LINES * LENGTH) == 2 * LINEARS


def test_gptq_by_name_keeps_our_kernels_out(made: Made, ran: Ran, tmp_path: Path) -> None:
    convert(made.folder, tmp_path / "gptq", "gptq")
    answers = {}
    for asked, launches in ((None, LINEARS), ("gptq", 0)):
        model = spearfish.load(tmp_path / "gptq", dtype=torch.float16, device=DEVICE, quantization=asked)
        ran.calls.clear()
        answers[asked] = logits_of(model, made.lines)
        assert len(ran.calls) == launches
        assert {layer.prepared.stream is None for _, layer in guest.quantised(model)} == {launches == 0}
    limit = 2 * allowance(answers["gptq"], torch.float16)
    assert bool(((answers[None] - answers["gptq"]).abs().amax(-1) <= limit).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saving_writes_the_bytes_that_were_loaded(made: Made, dtype: torch.dtype, tmp_path: Path) -> None:
    load(made, dtype).save_pretrained(tmp_path / "again")
    before, after = (load_file(folder / "model.safetensors") for folder in (made.folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        local = name.rpartition(".")[2]
        if local in ("B_24", "B_meta", "s"):
            assert after[name].dtype == tensor.dtype
            assert torch.equal(after[name], tensor), name
        else:  # what is not quantised is the model's own, in the type it was loaded in
            assert torch.equal(after[name], tensor.to(dtype)), name
    blocks = [
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (made.folder, tmp_path / "again")
    ]
    assert blocks[0] == blocks[1]


def test_dequantised_on_the_gpu_is_the_twin(made: Made) -> None:
    """From the tile stream back to the values of the file."""
    dense = load(made, torch.float16).dequantize()
    assert not list(guest.quantised(dense))
    for name in made.weights:
        weight = dense.get_submodule(name).weight
        assert weight.device.type == torch.device(DEVICE).type
        assert torch.equal(weight, made.twin.get_submodule(name).weight.half()), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_inside_the_model_compiles_without_a_graph_break(made: Made, ran: Ran, dtype: torch.dtype) -> None:
    model = load(made, dtype)
    eager = logits_of(model, made.lines)
    ran.calls.clear()
    model.model.layers[1].compile(fullgraph=True)
    compiled = logits_of(model, made.lines)
    assert ran.count(LINES * LENGTH) == LINEARS, "the compiled block does not run our kernels"
    assert bool(((compiled - eager).abs().amax(-1) <= allowance(eager, dtype)).all())


def test_adapters_train_on_top(made: Made, ran: Ran, tmp_path: Path) -> None:
    """Gradients pass our layers as they pass the dense ones of the twin, and a line that was never seen is learnt."""
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)
    dtype = torch.bfloat16
    settings = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(load(made, dtype), settings).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, and then no gradient passes to A
            parameter.data.normal_(std=0.01)
    model.save_pretrained(tmp_path)
    twin = PeftModel.from_pretrained(copy.deepcopy(made.twin), tmp_path, is_trainable=True).train()
    fresh = torch.randint(2, 2048, (LINES, LENGTH), generator=torch.Generator().manual_seed(3)).to(DEVICE)

    gradients = []
    for each in (model, twin):
        each(input_ids=fresh, labels=fresh).loss.backward()
        gradients.append({n: p.grad.float() for n, p in each.named_parameters() if p.requires_grad})
    ours, theirs = gradients
    assert ours.keys() == theirs.keys()
    assert len(ours) == 2 * LAYERS * 4
    for name, gradient in ours.items():
        assert gradient.isfinite().all(), name
        alike = torch.cosine_similarity(gradient.flatten(), theirs[name].flatten(), dim=0)
        assert alike > 0.99, f"{name}: {float(alike):.4f}"
        assert float(gradient.norm() / theirs[name].norm()) == pytest.approx(1, abs=0.05), name
    assert ran.count(LINES * LENGTH) == LINEARS

    frozen = {name: layer.prepared.stream.clone() for name, layer in guest.quantised(model)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for _ in range(12):
        loss = model(input_ids=fresh, labels=fresh).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.7 * losses[0], losses
    assert all(torch.equal(layer.prepared.stream, frozen[name]) for name, layer in guest.quantised(model))
