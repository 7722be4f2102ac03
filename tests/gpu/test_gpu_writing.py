"""What writing text rests on: attention of one new token against torch's, predictions against the whole model's, and
draws against the chances they should have."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import tiny
from spearfish.compress import glance, written


@pytest.mark.parametrize(("heads", "group", "width"), [(3, 3, 64), (1, 4, 256), (2, 1, 32)])
@pytest.mark.parametrize(("length", "at", "window"), [(64, 0, None), (200, 199, None), (200, 150, 70), (200, 30, 70)])
def test_one_token_attends_as_in_torch(
    heads: int, group: int, width: int, length: int, at: int, window: int | None
) -> None:
    torch.manual_seed(0)
    query = torch.randn(50, heads, group, width, device="cuda", dtype=torch.bfloat16)
    keys, values = (torch.randn(50, heads, length, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    index = torch.arange(length, device="cuda")
    seen = (index <= at) & (index > at - (window or length))
    keys[:, :, at + 1 :] = float("nan")  # not yet written
    values[:, :, at + 1 :] = float("nan")
    assert glance.fits(query, values)
    got = glance.attend(query, keys, values, torch.tensor([at], device="cuda"), None, window)
    clean = (t.nan_to_num().float() for t in (query, keys, values))
    truth = F.scaled_dot_product_attention(*clean, seen[None, None, None])
    assert (got.float() - truth).norm() < 0.01 * truth.norm()


@torch.no_grad()
def test_each_recorded_step_predicts_what_the_whole_model_does() -> None:
    model = tiny.llama(initializer_range=0.05).to("cuda", torch.bfloat16)
    tokens = torch.randint(0, 512, (20, 100), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    truth = model(tokens).logits.float()
    desk = written._Desk(model, 20, 100)
    for position in range(100):
        got = desk.predict(tokens[:, position], position).float()
        assert (got - truth[:, position]).norm() < 0.03 * truth[:, position].norm(), position


def test_draws_have_the_chances_of_the_softmax() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0], device="cuda").expand(1 << 18, 4)
    for heat in (0.5, 1.0):
        temperature = torch.full((len(logits), 1), heat, device="cuda")
        found = written._draw(logits, temperature).bincount(minlength=4) / len(logits)
        torch.testing.assert_close(found, (logits[0] / heat).softmax(-1), rtol=0, atol=0.005)
