"""Questions made from text: what they ask, how a choice is scored, and that a model which knows the answer gets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from spearfish.errors import SpearfishError
from spearfish.models import load_tokenizer
from spearfish.text import read_text
from spearfish.zeroshot import CHOICES, Question, _scores, _tokens, answer, make_questions

KINDS = ("next sentence", "copying", "patterns")


def test_one_answer_is_right_and_the_others_are_not() -> None:
    documents = read_text("builtin")
    questions = make_questions(documents, 30)
    assert [q.kind for q in questions] == [kind for kind in KINDS for _ in range(30)]
    joined = [" ".join(document.split()) for document in documents]
    for question in questions:
        right = question.choices[question.right]
        assert len(set(question.choices)) == CHOICES and all(choice.startswith(" ") for choice in question.choices)
        wrong = [choice for choice in question.choices if choice != right]
        if question.kind == "next sentence":
            assert any(question.prompt + right in document for document in joined)
            assert not any(question.prompt + choice in document for document in joined for choice in wrong)
        elif question.kind == "copying":
            whole, again = (line.split(" ") for line in question.prompt.split("\n"))
            assert again == whole[: len(again)] and right == f" {whole[len(again)]}"
            assert {choice[1:] for choice in wrong} < set(whole)
        else:
            numbers = [int(part) for part in question.prompt.rstrip(",").split(", ")]
            assert len({b - a for a, b in zip(numbers, [*numbers[1:], int(right)], strict=True)}) == 1
    assert len({q.right for q in questions}) == CHOICES


def test_the_same_seed_gives_the_same_questions() -> None:
    documents = read_text("articles")
    assert make_questions(documents, 5) == make_questions(documents, 5) != make_questions(documents, 5, seed=1)
    with pytest.raises(SpearfishError, match=r"the text has 0 documents of three sentences, 5 are needed"):
        make_questions(["Too short."], 5)


def test_scores_are_mean_logarithms_of_the_last_tokens() -> None:
    model = tiny.llama()
    rows = [[5, 9, 200, 31], [7, 8], [3, 4, 5, 6, 7, 8, 9]]
    starts = [2, 1, 6]
    for scored, row, start in zip(_scores(model, rows, starts), rows, starts, strict=True):
        with torch.no_grad():
            given = model(torch.tensor([row])).logits[0].double().log_softmax(-1)
        wanted = sum(float(given[i - 1, row[i]]) for i in range(start, len(row))) / (len(row) - start)
        assert float(scored) == pytest.approx(wanted, rel=1e-4)


class Knowing(torch.nn.Module):
    """Predicts token t + 1 after token t, or the same token again if `wrong`."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config: Any = type("Config", (), {"vocab_size": 512})()
        self.shift = 0 if wrong else 1

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        logits = 9.0 * torch.nn.functional.one_hot((input_ids + self.shift) % 512, 512).float()
        return type("Out", (), {"logits": logits})()


def test_a_model_that_knows_is_right(tmp_path: Path) -> None:
    tiny.save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)

    class Counting:
        """One token a word, and the words are numbers."""

        def __call__(self, text: str) -> Any:
            return type("Encoded", (), {"input_ids": [int(word) for word in text.split()]})()

    asked = [
        Question(kind, " ".join(map(str, range(start, start + 4))), (" 1", f" {start + 4}", f" {start + 3}", " 9"), 1)
        for kind in ("one", "two")
        for start in (20, 50, 80)
    ]
    knows, fails = (answer(Knowing(wrong), Counting(), asked) for wrong in (False, True))
    assert knows.right == {"one": 1.0, "two": 1.0} and knows.mean == 1.0 and knows.standard_error == 0.0
    assert fails.mean == 0.0 and fails.sha256 == knows.sha256 and knows.each == 3
    assert "right answers 100.0%" in str(knows) and "3 questions each" in str(knows)
    # The tokens that are scored begin where prompt and choice part from the prompt alone.
    question = Question("copying", "The river rose", (" in",), 0)
    ids, start = _tokens(tokenizer, question, " in")
    assert tokenizer.decode(ids[start:]) == " in" and tokenizer.decode(ids[:start]) == "The river rose"
    broken = tiny.llama()
    broken.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(SpearfishError, match="not finite"):
        _scores(broken, [[1, 2]], [1])


def test_evaluate_asks_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from spearfish.cli import app

    folder = tmp_path / "dense"
    tiny.llama(num_hidden_layers=1).save_pretrained(folder)
    tiny.save_tokenizer(folder)
    words = ["evaluate", str(folder), "--windows", "2", "--length", "16", "--device", "cpu", "--questions", "2"]
    app([*words, "--against", str(folder), "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert set(found["zero_shot"]["right"]) == set(KINDS) and found["zero_shot"] == found["other_zero_shot"]
    assert found["zero_shot"]["each"] == 2 and 0 <= found["zero_shot"]["mean"] <= 1
    app(words, standalone_mode=False)
    assert "2 questions each" in capsys.readouterr().out
    with pytest.raises(SpearfishError, match="counts them"):
        app([*words[:-1], "-1"], standalone_mode=False)
