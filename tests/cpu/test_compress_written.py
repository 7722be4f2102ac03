"""Text that a model writes itself: it is the model's own, it repeats, and a run that goes on finds it again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from spearfish.compress import Recipe, compress, written
from spearfish.compress.recover import fuse_blocks
from spearfish.errors import SpearfishError
from spearfish.models import ARCHITECTURES, load_dense
from spearfish.text import read_text


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("written")
    tiny.llama(initializer_range=0.05, num_hidden_layers=2).save_pretrained(place / "dense")
    tiny.save_tokenizer(place / "dense")
    return place


def test_windows_are_whole_and_repeat(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "AT_ONCE_CPU", 4)
    monkeypatch.setattr(written, "BEGINNINGS", 64)
    dense = load_dense(place / "dense")
    model, tokenizer = dense.whole(), dense.tokenizer()
    tokens = written.write(model, tokenizer, 6, 40, seed=3)
    assert tokens.shape == (6, 40) and tokens.dtype == torch.int64
    assert tokens.min() >= 0 and tokens.max() < 512
    assert torch.equal(tokens, written.write(model, tokenizer, 6, 40, seed=3))
    assert not torch.equal(tokens, written.write(model, tokenizer, 6, 40, seed=4))
    # No time at all still gives one batch; the two that six windows take are of one size.
    assert len(written.write(model, tokenizer, 6, 40, seconds=0.0)) == 3


@pytest.mark.parametrize("first", [True, False])
def test_texts_stand_side_by_side(place: Path, monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    """Written apart, and what every window begins with stands once."""
    monkeypatch.setattr(written, "AT_ONCE_CPU", 8)
    monkeypatch.setattr(written, "BEGINNINGS", 64)
    dense = load_dense(place / "dense")
    model, tokenizer = dense.whole(), dense.tokenizer()
    asked: list[int] = []
    predict = written._Desk.predict

    def watched(desk: written._Desk, tokens: torch.Tensor, position: int) -> torch.Tensor:
        asked.append(position)
        return predict(desk, tokens, position)

    monkeypatch.setattr(written._Desk, "predict", watched)
    if first:
        plain = type(tokenizer).__call__
        monkeypatch.setattr(
            type(tokenizer), "__call__",
            lambda self, said, **named: plain(self, said, **named) if said else type("Ids", (), {"input_ids": [7]})(),
        )  # fmt: skip
    tokens = written.write(model, tokenizer, 6, 41, seed=3, texts=2)
    assert tokens.shape == (6, 41) and max(asked) == 19  # predictions for 21 tokens each
    assert (tokens[:, 0] == 7).all() == first
    assert len({tuple(row) for row in tokens[:, -15:].tolist()}) == 6


def test_compiled_blocks_are_not_compiled_for_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of recovery's teacher on a GPU: every block would be compiled anew."""
    monkeypatch.setattr(written, "BEGINNINGS", 64)
    dense = load_dense(place / "dense")
    model, tokenizer, asked = dense.whole(), dense.tokenizer(), []
    plain = written.write(model, tokenizer, 4, 24)

    def backend(graph: torch.fx.GraphModule, _example: list[torch.Tensor]) -> object:
        asked.append(graph)
        return graph.forward

    for block in model.model.layers:
        block.forward = torch.compile(block.forward, backend=backend)
    assert torch.equal(written.write(model, tokenizer, 4, 24), plain)
    assert not asked
    model(input_ids=plain)
    assert asked, "the blocks are not compiled at all"


def test_recoverys_teacher_writes_what_a_plain_model_does(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks keep the rotary tables of their first call: in text, every token would stand at the first place."""
    monkeypatch.setattr(written, "BEGINNINGS", 64)
    dense = load_dense(place / "dense")
    plain = written.write(dense.whole(), dense.tokenizer(), 4, 40)
    teacher = dense.whole()
    fuse_blocks(teacher, dense.block_paths(teacher), torch.device("cpu"))
    assert torch.equal(written.write(teacher, dense.tokenizer(), 4, 40), plain)


def test_it_is_the_models_own_text(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is sure of its next word writes just that; where it ends a text, another is begun."""
    monkeypatch.setattr(written, "BEGINNINGS", 64)
    dense = load_dense(place / "dense")
    model, tokenizer = dense.whole(), dense.tokenizer()
    favourite, end = 300, tokenizer.all_special_ids[0]
    head = torch.nn.Linear(128, 512)
    head.weight.data.zero_()
    head.bias.data.zero_()
    head.bias.data[favourite] = 1000.0
    model.lm_head = head
    tokens = written.write(model, tokenizer, 4, 40)
    assert (tokens[:, -20:] == favourite).all()
    head.bias.data[end] = 2000.0
    assert not (written.write(model, tokenizer, 4, 40) == end).any()
    head.bias.data[end] = float("nan")
    with pytest.raises(SpearfishError, match="not finite"):
        written.write(model, tokenizer, 4, 40)


def test_a_run_calibrates_on_it_and_keeps_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "BEGINNINGS", 64)
    recipe = Recipe(group_size=64, method="magnitude", calibration=written.NAME, num_samples=8, seq_len=32)

    def stop(stage: str, *_: object) -> None:
        if stage == "blocks":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(place / "dense", place / "out", recipe, fast=False, progress=stop)
    with monkeypatch.context() as patch:
        patch.setattr(written, "write", lambda *_: pytest.fail("the text was there"))
        with pytest.raises(SpearfishError, match="unfinished run with another model or recipe"):
            compress(place / "dense", place / "out", replace(recipe, seed=1), fast=False)
        report = compress(place / "dense", place / "out", recipe, fast=False)
    assert report.calibration["source"] == "self" and report.calibration["tokens"] == 256
    with pytest.raises(SpearfishError, match="longer than the model's longest input"):
        compress(place / "dense", place / "never", Recipe(calibration="self", seq_len=300, method="rtn"), fast=False)
    with pytest.raises(SpearfishError, match="'self'"):
        read_text("self")


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_each_step_predicts_what_the_whole_model_does(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "REACH", 8)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    if model_type in ("gemma3_text", "mistral"):
        sizes["sliding_window"] = 6
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    tokens = torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        truth = model(tokens).logits
        desk = written._Desk(model, 3, 20)
        for _ in range(2):  # what an earlier batch left behind is not seen
            for position in range(20):
                got = desk.predict(tokens[:, position], position)
                torch.testing.assert_close(got, truth[:, position], rtol=1e-4, atol=1e-5)
        assert torch.equal(model(tokens).logits, truth)  # and the model attends as before


def test_as_many_windows_as_memory_holds() -> None:
    config = tiny.llama().config  # 2 blocks, 2 heads of keys and values, 32 wide, 512 words
    each = 2 * 2 * 2 * 2 * 32 * 100 + 24 * 512
    assert written.windows_that_fit(4096, 100, 20 * each, config) == 10
    assert written.windows_that_fit(4096, 100, 1 << 60, config) == 4096
    assert written.windows_that_fit(4096, 100, 0, config) == 1
