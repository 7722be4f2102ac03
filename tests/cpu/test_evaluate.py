"""Perplexity and distances against plain formulas; windows of text against their documents."""

from __future__ import annotations

import lzma
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import tiny
from spearfish.errors import FormatError, SpearfishError
from spearfish.evaluate import evaluate
from spearfish.models import load_tokenizer
from spearfish.text import SHIPPED, cut_windows, head, read_text, windows


def test_against_plain_formulas() -> None:
    model, other = tiny.llama(seed=1), tiny.llama(seed=2)
    tokens = torch.randint(0, 512, (5, 12), generator=torch.Generator().manual_seed(0))
    quality = evaluate(model, tokens, "noise", other=other, batch=2)
    with torch.no_grad():
        mine, theirs = (m(tokens).logits[:, :-1].double().log_softmax(-1) for m in (model, other))
    target = tokens[:, 1:]
    losses = [F.nll_loss(logits.flatten(0, 1), target.flatten()) for logits in (mine, theirs)]
    assert quality.perplexity == pytest.approx(math.exp(losses[0]), rel=1e-5)
    assert quality.other_perplexity == pytest.approx(math.exp(losses[1]), rel=1e-5)
    assert quality.kl == pytest.approx(float((theirs.exp() * (theirs - mine)).sum(-1).mean()), rel=1e-4)
    assert quality.agree == pytest.approx(float((mine.argmax(-1) == theirs.argmax(-1)).double().mean()))
    by_window = torch.stack([F.nll_loss(a, b) for a, b in zip(mine, target, strict=True)])
    assert quality.standard_error == pytest.approx(float(by_window.std() / 5**0.5), rel=1e-4)
    assert (quality.windows, quality.length, quality.predicted) == (5, 12, 55)
    text = str(quality)
    for part in ("5 windows of 12 tokens = 55 predictions", quality.sha256[:12], "noise", "KL from it"):
        assert part in text


def test_the_hash_tells_data_apart() -> None:
    model = tiny.llama()
    tokens = torch.randint(0, 512, (2, 8), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[1, 3] += 1
    assert evaluate(model, tokens).sha256 == evaluate(model, tokens.to(torch.int32).long()).sha256
    assert evaluate(model, tokens).sha256 != evaluate(model, changed).sha256


def test_predictions_that_are_not_finite_are_refused() -> None:
    model = tiny.llama()
    model.model.embed_tokens.weight.data[7] = float("nan")
    tokens = torch.ones(3, 4, dtype=torch.long)
    tokens[2, 1] = 7
    with pytest.raises(SpearfishError, match="not finite in window 2"):
        evaluate(model, tokens, batch=2)
    with pytest.raises(SpearfishError, match="nothing to predict"):
        evaluate(model, tokens[:, :1])


def test_windows_have_room_behind_a_tokenizer_s_own_beginning() -> None:
    def tokenizer(texts: str | list[str], add_special_tokens: bool = True) -> SimpleNamespace:
        first = [1] if add_special_tokens else []
        ids = first + [5, 6, 7] * bool(texts)
        return SimpleNamespace(input_ids=ids if isinstance(texts, str) else [[5, 6, 7] for _ in texts])

    assert cut_windows(tokenizer, ["a", "b"], 3).tolist() == [
        [1, 5, 6],
        [1, 7, 5],
        [1, 6, 7],
        [1, 5, 6],
        [1, 7, 5],
        [1, 6, 7],
    ]
    with pytest.raises(SpearfishError, match="no room behind the 1"):
        cut_windows(tokenizer, ["a"], 1)


def test_windows_are_the_text_end_to_end(tmp_path: Path) -> None:
    tiny.save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    documents = [tiny.PROSE, "The children came home.", tiny.PROSE]
    cut = cut_windows(tokenizer, documents, 16)
    joined = "\n\n".join(documents) + "\n\n"
    assert joined.startswith(tokenizer.decode(cut.flatten()))
    assert len(cut) == len(tokenizer(joined).input_ids) // 16


def test_a_first_token_begins_every_window(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tiny.save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    cut = cut_windows(tokenizer, [tiny.PROSE], 16)
    assert (cut[:, 0] == 1).all() and not (cut[:, 1:] == 1).any()
    plain = load_tokenizer(tmp_path)
    assert torch.equal(cut[:, 1:], cut_windows(plain, [tiny.PROSE], 15)[: len(cut)])


def test_drawing_depends_on_the_seed_alone(tmp_path: Path) -> None:
    tiny.save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    (tmp_path / "a.txt").write_text("\n\n".join([tiny.PROSE] * 8))
    source = str(tmp_path / "a.txt")
    first, again, other = (windows(tokenizer, source, 6, 16, seed) for seed in (0, 0, 1))
    assert torch.equal(first.tokens, again.tokens) and first.sha256 == again.sha256 != other.sha256
    assert f"6 windows of 16 tokens from {source}" in str(first)
    assert torch.equal(head(tokenizer, source, 2, 16), cut_windows(tokenizer, read_text(source), 16)[:2])
    with pytest.raises(SpearfishError, match=r"gives \d+ windows of 16 tokens, 999 are wanted"):
        windows(tokenizer, source, 999, 16)
    with pytest.raises(SpearfishError, match="longest input, 8"):
        windows(tokenizer, source, 1, 16, limit=8)
    with pytest.raises(SpearfishError, match="shorter than one window"):
        head(tokenizer, source, 1, 100_000)


def test_sources(tmp_path: Path) -> None:
    for name, parts in SHIPPED.items():
        assert len(read_text(name)) > 30, name
        assert read_text(name) == [document for part in parts for document in read_text(part)]
    (tmp_path / "b.txt").write_text("second\n\nthird")
    (tmp_path / "a.md").write_text("first\n")
    (tmp_path / "c.xz").write_bytes(lzma.compress(b"fourth"))
    (tmp_path / "d.json").write_text("not this")
    assert read_text(str(tmp_path)) == ["first", "second", "third", "fourth"]
    (tmp_path / "e.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match=r"e\.txt is not UTF-8 text"):
        read_text(str(tmp_path))
    with pytest.raises(FormatError, match="no file, no folder, no hub:NAME and none of addresses"):
        read_text(str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="holds no text"):
        read_text(str(tmp_path / "empty"))


def test_shipped_text_is_small() -> None:
    import spearfish

    folder = Path(spearfish.__file__).parent / "compress" / "data"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 300_000
