"""Multiple-choice questions made from plain text, with nothing to download: what a model still understands when its
perplexity has risen. Three kinds, one right answer of four each:

* next sentence: two sentences of a document and the one that follows, against three as long from other documents;
* copying: a list of eight words, then the same list again up to a word; the others are words of the list;
* patterns: an arithmetic sequence of seven numbers without its last; the others are the nearest that are wrong.

The model answers with the choice to which it gives most probability a token. The same text and seed give the same
questions for every model; their hash tells whether two results compare.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from spearfish.errors import SpearfishError

CHOICES = 4
LIST, LONGEST_SENTENCE = 8, 200
MOST_LOGITS = 1 << 29  # bytes of float32 predictions at once


@dataclass(frozen=True)
class Question:
    """prompt and choices as text; a choice begins with the space before it. right: its index."""

    kind: str
    prompt: str
    choices: tuple[str, ...]
    right: int


@dataclass(frozen=True)
class Answers:
    """right: share of right answers by kind. each: questions of a kind. sha256: of all the questions."""

    right: dict[str, float]
    each: int
    sha256: str

    @property
    def mean(self) -> float:
        return sum(self.right.values()) / len(self.right)

    @property
    def standard_error(self) -> float:
        """Of the mean, from the questions being a sample."""
        return math.sqrt(sum(p * (1 - p) for p in self.right.values()) / self.each) / len(self.right)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the mean and its standard error."""
        return asdict(self) | {"mean": self.mean, "standard_error": self.standard_error}

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in self.right.items())
        return (
            f"right answers {self.mean:.1%} (+- {self.standard_error:.1%}; guessing gives {1 / CHOICES:.0%}): {kinds};"
            f" {self.each} questions each, made from the text, data {self.sha256[:12]}"
        )


def make_questions(documents: list[str], each: int, seed: int = 0) -> list[Question]:
    """`each` questions of every kind from the documents. Raises SpearfishError if they are too few or too short."""
    chooser = random.Random(seed)
    return [question for make in (_next_sentence, _copying, _patterns) for question in make(documents, each, chooser)]


def answer(model: nn.Module, tokenizer: Any, questions: list[Question]) -> Answers:
    """How many of the questions a causal language model answers rightly. Raises SpearfishError if a prediction is not
    finite."""
    rows = [(*_tokens(tokenizer, q, choice), index) for index, q in enumerate(questions) for choice in q.choices]
    scores = _scores(model, [ids for ids, _, _ in rows], [start for _, start, _ in rows])
    right: dict[str, list[bool]] = {}
    for index, question in enumerate(questions):
        mine = scores[index * CHOICES : (index + 1) * CHOICES]
        right.setdefault(question.kind, []).append(int(mine.argmax()) == question.right)
    said = "\n".join(f"{q.kind}|{q.prompt}|{'|'.join(q.choices)}|{q.right}" for q in questions)
    each = len(questions) // len(right)
    return Answers(
        {kind: sum(hits) / len(hits) for kind, hits in right.items()}, each, hashlib.sha256(said.encode()).hexdigest()
    )


def _scores(model: nn.Module, sequences: list[list[int]], starts: list[int]) -> torch.Tensor:
    """Mean logarithm of the probability that each sequence's tokens from `start` on have, [count]."""
    device = next(model.parameters()).device
    words = int(getattr(model.config, "vocab_size", 1 << 16))
    scores = torch.zeros(len(sequences))
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    while order:
        longest = len(sequences[order[-1]])
        batch = [order.pop() for _ in range(min(len(order), max(1, MOST_LOGITS // (4 * words * longest)), 32))]
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, index in enumerate(batch):  # causal: what is filled up behind changes nothing before it
            tokens[row, : len(sequences[index])] = torch.tensor(sequences[index])
        with torch.no_grad():
            logits = model(input_ids=tokens.to(device), use_cache=False).logits
        for row, index in enumerate(batch):
            part = slice(starts[index], len(sequences[index]))
            given = logits[row, part.start - 1 : part.stop - 1].float().log_softmax(-1)
            picked = given.gather(-1, tokens[row, part, None].to(device))
            if not picked.isfinite().all():
                raise SpearfishError("the model's predictions are not finite; if it computes in float16, try bfloat16")
            scores[index] = float(picked.mean())
    return scores


def _tokens(tokenizer: Any, question: Question, choice: str) -> tuple[list[int], int]:
    """Tokens of prompt and choice, and where those begin that the prompt alone does not give."""
    prompt, whole = (list(tokenizer(text).input_ids) for text in (question.prompt, question.prompt + choice))
    same = 0
    while same < min(len(prompt), len(whole) - 1) and prompt[same] == whole[same]:
        same += 1
    if same < 1:
        raise SpearfishError(f"the tokenizer gives {question.prompt[:40]!r} no token of its own")
    return whole, same


def _placed(kind: str, prompt: str, right: str, wrong: list[str], chooser: random.Random) -> Question:
    place = chooser.randrange(CHOICES)
    choices = [*wrong[:place], right, *wrong[place:]]
    return Question(kind, prompt, tuple(f" {choice}" for choice in choices), place)


def _next_sentence(documents: list[str], each: int, chooser: random.Random) -> list[Question]:
    cut = [re.split(r"(?<=[a-z)][.!?])\s+(?=[A-Z])", " ".join(document.split())) for document in documents]
    fit: Callable[[str], bool] = lambda sentence: 40 <= len(sentence) <= LONGEST_SENTENCE  # noqa: E731
    whole = [index for index, sentences in enumerate(cut) if len(sentences) >= 3 and fit(sentences[2])]
    pool = sorted((len(s), index, s) for index, sentences in enumerate(cut) for s in sentences[1:] if fit(s))
    questions = []
    for index in _drawn(whole, each, chooser, "documents of three sentences"):
        right = cut[index][2]
        near = [s for length, other, s in pool if other != index and abs(length - len(right)) <= len(right) // 5]
        wrong = _drawn(near, CHOICES - 1, chooser, f"sentences of about {len(right)} letters")
        questions.append(_placed("next sentence", " ".join(cut[index][:2]), right, wrong, chooser))
    return questions


def _copying(documents: list[str], each: int, chooser: random.Random) -> list[Question]:
    words = sorted({word for document in documents for word in re.findall(r"\b[a-z]{4,8}\b", document)})
    questions = []
    for _ in range(each):
        listed = _drawn(words, LIST, chooser, "different words")
        asked = chooser.randrange(LIST // 2, LIST)
        wrong = _drawn(listed[:asked] + listed[asked + 1 :], CHOICES - 1, chooser, "words")
        prompt = f"{' '.join(listed)}\n{' '.join(listed[:asked])}"
        questions.append(_placed("copying", prompt, listed[asked], wrong, chooser))
    return questions


def _patterns(_documents: list[str], each: int, chooser: random.Random) -> list[Question]:
    questions = []
    for _ in range(each):
        step = chooser.randrange(2, 13)
        start = chooser.randrange(100 - 6 * step)
        numbers = [start + step * index for index in range(7)]
        near = sorted({numbers[-1] + change for change in (-step + 1, -2, -1, 1, 2, step - 1)} - set(numbers))
        wrong = [str(number) for number in _drawn(near, CHOICES - 1, chooser, "numbers")]
        prompt = ", ".join(map(str, numbers[:-1])) + ","
        questions.append(_placed("patterns", prompt, str(numbers[-1]), wrong, chooser))
    return questions


def _drawn(pool: list[Any], count: int, chooser: random.Random, what: str) -> list[Any]:
    if len(pool) < count:
        raise SpearfishError(f"the text has {len(pool)} {what}, {count} are needed: take more text or fewer questions")
    return chooser.sample(pool, count)
