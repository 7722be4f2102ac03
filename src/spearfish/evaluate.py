"""How good a language model is at plain prose: perplexity, and the distance of its predictions from another model's.

Windows are cut end to end from the text; every result carries window length, count, token count and a hash of the
tokens, because two perplexities compare only if all four agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spearfish.errors import SpearfishError
from spearfish.text import Windows

MOST_LOGITS = 1 << 29  # bytes of float32 predictions at once: some families have a quarter of a million words


@dataclass(frozen=True)
class Quality:
    """perplexity over `predicted` tokens (each window's first is not predicted); standard_error is that of its
    logarithm, over windows. kl: mean KL(other ‖ this) in nats per token, and agree: share of tokens for which both put
    the same token first, if another model was given."""

    perplexity: float
    standard_error: float
    windows: int
    length: int
    predicted: int
    sha256: str
    source: str
    kl: float | None = None
    agree: float | None = None
    other_perplexity: float | None = None

    def __str__(self) -> str:
        text = (
            f"perplexity {self.perplexity:.2f} (+- {100 * self.standard_error:.1f} %) over {self.windows} windows of"
            f" {self.length} tokens = {self.predicted} predictions, {self.source}, data {self.sha256[:12]}"
        )
        if self.kl is not None and self.agree is not None and self.other_perplexity is not None:
            text += (
                f"; the other model {self.other_perplexity:.2f}, KL from it {self.kl:.3f} nats, same first choice"
                f" {self.agree:.1%}"
            )
        return text


def evaluate(
    model: nn.Module,
    tokens: torch.Tensor,
    source: str = "text",
    other: nn.Module | None = None,
    batch: int | None = None,
) -> Quality:
    """Quality of a causal language model on tokens int64 [count, length]; with `other` also the distance to it.

    batch: windows at once; None takes as many as keep the predictions below half a GiB, at most 4.
    Raises SpearfishError if there is nothing to predict or a prediction is not finite, naming the window.
    """
    count, length = tokens.shape
    if count < 1 or length < 2:
        raise SpearfishError(f"nothing to predict in {count} windows of {length} tokens")
    if batch is None:
        words = int(getattr(model.config, "vocab_size", 1 << 16))
        batch = max(1, min(4, MOST_LOGITS // (4 * words * length)))
    losses, other_losses, distances, agreements = [], [], [], []
    for start in range(0, count, batch):
        part = tokens[start : start + batch]
        logits = _logits(model, part, start)
        losses.append(_loss(logits, part))
        if other is not None:
            reference = _logits(other, part, start)
            other_losses.append(_loss(reference, part))
            distances.append(_kl(reference, logits))
            agreements.append((reference.argmax(-1) == logits.argmax(-1)).double().mean(dim=1).cpu())
    loss = torch.cat(losses).double()
    spread = float(loss.std() / math.sqrt(count)) if count > 1 else float("nan")
    return Quality(
        perplexity=math.exp(float(loss.mean())),
        standard_error=spread,
        windows=count,
        length=length,
        predicted=count * (length - 1),
        sha256=Windows(tokens, source).sha256,
        source=source,
        kl=float(torch.cat(distances).mean()) if distances else None,
        agree=float(torch.cat(agreements).mean()) if agreements else None,
        other_perplexity=math.exp(float(torch.cat(other_losses).double().mean())) if other_losses else None,
    )


def _logits(model: nn.Module, part: torch.Tensor, start: int) -> torch.Tensor:
    device = next(model.parameters()).device
    with torch.no_grad():
        out: Any = model(input_ids=part.to(device), use_cache=False)
    logits: torch.Tensor = out.logits[:, :-1].float()
    # Not isfinite() of all of them: it takes twice their memory, and as long as a fifth of the model.
    if not torch.stack(logits.aminmax()).isfinite().all():
        bad = int((~logits.isfinite()).flatten(1).any(dim=1).nonzero()[0])
        raise SpearfishError(
            f"the model's predictions are not finite in window {start + bad}; if it computes in float16, try bfloat16"
        )
    return logits


def _loss(logits: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood of each window [count]."""
    target = part[:, 1:].to(logits.device)
    picked = logits.gather(-1, target[..., None])[..., 0]
    return (logits.logsumexp(-1) - picked).mean(dim=1).cpu()


def _kl(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Mean KL(reference ‖ logits) of each window [count], one after the other: each takes several copies."""
    means = []
    for wanted, given in zip(reference, logits, strict=True):
        p, q = wanted.log_softmax(-1), given.log_softmax(-1)
        means.append((p.exp() * (p - q)).sum(-1).mean())
    return torch.stack(means).cpu()
