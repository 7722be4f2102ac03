"""Text that the dense model writes itself, in large batches: calibration and distillation need no data set then.

Texts begin in four ways: like an article about a random word or two, with a single random word that leads anywhere,
like a passage of real prose, and as the answer to a question where the model has a chat template. They are sampled at
a temperature near one: well below it a model writes plain, sure sentences, and what learns from those alone does not
know what to make of real prose. Where the model ends a text, the next one is begun at once.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from spearfish import text
from spearfish.errors import SpearfishError

NAME = "self"  # the source's name in recipes

# "{}" becomes a random word with a capital letter.
OPENERS = (
    "{} {}",
    "{} is",
    "{} {} is a",
    "{} was",
    "{} {} (",
    "The {} {}",
    "In {},",
    "{} {}, the",
    "The history of {}",
)
QUESTIONS = (
    "Write an encyclopedia article about {} {}.",
    "Who or what is {} {}?",
    "Explain {} in two paragraphs.",
    "Write the introduction of an article on the {} of {}.",
)
KINDS = ("opener",) * 5 + ("word",) * 3 + ("prose", "question")  # in turn
PROSE = "addresses"  # what ships with the package; passages begin at a random sentence
PROSE_TOKENS = 24
# A small model at one is less sure of its own text than of real prose, and 0.9 gives text of about the same perplexity.
TEMPERATURES = (0.85, 1.0)
AT_ONCE = 4096  # windows on a GPU, where a step of one costs nearly as much as one of a thousand
AT_ONCE_CPU = 64
BEGINNINGS = 8192


@torch.no_grad()
def write(
    model: nn.Module,
    tokenizer: Any,
    count: int,
    length: int,
    seed: int = 0,
    seconds: float | None = None,
    progress: Callable[[str, int, int, str], None] | None = None,
) -> torch.Tensor:
    """int64 [count, length] sampled from a causal language model; fewer windows, but one batch at least, if `seconds`
    are over before. The same seed gives the same text on the same machine.

    Raises SpearfishError if its vocabulary has no words to begin with, or a prediction is not finite.
    """
    device = next(model.parameters()).device
    special = torch.tensor(sorted(set(tokenizer.all_special_ids)), device=device, dtype=torch.int64)
    prefix = torch.tensor(list(tokenizer("").input_ids), device=device, dtype=torch.int64)
    between = torch.tensor(tokenizer("\n\n", add_special_tokens=False).input_ids, device=device, dtype=torch.int64)
    beginnings = _beginnings(tokenizer, seed).to(device)
    batch = AT_ONCE_CPU
    if device.type == "cuda":
        batch = windows_that_fit(AT_ONCE, length, torch.cuda.mem_get_info(device)[0], model.config)
    generator = torch.Generator(device).manual_seed(seed)
    begin = time.perf_counter()
    parts: list[torch.Tensor] = []
    done = 0
    while done < count:
        size = min(batch, count - done)
        # cuDNN's attention plans anew for every length, and here each step has another.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            parts.append(_batch(model, size, length, prefix, between, beginnings, special, generator).cpu())
        done += size
        took = time.perf_counter() - begin
        if progress is not None:
            progress("writing", done, count, f"{done * length / took:.0f} tokens/s")
        if seconds is not None and took * (done + batch) / done > seconds:
            break
    return torch.cat(parts)


def windows_that_fit(wanted: int, length: int, free: int, config: Any) -> int:
    """Windows at once, one at least, whose keys and values in 16 bit and predictions take half of `free` bytes."""
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    each = 4 * int(config.num_hidden_layers) * heads * width * length + 12 * int(config.vocab_size)
    return max(min(wanted, free // (2 * each)), 1)


def _beginnings(tokenizer: Any, seed: int) -> torch.Tensor:
    """int64 [BEGINNINGS, longest] tokens that a text may begin with, filled up with -1; the words are those of the
    vocabulary with three letters or more that are one token, for openers and questions those with a capital."""
    decoded = tokenizer.batch_decode([[index] for index in range(len(tokenizer))])
    words = sorted({word for word in map(str.strip, decoded) if len(word) >= 3 and word.isalpha()})
    names = [word for word in words if word[0].isupper() and word[1:].islower()]
    if not names:
        raise SpearfishError("the tokenizer has no words to begin text with; give --calibration a file instead")
    sentences = [part for document in text.read_text(PROSE) for part in document.split(". ") if part]
    chooser = torch.Generator().manual_seed(seed)

    def one_of(choices: Sequence[str]) -> str:
        return choices[int(torch.randint(len(choices), (1,), generator=chooser))]

    texts = []
    for index in range(BEGINNINGS):
        kind = KINDS[index % len(KINDS)]
        if kind == "word":
            said = one_of(words)
        elif kind == "prose":
            said = one_of(sentences)
        else:
            asks = kind == "question" and tokenizer.chat_template is not None
            pattern = one_of(QUESTIONS if asks else OPENERS)
            said = pattern.format(*(one_of(names) for _ in range(pattern.count("{}"))))
            if asks:
                chat = [{"role": "user", "content": said}]
                said = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        texts.append(said)
    encoded = [torch.tensor(ids, dtype=torch.int64) for ids in tokenizer(texts, add_special_tokens=False).input_ids]
    for index in range(KINDS.index("prose"), BEGINNINGS, len(KINDS)):
        encoded[index] = encoded[index][:PROSE_TOKENS]
    return nn.utils.rnn.pad_sequence(encoded, batch_first=True, padding_value=-1)


def _batch(
    model: nn.Module,
    size: int,
    length: int,
    prefix: torch.Tensor,
    between: torch.Tensor,
    beginnings: torch.Tensor,
    special: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """int64 [size, length]."""
    device = special.device
    tokens = torch.empty(size, length, dtype=torch.int64, device=device)
    tokens[:, : len(prefix)] = prefix
    temperature = torch.linspace(*TEMPERATURES, size, device=device)[:, None]
    next_texts = torch.cat((between.expand(len(beginnings), -1), beginnings), dim=1)
    # [size, longest]: what each window must go on with, -1 where it is free.
    forced = _some(next_texts, size, generator)[:, len(between) :]
    forced = nn.functional.pad(forced, (0, len(between)), value=-1)
    # Newer releases of transformers have a new name for it.
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache: Any = None
    logits: torch.Tensor | None = None
    for position in range(len(prefix), length):
        if logits is None:
            chosen = forced[:, 0]
        else:
            chances = (logits.float() / temperature).softmax(-1)
            sampled = torch.multinomial(chances, 1, generator=generator)[:, 0]
            ended = torch.isin(sampled, special) & (forced[:, 0] < 0)
            forced = torch.where(ended[:, None], _some(next_texts, size, generator), forced)
            chosen = torch.where(forced[:, 0] >= 0, forced[:, 0], sampled)
        forced = torch.cat((forced[:, 1:], torch.full_like(forced[:, :1], -1)), dim=1)
        tokens[:, position] = chosen
        if position + 1 < length:
            given = tokens[:, : position + 1] if cache is None else chosen[:, None]
            out: Any = model(input_ids=given, use_cache=True, logits_to_keep=1, **{cache_name: cache})
            if cache is None and not out.logits.isfinite().all():
                raise SpearfishError("the model's predictions are not finite: it cannot write its own calibration text")
            cache, logits = getattr(out, cache_name), out.logits[:, -1]
    return tokens


def _some(rows: torch.Tensor, size: int, generator: torch.Generator) -> torch.Tensor:
    return rows[torch.randint(len(rows), (size,), generator=generator, device=rows.device)]
