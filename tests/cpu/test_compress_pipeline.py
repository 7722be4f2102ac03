"""The whole run on tiny models: what it writes, what it reports, what it refuses, and that a killed one goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tiny
from spearfish import sparse24
from spearfish.checkpoint import open_checkpoint
from spearfish.cli import app
from spearfish.compress import Recipe, compress
from spearfish.compress.hessian import Hessian, relative_error
from spearfish.compress.pipeline import estimate_memory
from spearfish.compress.recipe import matches, seconds, time_or_steps
from spearfish.compress.report import LayerReport, Report
from spearfish.compress.walk import Walker
from spearfish.errors import SpearfishError, UnsupportedError
from spearfish.models import Architecture, DenseModel, ShardReader, load_dense
from spearfish.reference import dequantize
from spearfish.text import windows

SMALL = Recipe(group_size=64, method="joint", num_samples=12, seq_len=32, catch_up=0.0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dense tiny Llama (3 blocks, tied embeddings, biases) and some text."""
    place = tmp_path_factory.mktemp("compress")
    model = tiny.llama(bias=True, num_hidden_layers=3, tie_word_embeddings=True)
    model.save_pretrained(place / "dense")
    tiny.save_tokenizer(place / "dense")
    words = tiny.words(1500)
    (place / "text.txt").write_text(" ".join(words) + "\n")
    return place


def recipe(place: Path, **changes: object) -> Recipe:
    return Recipe(
        **{**SMALL.to_dict(), "ignore": (), "dense_layers": (), "calibration": str(place / "text.txt"), **changes}
    )


@pytest.fixture(scope="module")
def done(place: Path) -> Report:
    return compress(place / "dense", place / "out", recipe(place), fast=False)


def test_what_is_written(place: Path, done: Report) -> None:
    checkpoint = open_checkpoint(place / "out")
    dense = load_dense(place / "dense")
    assert len(checkpoint.linears) == 3 * 7 == len(done.layers)
    for layer in done.layers:
        weight = checkpoint.weight(layer.name)
        assert (weight.scheme.bits, weight.scheme.group_size, weight.scheme.sparsity) == (4, 64, "2:4")
        assert not sparse24.violations(dequantize(weight)).any()
    # Embedding, norms and biases are kept to the bit; a tied head is not written a second time.
    assert "lm_head.weight" not in checkpoint.tensor_names
    for name in checkpoint.tensor_names:
        assert torch.equal(checkpoint.tensor(name), dense.reader.tensor(name)), name
    assert sum(name.endswith(".bias") for name in checkpoint.tensor_names) == 3 * 7
    assert not (place / "out.work").exists()
    assert json.loads((place / "out" / "report.json").read_text())["mean_error"] == pytest.approx(done.mean_error)


def test_the_reported_errors_are_those_of_the_compressed_models_inputs(place: Path, done: Report) -> None:
    """Slow truth: the whole model with the compressed weights put in, except the layer looked at and all after it."""
    dense, checkpoint = load_dense(place / "dense"), open_checkpoint(place / "out")
    chosen = recipe(place)
    tokens = windows(dense.tokenizer(), chosen.calibration, chosen.num_samples, chosen.seq_len, chosen.seed).tokens
    model = dense.whole()
    for layer in done.layers:
        if layer.name.endswith(("q_proj", "down_proj")):
            module = model.get_submodule(layer.name)
            hessian = Hessian(layer.k)
            handle = module.register_forward_pre_hook(lambda _, args, h=hessian: h.add(args[0]))
            with torch.no_grad():
                model(tokens)
            handle.remove()
            value = dequantize(checkpoint.weight(layer.name))
            truth = relative_error(module.weight, value, hessian.mean())
            assert layer.error == pytest.approx(truth, rel=1e-3)
            assert layer.error < 0.7 * layer.naive
        model.get_submodule(layer.name).weight.data.copy_(dequantize(checkpoint.weight(layer.name)))


KILLED = """
import os, signal, sys
from spearfish.compress import Recipe, compress
from spearfish.compress import workfolder
after = workfolder.WorkFolder.save_hidden if sys.argv[4] == "hidden" else workfolder.WorkFolder.save_block
def save(self, index, *rest):
    after(self, index, *rest)
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
setattr(workfolder.WorkFolder, after.__name__, save)
recipe = Recipe(group_size=64, method="joint", num_samples=12, seq_len=32, calibration=sys.argv[3], catch_up=0.0)
compress(sys.argv[1], sys.argv[2], recipe, fast=False)
"""


@pytest.mark.parametrize("moment", ["hidden", "block"])
def test_a_killed_run_goes_on_and_ends_the_same(place: Path, done: Report, moment: str) -> None:
    out = place / f"killed-{moment}"
    arguments = [str(place / "dense"), str(out), str(place / "text.txt"), moment]
    ended = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert not out.exists() and (out.with_name(f"{out.name}.work") / "block-00000.safetensors").exists()
    with pytest.raises(SpearfishError, match="another model or recipe"):
        compress(place / "dense", out, recipe(place, seed=1), fast=False)
    seen = []
    again = compress(
        place / "dense", out, recipe(place), fast=False, progress=lambda stage, at, of, note: seen.append((stage, at))
    )
    assert ("blocks", 0) not in seen and ("blocks", 2) in seen
    for file in ("model.safetensors", "config.json"):
        assert (out / file).read_bytes() == (place / "out" / file).read_bytes()
    assert [layer.error for layer in again.layers] == [layer.error for layer in done.layers]


def test_patterns_choose_layers(place: Path) -> None:
    chosen = recipe(
        place, ignore=("model.layers.0.self_attn.*",), dense_layers=("down_proj", r"re:layers\.2\."), method="sparsegpt"
    )
    report = compress(place / "dense", place / "mixed", chosen, fast=False)
    checkpoint = open_checkpoint(place / "mixed")
    assert sorted(report.ignored) == [f"model.layers.0.self_attn.{x}_proj" for x in "koqv"]
    assert "model.layers.0.self_attn.q_proj.weight" in checkpoint.tensor_names
    kinds = {name: info.scheme.sparsity for name, info in checkpoint.linears.items()}
    dense = {name for name, kind in kinds.items() if kind == "dense"}
    assert dense == {name for name in kinds if name.endswith("down_proj") or ".2." in name}
    for name in dense:
        error = next(layer.error for layer in report.layers if layer.name == name)
        assert error < 0.02


def test_bits_sixteen_prunes_only(place: Path) -> None:
    report = compress(place / "dense", place / "b16", recipe(place, bits=16), format="ct-sparse-24-bitmask", fast=False)
    assert all(layer.scheme == "16-bit 2:4" and layer.sparsity >= 0.5 for layer in report.layers)


def test_refusals_come_before_any_work(place: Path, done: Report) -> None:
    def refuse(
        wanted: str, out: str = "never", error: type[SpearfishError] = SpearfishError, **changes: object
    ) -> None:
        with pytest.raises(error, match=wanted):
            compress(place / "dense", place / out, recipe(place, **changes))
        assert not (place / "never").exists() and not (place / "never.work").exists()

    refuse("exists; choose another name", out="out")
    refuse("exists and is not a folder", out="text.txt")
    refuse("no method 'best'", method="best")
    refuse("longer than the model's longest input, 256", seq_len=300)
    refuse(r"gives \d+ windows", num_samples=10_000)
    refuse("bits must be 4, 8 or 16", bits=3)
    refuse("recovery trains codes and scales", bits=16, recover=5.0)
    with pytest.raises(SpearfishError, match="no key 'group_sise', did you mean 'group_size'"):
        Recipe.from_dict({"group_sise": 64})


def test_the_demo_knows_what_it_has_finished(place: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "examples"))
    import demo

    text = str(place / "text.txt")
    small = replace(
        demo.FULL, num_samples=2, seq_len=32, recover=0, recover_steps=1, calibration=text, recover_text=text
    )
    monkeypatch.setattr(demo, "RECIPE", small)
    monkeypatch.setattr(demo, "OUT", place / "demo")
    assert not demo.finished()
    compress(place / "dense", demo.OUT, small, fast=False)
    assert demo.finished()


def test_a_folder_that_must_not_be_replaced_is_refused_before_any_work(place: Path, tmp_path: Path) -> None:
    stages: list[str] = []

    def refuse(wanted: str, out: Path) -> None:
        with pytest.raises(SpearfishError, match=wanted):
            compress(place / "dense", out, recipe(place), overwrite=True, progress=lambda *said: stages.append(said[0]))
        assert not out.with_name(f"{out.name}.work").exists()

    refuse("must not be the source folder", place / "dense")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("mine")
    refuse("holds files but no config.json", tmp_path / "notes")
    assert not stages


def test_unknown_families_are_refused_by_name_or_forced(tmp_path: Path, place: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "neox")
    tiny.save_tokenizer(tmp_path / "neox")
    with pytest.raises(UnsupportedError, match="'gpt_neox'; known are gemma3_text, llama"):
        compress(tmp_path / "neox", tmp_path / "out", recipe(place))
    report = compress(tmp_path / "neox", tmp_path / "out", recipe(place), force_generic=True, fast=False)
    assert len(report.layers) == 8 and max(layer.error for layer in report.layers) < 0.3


def test_activations_that_overflow_are_named(place: Path, tmp_path: Path) -> None:
    model = tiny.llama(num_hidden_layers=1)
    model.model.embed_tokens.weight.data[260] = float("inf")  # the first merge, in nearly every window
    model.save_pretrained(tmp_path / "dense")
    tiny.save_tokenizer(tmp_path / "dense")
    with pytest.raises(SpearfishError, match=r"layers\.0\.self_attn\.o_proj: 384 of 384 .* non-finite"):
        compress(tmp_path / "dense", tmp_path / "out", recipe(place), fast=False)


def test_bad_layers_make_a_warning() -> None:
    report = Report("m", "out", {}, {})
    fine = LayerReport("a", 64, 64, "int4", 0.1, 0.03, 0.5, 1.0)
    report.layers = [fine]
    report.judge()
    assert report.warnings == []
    lost = LayerReport("b", 64, 64, "int4", 0.9, 0.5, 0.5, 1.0)
    broken = LayerReport("c", 4, 4, "int4", 1.0, float("nan"), 0.5, 1.0)
    report.layers = [fine, lost, broken]
    report.judge()
    assert any("2 layers lose more than 30%" in warning and "--dense-layers" in warning for warning in report.warnings)
    assert any("on average" in warning for warning in report.warnings)


def test_a_7b_model_is_estimated_to_fit_24_gib(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig()  # the default is Llama 7B
    config.save_pretrained(tmp_path)
    dense = DenseModel("7b", tmp_path, config.to_dict(), Architecture(), ShardReader.__new__(ShardReader))
    walker = Walker(dense, torch.device("cpu"), fast=False)
    estimate = estimate_memory(dense, walker, Recipe())
    hidden, block, largest_hessian = 2 * 32 * 512 * 4096, 202_383_360, 11008**2
    assert 4 * (block + hidden + 3 * largest_hessian) < estimate < 16 * 2**30
    # Catching up takes the dense block and its hidden states beside those of the one at work.
    assert estimate + 4 * hidden < estimate_memory(dense, walker, Recipe(catch_up=1.0)) < 16 * 2**30
    # Training one block takes six numbers a weight beside the block and four sets of hidden states.
    assert 4 * (2 * hidden + 7 * block) < estimate_memory(dense, walker, Recipe(reconstruct=20)) < 16 * 2**30
    # Recovery holds both models and an optimiser: a user must be told before the blocks are done.
    assert estimate_memory(dense, walker, Recipe(recover=60.0)) > 18 * 6_476_005_376


def test_patterns_and_times() -> None:
    assert matches("model.layers.3.mlp.down_proj", ("down_proj",))
    assert matches("model.layers.3.mlp.down_proj", ("*.3.mlp.*",))
    assert not matches("model.layers.13.mlp.down_proj", (r"re:layers\.3\.",))
    with pytest.raises(SpearfishError, match="no regular expression"):
        matches("x", ("re:(",))
    assert [seconds(text) for text in ("90", "90s", "5m", "1.5h", "0")] == [90, 90, 300, 5400, 0]
    for text, parse in (("five", seconds), ("50steps", seconds), ("-3steps", time_or_steps)):
        with pytest.raises(SpearfishError, match="no length of time"):
            parse(text)
    assert [time_or_steps(text) for text in ("50steps", "1 step", "5m")] == [(0, 50), (0, 1), (300, None)]


def test_the_verbs(place: Path) -> None:
    run = CliRunner()
    text = str(place / "text.txt")
    command = ["compress", str(place / "dense"), str(place / "by-verb"), "--calibration", text, "--num-samples", "4"]
    command += ["--seq-len", "32", "--group-size", "64", "--method", "magnitude", "--device", "cpu", "--layers"]
    answer = run.invoke(app, command, env={"COLUMNS": "200"})
    assert answer.exit_code == 0, answer.output
    assert "21 layers in" in answer.output and "quality" in answer.output and "model.layers.2.mlp" in answer.output
    command = ["evaluate", str(place / "by-verb"), "--text", text, "--windows", "3", "--length", "32", "--json"]
    answer = run.invoke(app, [*command, "--against", str(place / "dense"), "--device", "cpu"])
    assert answer.exit_code == 0, answer.output
    quality = json.loads(answer.stdout)
    assert quality["predicted"] == 93 and quality["kl"] > 0.001 and quality["perplexity"] > 1


def test_pruned_16_bit_values_keep_the_models_type(place: Path, tmp_path: Path) -> None:
    tiny.llama(num_hidden_layers=1).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    tiny.save_tokenizer(tmp_path / "dense")
    report = compress(
        tmp_path / "dense", tmp_path / "out", recipe(place, bits=16, num_samples=2), format="dense", fast=False
    )
    values = open_checkpoint(tmp_path / "out").tensor("model.layers.0.mlp.down_proj.weight")
    assert values.dtype == torch.bfloat16
    assert sparse24.violations(values != 0).sum() == 0
    assert report.bytes_after == pytest.approx(report.bytes_before, rel=0.05)


def test_kept_work_serves_a_later_recovery(place: Path, tmp_path: Path) -> None:
    few = {"num_samples": 2, "recover_text": str(place / "text.txt")}
    compress(place / "dense", tmp_path / "a", recipe(place, **few), fast=False, keep_work=True)
    before = (tmp_path / "a.work" / "block-00002.safetensors").stat().st_mtime_ns
    stages: list[tuple[str, int]] = []
    compress(
        place / "dense",
        tmp_path / "a",
        recipe(place, **few, recover_steps=1),
        fast=False,
        overwrite=True,
        keep_work=True,
        progress=lambda stage, done, total, note: stages.append((stage, done)),
    )
    assert ("blocks", 0) not in stages
    assert (tmp_path / "a.work" / "block-00002.safetensors").stat().st_mtime_ns == before
    assert not (tmp_path / "a.work" / "recovery.safetensors").exists()
    compress(place / "dense", tmp_path / "b", recipe(place, **few, recover_steps=1), fast=False)
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert a == b
    # What another recovery has learnt, or its text, is not gone on with; what the same one has is.
    for name in ("recovery", "recovery-text"):
        (tmp_path / "a.work" / f"{name}.safetensors").write_bytes(b"of one step")
    with pytest.raises(SpearfishError, match="recovery.safetensors is damaged"):
        compress(place / "dense", tmp_path / "a", recipe(place, **few, recover_steps=1), fast=False, overwrite=True)
    compress(place / "dense", tmp_path / "a", recipe(place, **few, recover_steps=2), fast=False, overwrite=True)


def test_kept_work_still_tells_what_was_left_out(place: Path, tmp_path: Path) -> None:
    few = recipe(place, num_samples=2, ignore=("*.0.mlp.up_proj",))
    first = compress(place / "dense", tmp_path / "a", few, fast=False, keep_work=True)
    again = compress(place / "dense", tmp_path / "a", few, fast=False, overwrite=True)
    assert first.ignored == again.ignored == ["model.layers.0.mlp.up_proj"]
    assert not any("never reached" in warning for warning in first.warnings + again.warnings)
