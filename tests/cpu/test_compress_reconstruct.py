"""Block-wise reconstruction and the budget of dense layers, against the whole model run the slow way."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import nn

import tiny
from spearfish import sparse24
from spearfish.checkpoint import open_checkpoint
from spearfish.checkpoint.reader import layer_format
from spearfish.compress import Recipe, Report, compress, reconstruct
from spearfish.compress.hessian import Hessian
from spearfish.compress.reconstruct import split
from spearfish.compress.recover import distance
from spearfish.compress.sensitivity import Unit, choose, dense_bytes, measure_block
from spearfish.compress.solve import solve_group
from spearfish.compress.walk import Walker
from spearfish.errors import SpearfishError
from spearfish.formats import FORMATS
from spearfish.models import load_dense
from spearfish.reference import dequantize
from spearfish.scheme import QuantScheme, QuantWeight
from spearfish.text import cut_windows, read_text, windows

CPU = torch.device("cpu")
STEPS = 30
# Random weights pruned by magnitude have far to go; the rate of now is for real ones, solved well.
FAR = partial(reconstruct.Settings, rate=0.05)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dense tiny Llama, whose last down_proj writes far more than the rest, and some text."""
    place = tmp_path_factory.mktemp("reconstruct")
    model = tiny.llama(initializer_range=0.05, num_hidden_layers=3)
    model.model.layers[2].mlp.down_proj.weight.data *= 8
    model.save_pretrained(place / "dense")
    tiny.save_tokenizer(place / "dense")
    words = tiny.words(3000)
    (place / "text.txt").write_text(" ".join(words))
    (place / "other.txt").write_text(" ".join(words[::-1]))
    return place


def recipe(place: Path, **changes: object) -> Recipe:
    base = {"group_size": 64, "method": "joint", "num_samples": 32, "seq_len": 32, "catch_up": 0.0}
    return Recipe(**{**base, "calibration": str(place / "text.txt"), **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reports(place: Path) -> dict[str, Report]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconstruct, "Settings", FAR)
        return {
            name: compress(place / "dense", place / name, recipe(place, method=method, reconstruct=steps), fast=False)
            for name, method, steps in (
                ("before", "magnitude", 0),
                ("after", "magnitude", STEPS),
                ("pruned", "joint", 0),
            )
        }


def states(place: Path, folder: str, tokens: torch.Tensor) -> list[torch.Tensor]:
    """What each block gives, from the whole model with a checkpoint's weights in it. The last one without the norm."""
    dense = load_dense(place / "dense")
    model = dense.whole()
    if folder != "dense":
        checkpoint = open_checkpoint(place / folder)
        for name in checkpoint.linears:
            model.get_submodule(name).weight.data.copy_(dequantize(checkpoint.weight(name)))
    seen: list[torch.Tensor] = []
    for block in model.model.layers:
        block.register_forward_hook(lambda _module, _args, out: seen.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        model(tokens)
    return seen


def test_every_block_comes_closer_on_text_it_never_saw(place: Path, reports: dict[str, Report]) -> None:
    tokens = cut_windows(load_dense(place / "dense").tokenizer(), read_text(str(place / "other.txt")), 32)[:40]
    dense, before, after = (states(place, folder, tokens) for folder in ("dense", "before", "after"))
    for goal, worse, better in zip(dense, before, after, strict=True):
        assert distance(better, goal) < 0.7 * distance(worse, goal)


def test_the_outcome_is_that_of_the_whole_model(place: Path, reports: dict[str, Report]) -> None:
    chosen = recipe(place)
    tokens = windows(load_dense(place / "dense").tokenizer(), chosen.calibration, 32, 32, chosen.seed).tokens
    outcomes = reports["after"].reconstruct
    assert [outcome["blocks"] for outcome in outcomes] == [[f"model.layers.{i}"] for i in range(3)]
    assert reports["before"].reconstruct == [] and all(outcome["kept"] for outcome in outcomes)
    for index, outcome in enumerate(outcomes):
        training, judging = split(32, 0.125, chosen.seed + index)
        assert len(judging) == 4 and sorted([*training.tolist(), *judging.tolist()]) == list(range(32))
        goal, end = (states(place, folder, tokens[judging])[index] for folder in ("dense", "after"))
        assert outcome["after"] == pytest.approx(float(distance(end, goal)), rel=1e-3)
        if index == 0:  # the blocks behind it were solved on other inputs than those of the run without training
            start = states(place, "before", tokens[judging])[0]
            assert outcome["before"] == pytest.approx(float(distance(start, goal)), rel=1e-3)


def test_blocks_together_are_judged_behind_the_last(place: Path) -> None:
    """Against the whole model with the weights of its first two blocks changed."""
    dense = load_dense(place / "dense")
    tokens = cut_windows(dense.tokenizer(), read_text(str(place / "text.txt")), 32)[:24]
    walker = Walker(dense, CPU, fast=False)
    hidden = walker.embed(tokens)
    start: dict[str, QuantWeight] = {}
    goals = [hidden]
    for index in (0, 1):
        block = walker.load(index)
        goals.append(walker.forward(index, goals[-1]))
        for name, linear in block.named_modules():
            if isinstance(linear, nn.Linear):
                weight = tiny.round_to_nearest(linear.weight, group=64)
                start[f"{walker.paths[index]}.{name}"] = weight
                linear.weight.data.copy_(dequantize(weight))
    settings = FAR(steps=20, tokens=256)
    trained, outcome = reconstruct.reconstruct(walker, (0, 1), start, hidden, goals[1:], settings)
    assert outcome.blocks == walker.paths[:2] and outcome.kept and outcome.after < outcome.before
    changed = [name for name in start if (dequantize(trained[name]) != dequantize(start[name])).any()]
    assert {name.split(".")[2] for name in changed} == {"0", "1"}
    judges = split(24, 0.125, 0)[1]
    for weights, told in ((start, outcome.before), (trained, outcome.after)):
        model = dense.whole()
        wanted = model(tokens[judges], output_hidden_states=True).hidden_states[2]
        for name, weight in weights.items():
            model.get_submodule(name).weight.data.copy_(dequantize(weight))
        got = model(tokens[judges], output_hidden_states=True).hidden_states[2]
        assert told == pytest.approx(float(distance(got, wanted)), rel=1e-3)
    for name, weight in trained.items():
        assert torch.equal(walker.net.get_submodule(name).weight, dequantize(weight))


def test_together_they_come_closer(place: Path, reports: dict[str, Report]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconstruct, "Settings", FAR)
        report = compress(
            place / "dense",
            place / "both",
            recipe(place, method="magnitude", reconstruct=STEPS, together=2),
            fast=False,
        )
    assert [len(outcome["blocks"]) for outcome in report.reconstruct] == [2, 1]  # there are three
    first, second = report.reconstruct
    found = report.reconstruction
    assert found is not None and (found["blocks"], found["kept"]) == (3, 3)
    assert found["after"] == pytest.approx((first["after"] + second["after"]) / 2)
    report.reconstruct = [first, second | {"kept": False}]
    found = report.reconstruction
    assert found is not None and (found["blocks"], found["kept"]) == (3, 2)
    tokens = cut_windows(load_dense(place / "dense").tokenizer(), read_text(str(place / "other.txt")), 32)[:40]
    dense, before, both = (states(place, folder, tokens) for folder in ("dense", "before", "both"))
    for goal, worse, better in zip(dense, before, both, strict=True):
        assert distance(better, goal) < 0.7 * distance(worse, goal)


def test_masks_stay_and_nothing_is_added(place: Path, reports: dict[str, Report]) -> None:
    before, after = open_checkpoint(place / "before"), open_checkpoint(place / "after")
    assert before.tensor_names == after.tensor_names
    assert reports["before"].bytes_after == pytest.approx(reports["after"].bytes_after, abs=8)
    for name, info in after.linears.items():
        assert info.scheme == before.linears[name].scheme
        weight = after.weight(name)
        assert not sparse24.violations(dequantize(weight)).any()
        if ".layers.0." in name:  # the same solution was its start
            old = before.weight(name)
            assert weight.positions is not None and old.positions is not None
            stayed = (dequantize(weight) != 0) & (dequantize(old) != 0)
            assert (dequantize(weight) != dequantize(old))[stayed].any()
            a, b = ((dequantize(w) != 0).reshape(-1, 4) for w in (weight, old))
            assert ((a | b).sum(1) <= 2)[b.sum(1) == 2].all()


def test_what_is_solved_well_gains_too(place: Path) -> None:
    """From `joint`, at the rate of now; on enough text that what is learnt of it holds for other text too."""
    compress(place / "dense", place / "solved", recipe(place, num_samples=96), fast=False)
    more = recipe(place, num_samples=96, reconstruct=2 * STEPS)
    report = compress(place / "dense", place / "joint", more, fast=False)
    tokens = cut_windows(load_dense(place / "dense").tokenizer(), read_text(str(place / "other.txt")), 32)[:40]
    dense, before, after = (states(place, folder, tokens)[-1] for folder in ("dense", "solved", "joint"))
    assert any(outcome["kept"] for outcome in report.reconstruct)
    assert distance(after, dense) < distance(before, dense)


def test_training_that_does_harm_is_dropped(
    place: Path, reports: dict[str, Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    wild = partial(FAR, rate=50.0, scale_rate=1.0)
    monkeypatch.setattr(reconstruct, "Settings", wild)
    harmed = recipe(place, reconstruct=4, method="magnitude")
    report = compress(place / "dense", place / "wild", harmed, fast=False)
    assert not any(outcome["kept"] for outcome in report.reconstruct)
    assert (place / "wild" / "model.safetensors").read_bytes() == (place / "before" / "model.safetensors").read_bytes()


def test_bfloat16_trains_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconstruct, "Settings", FAR)
    report = compress(place / "dense", place / "fast", recipe(place, method="magnitude", reconstruct=STEPS), fast=True)
    assert all(outcome["kept"] and outcome["after"] < outcome["before"] for outcome in report.reconstruct)


def test_a_loss_that_is_not_finite_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "spearfish.compress.reconstruct.distance", lambda out, goal, by=None: (out * float("nan")).sum()
    )
    with pytest.raises(SpearfishError, match=r"model\.layers\.0: the loss is nan in step 0 of its reconstruction"):
        compress(place / "dense", place / "nan", recipe(place, reconstruct=2), fast=False)


KILLED = """
import os, signal, sys
from spearfish.compress import Recipe, compress, workfolder
moment, kept = sys.argv[4], getattr(workfolder.WorkFolder, sys.argv[4])
def save(self, what, *rest):
    kept(self, what, *rest)
    if what in (2, "sensitivity"):
        os.kill(os.getpid(), signal.SIGKILL)
setattr(workfolder.WorkFolder, moment, save)
recipe = Recipe(group_size=64, method="joint", num_samples=8, seq_len=32, calibration=sys.argv[3], reconstruct=4,
                together=2, budget=0.3, catch_up=0.0)
compress(sys.argv[1], sys.argv[2], recipe, fast=False)
"""


def test_killed_at_each_kind_of_moment_it_ends_the_same(place: Path) -> None:
    wanted = recipe(place, num_samples=8, reconstruct=4, together=2, budget=0.3)
    straight = compress(place / "dense", place / "straight", wanted, fast=False)
    for moment in ("save_facts", "save_hidden"):
        out = place / f"killed-{moment}"
        arguments = [str(place / "dense"), str(out), str(place / "text.txt"), moment]
        ended = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, check=False)
        assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
        assert out.with_name(f"{out.name}.work").exists() and not out.exists()
        again = compress(place / "dense", out, wanted, fast=False)
        for file in ("model.safetensors", "config.json"):
            assert (out / file).read_bytes() == (place / "straight" / file).read_bytes(), moment
        assert (again.reconstruct, again.budget) == (straight.reconstruct, straight.budget)


def test_a_unit_is_what_its_layers_alone_do_to_the_block(place: Path) -> None:
    """Slow truth: the whole dense model with the solved weights of one group in it."""
    dense, chosen = load_dense(place / "dense"), recipe(place, method="sparsegpt")
    tokens = windows(dense.tokenizer(), chosen.calibration, 8, 32, 0).tokens
    walker = Walker(dense, CPU, fast=False)
    hidden = walker.embed(tokens)
    walker.load(0)
    units = measure_block(walker, 0, hidden, chosen)
    names = [[name.rpartition(".")[2] for name in unit.layers] for unit in units]
    assert names == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    goal = states(place, "dense", tokens)[0]
    for unit in (units[0], units[3]):
        for dense_layers, got in (((), unit.sparse), (("*",), unit.dense)):
            model = dense.whole()
            linears = {name: model.get_submodule(name) for name in unit.layers}
            hessian = Hessian(next(iter(linears.values())).in_features)
            handle = linears[unit.layers[0]].register_forward_pre_hook(lambda _, a, h=hessian: h.add(a[0]))
            with torch.no_grad():
                model(tokens)
            handle.remove()
            solved = solve_group(linears, hessian, recipe(place, method="sparsegpt", dense_layers=dense_layers))
            for name, (weight, _) in solved.items():
                linears[name].weight.data.copy_(dequantize(weight))
            with torch.no_grad():
                out = model(tokens, output_hidden_states=True).hidden_states[1]
            assert got == pytest.approx(float(distance(out, goal)), rel=1e-3)
        assert unit.dense < 0.5 * unit.sparse
    assert units[0].nbytes == sum(dense_bytes(n, 128, QuantScheme(4, 64, sparsity="dense")) for n in (128, 64, 64))
    # The block is as dense as before.
    assert torch.equal(walker.forward(0, hidden), walker.forward(0, hidden))
    torch.testing.assert_close(walker.forward(0, hidden), goal, rtol=1e-4, atol=1e-5)


def test_the_choice_saves_what_the_best_choice_saves() -> None:
    """Against every choice there is; greedy is exact when all units are of one size."""
    torch.manual_seed(0)
    errors = torch.rand(8).tolist()
    units = [Unit((f"m.{i}.q_proj",), 100, error, 0.01) for i, error in enumerate(errors)]
    for budget in (0.0, 0.1, 0.25, 0.5, 0.9):
        size = int(budget * 8)
        best = max(sum(u.sparse - u.dense for u in some) for some in combinations(units, size))
        got = choose(units, budget)
        assert len(got) == size and sum(u.sparse - u.dense for u in got) == pytest.approx(best)
    # Bytes count, not layers: a large one that saves a little more loses against two small ones.
    mixed = [Unit(("large",), 200, 0.5, 0.0), Unit(("a",), 100, 0.4, 0.0), Unit(("b",), 100, 0.3, 0.0)]
    assert [unit.layers for unit in choose(mixed, 0.5)] == [("a",), ("b",)]
    # What is dense anyway uses up the budget, and dense where dense is no better wins nothing.
    assert choose(mixed, 0.5, fixed=("large",)) == []
    assert choose([Unit(("c",), 100, 0.1, 0.2), Unit(("d",), 300, 0.1, 0.05)], 0.5) == []


def test_a_mixed_checkpoint_keeps_the_budget_and_runs(place: Path, reports: dict[str, Report]) -> None:
    import spearfish

    report = compress(place / "dense", place / "mixed", recipe(place, budget=0.25), fast=False)
    assert report.budget is not None
    kept = [name for unit in report.budget["kept_dense"] for name in unit["layers"]]
    total = report.budget["bytes_if_all_dense"]
    assert 0 < report.budget["bytes_kept_dense"] <= 0.25 * total
    assert "model.layers.2.mlp.down_proj" in kept  # the one that writes eight times as much
    checkpoint = open_checkpoint(place / "mixed")
    assert {name for name, info in checkpoint.linears.items() if info.scheme.sparsity == "dense"} == set(kept)
    assert len(kept) + sum(len(unit["layers"]) for unit in report.budget["pruned"]) == len(checkpoint.linears) == 21
    gains = [(u["sparse"] - u["dense"]) / u["nbytes"] for u in report.budget["kept_dense"]]
    assert gains == sorted(gains, reverse=True)
    assert report.budget["dense_by_recipe"] == []
    # It loads and computes what its dequantised weights say, and lies nearer to the dense model than all pruned.
    tokens = cut_windows(load_dense(place / "dense").tokenizer(), read_text(str(place / "other.txt")), 32)[:8]
    model = spearfish.load(place / "mixed", device="cpu")
    with torch.no_grad():
        got = model(tokens, output_hidden_states=True).hidden_states
    goal, pruned, mixed = (states(place, folder, tokens) for folder in ("dense", "pruned", "mixed"))
    for ours, slow in zip(got[1:-1], mixed[:-1], strict=True):
        torch.testing.assert_close(ours, slow, rtol=1e-3, atol=1e-3)
    # The same bytes in the layers that matter least bring less.
    units = [Unit.from_dict(unit) for part in ("kept_dense", "pruned") for unit in report.budget[part]]
    backwards = [Unit(unit.layers, unit.nbytes, unit.nbytes / unit.saved_per_byte, 0.0) for unit in units]
    worst = tuple(name for unit in choose(backwards, 0.25) for name in unit.layers)
    # With these asked for by name, the budget is used up, and the report says so.
    asked = recipe(place, dense_layers=worst, budget=report.budget["bytes_kept_dense"] / total * 0.5)
    spent = compress(place / "dense", place / "worst", asked, fast=False).budget
    assert spent is not None and spent["kept_dense"] == []
    assert sorted(name for unit in spent["dense_by_recipe"] for name in unit["layers"]) == sorted(worst)
    misspent = states(place, "worst", tokens)
    assert distance(mixed[-1], goal[-1]) < distance(misspent[-1], goal[-1]) < distance(pruned[-1], goal[-1])


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_what_a_format_holds_pruned_it_holds_dense(form: str) -> None:
    """So a budget may keep any layer dense, whatever it chooses."""
    weights = [(n, k, bits) for n in (32, 64, 96, 192) for k in (32, 36, 48, 64, 192, 576) for bits in (4, 8)]
    held = 0
    for n, k, bits in weights:
        for group in (32, 96, 128, None):
            pruned, dense = (
                tiny.round_to_nearest(torch.ones(n, k), bits, group, sparse=sparse) for sparse in (True, False)
            )
            if not FORMATS[form].refusals(pruned):
                held += 1
                assert not FORMATS[layer_format(form, False)].refusals(dense), (n, k, bits, group)
    assert held or form in ("dense", "ct-sparse-24-bitmask", "ct-sparse-bitmask", "marlin")


def test_refusals(place: Path) -> None:
    for wanted, changes in (
        ("needs a method that prunes", {"budget": 0.2, "method": "gptq"}),
        ("needs a method that prunes", {"budget": 0.2, "bits": 16}),
        ("reconstruction trains codes", {"reconstruct": 3, "bits": 16}),
        ("4 blocks together is for reconstruction", {"together": 4}),
    ):
        with pytest.raises(SpearfishError, match=wanted):
            compress(place / "dense", place / "never", recipe(place, **changes))
    for bad in ({"budget": 1.0}, {"budget": -0.1}, {"budget": float("nan")}, {"reconstruct": -1}):
        with pytest.raises(SpearfishError, match="budget is a share"):
            recipe(place, **bad)
    with pytest.raises(SpearfishError, match="together counts blocks that are trained at once, at least one, got 0"):
        recipe(place, together=0)
    assert not (place / "never.work").exists()
