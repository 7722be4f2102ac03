"""Text that the dense model writes itself, in large batches: calibration and distillation need no data set then.

Texts begin in four ways: like an article about a random word or two, with a single random word that leads anywhere,
like a passage of real prose, and as the answer to a question where the model has a chat template. They are sampled at
a temperature near one: well below it a model writes plain, sure sentences, and what learns from those alone does not
know what to make of real prose. Where the model ends a text, the next one is begun at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spearfish import text
from spearfish.compress import glance
from spearfish.compress.recover import compiler_works, fused
from spearfish.compress.replay import Repeated
from spearfish.errors import SpearfishError
from spearfish.models import need_transformers

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
AT_ONCE = 4096  # windows of 512 tokens on a GPU, where a step of one costs nearly as much as one of a thousand
AT_ONCE_CPU = 64
BEGINNINGS = 65536  # different ones at most
REACH = 64  # keys and values that attention takes in are a multiple of these: each has its own recording


class _Desk:
    """One step of writing for `size` windows at once: the keys and values of all that was written, at fixed places, so
    that a GPU can record the step. Attention goes over the first `reach` of them, of which those not yet written are
    hidden.

    transformers hands every attention to a function by name: this one keeps the keys and values itself.
    """

    IMPLEMENTATION = "spearfish-writing"
    at_work: _Desk | None = None

    def __init__(self, model: nn.Module, size: int, length: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.length = length
        self.given = torch.zeros(size, 1, dtype=torch.int64, device=self.device)
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.index = torch.arange(length, device=self.device)
        self.slots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.steps: dict[int, Repeated] = {}  # by reach
        self.reach = 0
        self.glances = self.device.type == "cuda" and glance.AVAILABLE and compiler_works()
        need_transformers("writing text").AttentionInterface.register(self.IMPLEMENTATION, _attend)

    def predict(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """Predictions [size, v] for what follows tokens [size], which stand at `position`; what was given before stands
        in front of them. Raises SpearfishError if the model keeps its keys and values elsewhere."""
        self.given.copy_(tokens[:, None])
        self.place.fill_(position)
        # The kernel for one token stops by itself where nothing is written yet: one recording does for all places.
        self.reach = self.length if self.glances else min((position // REACH + 1) * REACH, self.length)
        if self.reach not in self.steps:
            self.steps[self.reach] = Repeated(self._step, self.device)
        config: Any = self.model.config
        usual = config._attn_implementation
        config._attn_implementation, _Desk.at_work = self.IMPLEMENTATION, self
        try:
            with as_built(self.model):
                logits = self.steps[self.reach]()
        finally:
            config._attn_implementation, _Desk.at_work = usual, None
        if len(self.slots) != config.num_hidden_layers:
            raise SpearfishError(
                f"a {config.model_type} cannot write its own text: {len(self.slots)} of its {config.num_hidden_layers}"
                " blocks attend in the way that this needs; give --calibration a file instead"
            )
        return logits

    def _step(self) -> torch.Tensor:
        out: Any = self.model(input_ids=self.given, position_ids=self.place[None], use_cache=False)
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **_named: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention [size, 1, heads, width] of one new token in each window, from [size, heads, 1, width]."""
        size, heads, _, width = query.shape
        if module.layer_idx not in self.slots:
            shapes = [(size, new.shape[1], self.length, new.shape[3]) for new in (key, value)]
            self.slots[module.layer_idx] = (key.new_zeros(shapes[0]), value.new_zeros(shapes[1]))
        keys, values = self.slots[module.layer_idx]
        keys.index_copy_(2, self.place, key)
        values.index_copy_(2, self.place, value)
        # The heads that share keys and values stand where the tokens of a longer query would.
        grouped = query.reshape(size, key.shape[1], -1, width)
        if self.glances and glance.fits(grouped, value):
            out = glance.attend(grouped, keys, values, self.place, scaling, sliding_window)
            return out.reshape(size, 1, heads, -1), None
        index = self.index[: self.reach]
        seen = index <= self.place
        if sliding_window is not None:
            seen = seen & (index > self.place - sliding_window)
        out = nn.functional.scaled_dot_product_attention(
            grouped, keys[:, :, : self.reach], values[:, :, : self.reach], seen[None, None, None], scale=scaling
        )
        return out.reshape(size, 1, heads, -1), None


@contextmanager
def as_built(model: nn.Module) -> Iterator[None]:
    """Every module runs its class's own forward pass. Recovery hands over a teacher whose blocks were given others.
    Those go on with the rotary tables of their first call, so that every token of a text would stand where the first
    does. And they are compiled, which here, where each block has another place in `slots`, would be done anew for every
    one (30 s of an H200, seen once)."""
    given = [(module, module.__dict__.pop("forward")) for module in model.modules() if "forward" in module.__dict__]
    try:
        yield
    finally:
        for module, forward in given:
            module.forward = forward


def _attend(module: Any, *arguments: Any, **named: Any) -> tuple[torch.Tensor, None]:
    if _Desk.at_work is None:
        raise ValueError("unreachable: attention without a desk")
    return _Desk.at_work.attend(module, *arguments, **named)


@torch.no_grad()
def write(
    model: nn.Module,
    tokenizer: Any,
    count: int,
    length: int,
    seed: int = 0,
    seconds: float | None = None,
    progress: Callable[[str, int, int, str], None] | None = None,
    texts: int = 1,
) -> torch.Tensor:
    """int64 [count, length] sampled from a causal language model; fewer windows, but one batch at least, if `seconds`
    are over before. The same seed gives the same text on the same machine.

    texts: so many stand side by side in each window, written apart: shorter ones take less time.

    Raises SpearfishError if its vocabulary has no words to begin with, or a prediction is not finite.
    """
    device = next(model.parameters()).device
    special = torch.tensor(sorted(set(tokenizer.all_special_ids)), device=device, dtype=torch.int64)
    prefix = torch.tensor(list(tokenizer("").input_ids), device=device, dtype=torch.int64)
    window, length = length, len(prefix) - (len(prefix) - length) // texts
    between = torch.tensor(tokenizer("\n\n", add_special_tokens=False).input_ids, device=device, dtype=torch.int64)
    beginnings = _beginnings(tokenizer, seed, min(BEGINNINGS, 2 * count * texts)).to(device)
    batch = AT_ONCE_CPU
    if device.type == "cuda":
        batch = windows_that_fit(AT_ONCE * 512 // length, length, torch.cuda.mem_get_info(device)[0], model.config)
    batch = min(batch // texts or 1, count)
    batch = -(-count // -(-count // batch))  # as many batches as that takes, all of one size
    generator = torch.Generator(device).manual_seed(seed)
    begin = time.perf_counter()
    desk = _Desk(model, batch * texts, length)
    parts: list[torch.Tensor] = []
    done = 0
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        while done < count:
            parts.append(_batch(desk, prefix, between, beginnings, special, generator).cpu())
            done += batch
            took = time.perf_counter() - begin
            if progress is not None:
                progress("writing", min(done, count), count, f"{done * window / took:.0f} tokens/s")
            if seconds is not None and took * (done + batch) / done > seconds:
                break
    del desk
    if device.type == "cuda":
        torch.cuda.empty_cache()  # half of the GPU is set free: others look at how much there is
    written = torch.cat(parts).reshape(-1, texts, length)[:count]
    # What every window begins with stands once.
    return torch.cat((written[:, 0, : len(prefix)], written[:, :, len(prefix) :].flatten(1)), dim=1)[:, :window]


def windows_that_fit(wanted: int, length: int, free: int, config: Any) -> int:
    """Windows at once, one at least, whose keys and values in 16 bit and predictions take half of `free` bytes."""
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    each = 4 * int(config.num_hidden_layers) * heads * width * length + 24 * int(config.vocab_size)
    return max(min(wanted, free // (2 * each)), 1)


def _beginnings(tokenizer: Any, seed: int, number: int) -> torch.Tensor:
    """int64 [number, longest] tokens that a text may begin with, filled up with -1; the words are those of the
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
    for index in range(number):
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
    for index in range(KINDS.index("prose"), number, len(KINDS)):
        encoded[index] = encoded[index][:PROSE_TOKENS]
    return nn.utils.rnn.pad_sequence(encoded, batch_first=True, padding_value=-1)


def _batch(
    desk: _Desk,
    prefix: torch.Tensor,
    between: torch.Tensor,
    beginnings: torch.Tensor,
    special: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """int64 [size, length]."""
    draw = fused(_draw, special.device)
    device, (size, _), length = special.device, desk.given.shape, desk.length
    tokens = torch.empty(size, length, dtype=torch.int64, device=device)
    temperature = torch.linspace(*TEMPERATURES, size, device=device)[:, None]
    # [size, longest]: what each window must go on with, -1 where it is free.
    next_texts = torch.cat((between.expand(len(beginnings), -1), beginnings), dim=1)
    next_texts = nn.functional.pad(next_texts, (0, len(prefix)), value=-1)
    forced = torch.cat((prefix.expand(size, -1), _some(next_texts, size, generator)[:, len(between) :]), dim=1)
    forced = nn.functional.pad(forced, (0, len(between) - len(prefix)), value=-1)
    for position in range(length):
        if position == 0:
            chosen = forced[:, 0]
        else:
            logits = desk.predict(chosen, position - 1)
            if position == 1 and not logits.isfinite().all():
                raise SpearfishError("the model's predictions are not finite: it cannot write its own calibration text")
            sampled = draw(logits, temperature)
            ended = torch.isin(sampled, special) & (forced[:, 0] < 0)
            forced = torch.where(ended[:, None], _some(next_texts, size, generator), forced)
            chosen = torch.where(forced[:, 0] >= 0, forced[:, 0], sampled)
        forced = torch.cat((forced[:, 1:], torch.full_like(forced[:, :1], -1)), dim=1)
        tokens[:, position] = chosen
    return tokens


def _draw(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """One token for each row of logits [n, v]: the largest logit after Gumbel noise is a sample of their softmax."""
    noise = -(-torch.rand_like(logits, dtype=torch.float32).clamp_min(1e-20).log()).log()
    return (logits.float() / temperature + noise).argmax(-1)


def _some(rows: torch.Tensor, size: int, generator: torch.Generator) -> torch.Tensor:
    return rows[torch.randint(len(rows), (size,), generator=generator, device=rows.device)]
