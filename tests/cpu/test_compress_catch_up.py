"""Catching up: a layer's target is what the dense model has at its place, and the whole model ends up closer to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import tiny
from spearfish.checkpoint import open_checkpoint
from spearfish.compress import Recipe, compress, methods
from spearfish.compress.hessian import Hessian
from spearfish.compress.recover import distance
from spearfish.compress.walk import Walker
from spearfish.errors import SpearfishError
from spearfish.models import load_dense
from spearfish.reference import dequantize
from spearfish.scheme import QuantScheme
from spearfish.text import cut_windows, read_text

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("catch_up")
    tiny.llama(initializer_range=0.05, num_hidden_layers=3).save_pretrained(place / "dense")
    tiny.save_tokenizer(place / "dense")
    words = tiny.words(4000)
    (place / "text.txt").write_text(" ".join(words))
    (place / "other.txt").write_text(" ".join(words[::-1]))
    return place


def last_state(place: Path, folder: str, tokens: torch.Tensor) -> torch.Tensor:
    model = load_dense(place / "dense").whole()
    if folder != "dense":
        checkpoint = open_checkpoint(place / folder)
        for name in checkpoint.linears:
            model.get_submodule(name).weight.data.copy_(dequantize(checkpoint.weight(name)))
    with torch.no_grad():
        return model(tokens, output_hidden_states=True).hidden_states[-1]


def test_the_model_comes_closer_on_text_it_never_saw(place: Path) -> None:
    tokens = cut_windows(load_dense(place / "dense").tokenizer(), read_text(str(place / "other.txt")), 32)[:40]
    base = {"group_size": 64, "method": "joint", "num_samples": 100, "seq_len": 32}
    for name, share in (("plain", 0.0), ("caught", None)):
        recipe = Recipe(calibration=str(place / "text.txt"), catch_up=share, **base)  # type: ignore[arg-type]
        report = compress(place / "dense", place / name, recipe, fast=False)
        assert report.recipe["catch_up"] == (share if share is not None else 1.0)
    goal = last_state(place, "dense", tokens)
    plain, caught = (float(distance(last_state(place, name, tokens), goal)) for name in ("plain", "caught"))
    assert caught < 0.9 * plain
    with pytest.raises(SpearfishError, match="from 0 to 1"):
        Recipe(catch_up=1.5)


def test_the_lag_is_what_the_whole_sum_lacks(place: Path) -> None:
    """Slow truth for a layer that writes into the stream: dense block on dense states against dense weights on what the
    compressed block reads, everything else of it compressed."""
    dense = load_dense(place / "dense")
    walker = Walker(dense, CPU, fast=False)
    tokens = cut_windows(dense.tokenizer(), read_text(str(place / "text.txt")), 32)[:8]
    goal = walker.embed(tokens)
    hidden = goal + 0.1 * torch.randn(goal.shape, generator=torch.Generator().manual_seed(0))
    walker.load(0)
    block = walker.net.get_submodule(walker.paths[0])
    import copy

    twin = copy.deepcopy(block)
    block.mlp.up_proj.weight.data *= 0.9
    for names, residual, wanted in (
        (("mlp.down_proj",), "out", walker.forward(0, goal)),
        (("self_attn.q_proj", "self_attn.k_proj"), "", None),
    ):
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        assert walker.lag(0, names, hidden, twin, goal, residual, lambda x, lag: seen.append((x, lag)))  # noqa: B023
        x, lag = (torch.cat([pair[i] for pair in seen]) for i in (0, 1))
        if wanted is not None:
            wanted = twin(goal, **walker.arguments[0]) - block(hidden, **walker.arguments[0])
            torch.testing.assert_close(lag, wanted, rtol=1e-4, atol=1e-5)
        else:
            rows = torch.cat((twin.self_attn.q_proj.weight, twin.self_attn.k_proj.weight))
            there = F.linear(twin.input_layernorm(goal), rows)
            torch.testing.assert_close(lag, there - F.linear(x, rows), rtol=1e-4, atol=1e-5)


def test_the_target_is_the_least_squares_answer() -> None:
    """With enough tokens and hardly any damping, the weight that makes the lag good is found again."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4000, 32, generator=generator)
    weight, lost = torch.randn(8, 32, generator=generator), 0.1 * torch.randn(8, 32, generator=generator)
    hessian = Hessian(32, equal_norm=False)
    hessian.add(x[:2500], x[:2500] @ lost.T)
    hessian.add(x[2500:], x[2500:] @ lost.T)
    assert hessian.lag is not None
    lag = hessian.lag / hessian.tokens
    problem = methods.Problem.of(weight, hessian.mean(), QuantScheme(4, None), damping=1e-6, lag=lag)
    # Tokens that lag twice as far as the median or more are held back a little.
    torch.testing.assert_close(problem.weight, weight + lost, rtol=0, atol=0.02)
