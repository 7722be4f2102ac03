"""Recovery: its gradients against plain autograd, its result on the grid, its state resumable."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tiny
from spearfish import sparse24
from spearfish.checkpoint import open_checkpoint
from spearfish.compress import Recipe, compress
from spearfish.compress.pipeline import _mixed
from spearfish.compress.recover import GridLinear, Recovery, Settings, _Divergence, distance, rate_at, tokens_that_fit
from spearfish.errors import SpearfishError
from spearfish.models import load_dense
from spearfish.reference import dequantize
from spearfish.scheme import QuantWeight
from spearfish.text import cut_windows, read_text

CPU = torch.device("cpu")


def layer(sparse: bool, group: int | None) -> tuple[QuantWeight, GridLinear]:
    torch.manual_seed(0)
    weight = tiny.round_to_nearest(torch.randn(16, 96) * 0.1, group=group, sparse=sparse)
    return weight, GridLinear(weight, torch.randn(16), CPU, torch.float32)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("group", [32, 64, None])
def test_a_grid_linear_is_its_quantised_weight(sparse: bool, group: int | None) -> None:
    weight, linear = layer(sparse, group)
    linear.share = 1.0
    torch.testing.assert_close(linear.weight_on_grid(), dequantize(weight), rtol=1e-6, atol=1e-8)
    x = torch.randn(3, 96)
    torch.testing.assert_close(linear(x), F.linear(x, dequantize(weight), linear.bias))
    back = linear.packed()
    assert torch.equal(back.codes, weight.codes) and back.scales is not None and weight.scales is not None
    torch.testing.assert_close(back.scales, weight.scales, rtol=1e-3, atol=0)


def test_gradients_go_straight_through_and_stop_at_the_mask() -> None:
    weight, linear = layer(sparse=True, group=64)
    linear.share = 1.0
    x, slope = torch.randn(5, 96), torch.randn(5, 16)
    (linear(x) * slope).sum().backward()
    by_weight = slope.T @ x
    mask = linear.mask
    assert mask is not None
    scales = dequantize(weight).new_tensor(weight.scales.float().tolist())  # type: ignore[union-attr]
    wide = scales.repeat_interleave(64, dim=1)[:, :96]
    torch.testing.assert_close(linear.codes.grad, by_weight * wide * mask)
    # d/d log s of s·q is s·q itself, summed over the group; the second group has 32 columns.
    by_scale = by_weight * dequantize(weight)
    wanted = torch.stack((by_scale[:, :64].sum(1), by_scale[:, 64:].sum(1)), dim=1)
    torch.testing.assert_close(linear.log_scales.grad, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cap", [None, 5.0])
def test_divergence_against_autograd(cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spearfish.compress.recover.LOGITS_AT_ONCE", 7)
    torch.manual_seed(0)
    student = torch.randn(20, 8, dtype=torch.float32, requires_grad=True)
    teacher, head = torch.randn(20, 8), torch.randn(50, 8)
    got = _Divergence.apply(student, teacher, head, head, cap)
    (3 * got).backward()
    gradient, student.grad = student.grad, None

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        raw = hidden @ head.T
        return (raw if cap is None else cap * torch.tanh(raw / cap)).log_softmax(-1)

    truth = F.kl_div(logits(student), logits(teacher), log_target=True, reduction="batchmean")
    (3 * truth).backward()
    torch.testing.assert_close(got, truth)
    torch.testing.assert_close(gradient, student.grad, rtol=1e-4, atol=1e-6)
    # An output matrix that learns, apart from the teacher's.
    mine = head.clone().requires_grad_()
    (3 * _Divergence.apply(student.detach(), teacher, mine, head, cap)).backward()
    by_head, mine.grad = mine.grad, None
    p = logits(teacher).detach()
    raw = student.detach() @ mine.T
    q = (raw if cap is None else cap * torch.tanh(raw / cap)).log_softmax(-1)
    (3 * F.kl_div(q, p, log_target=True, reduction="batchmean")).backward()
    torch.testing.assert_close(by_head, mine.grad, rtol=1e-4, atol=1e-6)


def test_as_many_tokens_as_memory_holds() -> None:
    config = {"hidden_size": 576, "num_hidden_layers": 30}
    assert tokens_that_fit(16384, 512, 60 << 30, config) == 16384
    assert tokens_that_fit(16384, 512, 180 * 576 * 30 * 1500, config) == 1024
    assert tokens_that_fit(16384, 512, 0, config) == 512


def test_every_number_of_a_hidden_state_counts_by_its_usual_size(place: Path) -> None:
    """One that is a thousand times the others would own the distance."""
    dense = load_dense(place / "dense")
    tokens = cut_windows(dense.tokenizer(), read_text(str(place / "text.txt")), 32)[:8]
    recovery = Recovery(dense, {}, Settings(evenly=True), CPU, fast=False)
    with torch.no_grad():
        goal = recovery.watched[0](tokens)[0][0]
        by = recovery._usual_sizes(tokens)[0]
    assert by.shape == (128,)
    off = torch.zeros_like(goal)
    off[:, 3] = goal[:, 3]  # all of one number is lost
    small = distance((goal - off) * by, goal * by)
    assert small == pytest.approx(1 / 128, rel=0.5)
    huge = goal.clone()
    huge[:, 3] *= 1000
    assert distance(huge - off * 1000, huge) > 0.9
    share = nn.functional.normalize(huge, dim=-1).square().mean(0).sqrt().reciprocal()
    assert distance((huge - off * 1000) * share, huge * share) < 0.4


def test_rates_warm_up_and_fade() -> None:
    assert rate_at(0.0, 0.1) == 0 and rate_at(0.05, 0.1) == pytest.approx(0.5)
    assert rate_at(0.1, 0.1) == pytest.approx(1) and rate_at(0.55, 0.1) == pytest.approx(0.5)
    assert rate_at(1.0, 0.1) == pytest.approx(0, abs=1e-12)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("recover")
    model = tiny.llama(initializer_range=0.05)
    model.save_pretrained(place / "dense")
    tiny.save_tokenizer(place / "dense")
    words = tiny.words(3000)
    (place / "text.txt").write_text(" ".join(words))
    return place


def test_recovery_brings_the_predictions_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spearfish.compress.pipeline.Settings", partial(Settings, tokens=256, length=32, rate=0.1))
    text = str(place / "text.txt")
    base = Recipe(group_size=64, method="magnitude", num_samples=4, seq_len=32, calibration=text, recover_text=text)
    compress(place / "dense", place / "before", base, fast=False)
    taught = Recipe(**{**base.to_dict(), "ignore": (), "dense_layers": (), "recover_steps": 40})
    report = compress(place / "dense", place / "after", taught, fast=False)
    assert report.recover is not None and report.recover["steps"] == 40
    assert report.recover["divergence_last"] < 0.8 * report.recover["divergence_first"]

    dense = load_dense(place / "dense")
    tokens = cut_windows(dense.tokenizer(), read_text(text), 64)[-8:]
    teacher = dense.whole()
    distance = []
    for folder in ("before", "after"):
        student, checkpoint = dense.whole(), open_checkpoint(place / folder)
        for name in checkpoint.linears:
            weight = checkpoint.weight(name)
            assert not sparse24.violations(dequantize(weight)).any()
            student.get_submodule(name).weight.data.copy_(dequantize(weight))
        for name in checkpoint.tensor_names:
            student.get_parameter(name).data.copy_(checkpoint.tensor(name))
        with torch.no_grad():
            p, q = (model(tokens).logits.log_softmax(-1) for model in (teacher, student))
        distance.append(float(F.kl_div(q, p, log_target=True, reduction="sum")))
    assert distance[1] < 0.8 * distance[0]
    # The masks are those of before (a kept value may pass through zero), and a gain has moved.
    first, second = (open_checkpoint(place / folder) for folder in ("before", "after"))
    for name in first.linears:
        a, b = ((dequantize(c.weight(name)) != 0).reshape(-1, 4) for c in (first, second))
        full = (a.sum(1) == 2) & (b.sum(1) == 2)
        assert full.float().mean() > 0.5 and torch.equal(a[full], b[full])
        assert ((a | b).sum(1) <= 2)[(a.sum(1) == 2)].all()
    gain = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(first.tensor(gain), second.tensor(gain))


def test_prose_is_mixed_into_what_recovery_learns_on(place: Path, tmp_path: Path) -> None:
    text, prose = str(place / "text.txt"), tmp_path / "more+prose.txt"
    prose.write_text(f"{tiny.PROSE} " * 40)
    tokenizer = load_dense(place / "dense").tokenizer()
    own, other = (cut_windows(tokenizer, read_text(source), 256) for source in (text, str(prose)))
    base = Recipe(group_size=64, method="magnitude", num_samples=4, seq_len=32, calibration=text, recover_steps=1)
    for source, windows in ((text, len(own)), (str(prose), len(other)), (f"{text}+{prose}", None)):
        report = compress(
            place / "dense", tmp_path / "out", replace(base, recover_text=source), fast=False, overwrite=True
        )
        assert report.recover is not None and report.recover["source"] == source
        learnt = report.recover["tokens_of_text"] // 256
        assert learnt == windows if windows else len(own) < learnt <= len(own) + len(other)


def test_prose_keeps_to_its_share_and_passes() -> None:
    bulk, prose = torch.zeros(700, 2, dtype=torch.int64), torch.arange(1, 401)[:, None].expand(400, 2)
    mixed = _mixed(bulk, prose, 0)
    assert len(mixed) == 1000 and len(set(mixed[700:, 0].tolist())) == 300
    mixed = _mixed(bulk, prose[:50], 0)
    assert len(mixed) == 900 and (mixed[700:, 0].bincount()[1:] == 4).all()


@pytest.mark.parametrize("table", [0.0, 1e-3])
def test_an_interrupted_recovery_goes_on_to_the_same_end(place: Path, tmp_path: Path, table: float) -> None:
    dense = load_dense(place / "dense")
    tokens = cut_windows(dense.tokenizer(), read_text(str(place / "text.txt")), 64)
    module = dense.whole().get_submodule("model.layers.0.mlp.up_proj")
    weights = {"model.layers.0.mlp.up_proj": tiny.round_to_nearest(module.weight)}
    settings = Settings(steps=6, tokens=128, length=64, table=table, evenly=bool(table))

    def silent(*_: object) -> None:
        pass

    def stop(stage: str, done: int, total: int, note: str) -> None:
        if done >= 50:
            raise KeyboardInterrupt

    straight = Recovery(dense, weights, settings, CPU, fast=False)
    straight.run(tokens, None, silent)
    broken = Recovery(dense, weights, Settings(**{**vars(settings), "save_every": 0.0}), CPU, fast=False)
    with pytest.raises(KeyboardInterrupt):
        broken.run(tokens, tmp_path / "state", stop)
    again = Recovery(dense, weights, settings, CPU, fast=False)
    again.run(tokens, tmp_path / "state", silent)
    assert 0 < broken.step < 6 == again.step
    # The step during which it was interrupted was not yet saved: it is done again.
    assert again.losses == straight.losses
    for name, layer_of in straight.layers.items():
        assert torch.equal(layer_of.codes, again.layers[name].codes)
        assert torch.equal(layer_of.log_scales, again.layers[name].log_scales)
    stored = dense.reader.tensor("model.embed_tokens.weight")
    learned = straight.results()[1].get("model.embed_tokens.weight", stored)
    assert torch.equal(learned, again.results()[1].get("model.embed_tokens.weight", stored))
    assert torch.equal(learned, stored) == (not table)


def test_layers_left_alone_compute_in_bfloat16_too(place: Path) -> None:
    """The norm gains are float32 and widen what they touch; a plain bfloat16 linear behind them refused it."""
    dense = load_dense(place / "dense")
    linear = dense.whole().get_submodule("model.layers.0.mlp.down_proj")
    weights = {"model.layers.0.mlp.down_proj": tiny.round_to_nearest(linear.weight)}  # type: ignore[arg-type]
    recovery = Recovery(dense, weights, Settings(steps=2, tokens=64, length=32), CPU, fast=True)
    tokens = cut_windows(dense.tokenizer(), [tiny.PROSE * 4], 32)
    recovery.run(tokens, None, lambda *_: None)
    assert recovery.step == 2
    assert recovery.losses[0] > 0


def test_a_time_budget_is_kept(place: Path) -> None:
    dense = load_dense(place / "dense")
    tokens = cut_windows(dense.tokenizer(), read_text(str(place / "text.txt")), 64)
    module = dense.whole().get_submodule("model.layers.0.mlp.up_proj")
    recovery = Recovery(
        dense, {"model.layers.0.mlp.up_proj": tiny.round_to_nearest(module.weight)},
        Settings(budget=2.0, tokens=64, length=64), CPU, fast=False,
    )  # fmt: skip
    recovery.run(tokens, None, lambda *_: None)
    assert recovery.step > 3 and recovery.elapsed < 2.5
    with pytest.raises(SpearfishError, match="loss is nan"):
        recovery.layers["model.layers.0.mlp.up_proj"].codes.data.fill_(float("nan"))
        recovery.settings = Settings(budget=100.0, tokens=64, length=64)
        recovery.run(tokens, None, lambda *_: None)
