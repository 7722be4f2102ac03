"""Mutations that know what they look at: JSON values, numbers near a border, bytes of a tensor."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from targets import LAYER, NUL, Target, split

NASTY: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 127, 128, 2**31, 2**31 - 1, 2**62, 2**63, 2**80, 1e300,
    -0.0, float("nan"), float("inf"), "", "x", "marlin_24", "gptq", "marlin-24", "pack-quantized", "dense", "BF16",
    "I8", "U8", "I32", "I64", "F64", "F8_E4M3", "BOOL", "U16", "U32", "U64", [], {}, [1], [0, 0], [2**40, 2**40],
    [1] * 70, [2**61, 0], {"a": 1}, [None], ["Linear"], "re:(", "re:(a+)+$", "(.*)*x", "-1", "channel", "group",
    "tensor", LAYER, "\ud800", "a" * 300, "1.0", "2.0", "compressed-tensors", "sparse-bitmask", "sparse-24-bitmask",
    "float16", [8, 8],
)  # fmt: skip
KEYS = (
    "spearfish", "format", "sym", "dynamic", "bits", "group_size", "quant_method", "checkpoint_format", "layers",
    "shape", "format_version", "extended", "recipe", "config_groups", "targets", "weights", "sparsity_config",
    "ignore", "facts", "__metadata__", "dtype", "data_offsets", "desc_act", "is_marlin_24_format", "text_config",
    "quantization_config", "compression_config", "tie_word_embeddings", "weight_map", "actorder", "strategy",
    "symmetric", "num_bits",
)  # fmt: skip
TOKENS = (
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"1e999", b"-1", b"18446744073709551616", b"NaN", b"\xff\xfe",
    b"\xef\xbb\xbf", b"[" * 200, b'{"a":' * 100, b"9" * 5000, b"\0", b"\xf0\x9f\x90\x9f", b"\\ud800", b" " * 64,
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a JSON value."""
    found: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        item = stack.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        for key in keys:
            found.append((item, key))
            stack.append(item[key])
    return found


def mutate_json(value: Any, rng: random.Random, extra: tuple[Any, ...] = ()) -> Any:
    """The value with one to three changes: removed, renamed, moved by a little, swapped, or replaced by poison."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = places(value)
        if not found:
            return copy.deepcopy(rng.choice(NASTY))
        container, key = rng.choice(found)
        old = container[key]
        action = rng.randrange(8)
        if action == 0:
            container.pop(key)
        elif action == 1 and isinstance(container, dict):
            container[rng.choice((*KEYS, f"{key}x"))] = copy.deepcopy(rng.choice(NASTY))
        elif action == 2 and isinstance(container, dict):
            container[rng.choice((*KEYS, f"{key}.x", ""))] = container.pop(key)
        elif action in (3, 4) and type(old) is int:
            step, factor = rng.choice((-64, -8, -2, -1, 1, 2, 8, 64)), rng.choice((-1, 2, 4, 2**31))
            container[key] = old + step if action == 3 else old * factor
        elif action == 5:
            other, where = rng.choice(found)
            if where in other if isinstance(other, dict) else where < len(other):
                container[key] = copy.deepcopy(other[where])
        elif extra and action == 6:
            container[key] = rng.choice(extra)
        else:
            container[key] = copy.deepcopy(rng.choice(NASTY))
    return value


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut, doubled or put in."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not content:
            return rng.randbytes(rng.randint(1, 8))
        action, at = rng.randrange(6), rng.randrange(len(content))
        if action == 0:
            del content[at:]
        elif action == 1:
            content[at:at] = rng.choice(TOKENS)
        elif action == 2:
            del content[at : at + rng.randint(1, 16)]
        elif action == 3:
            content[at : at + 8] = rng.choice((b"\xff" * 8, b"\0" * 8, b"\x7f" * 8, rng.randbytes(8)))
        elif action == 4:
            content[at] ^= 1 << rng.randrange(8)
        else:
            content[at:at] = content[at : at + rng.randint(1, 32)]
    return bytes(content[: 1 << 16])


def _mutate_text(text: bytes, rng: random.Random, extra: tuple[Any, ...]) -> bytes:
    """Structure first; raw bytes now and then, and where there is no structure."""
    if rng.random() < 0.9:
        try:
            return json.dumps(mutate_json(json.loads(text), rng, extra)).encode("utf-8", "surrogatepass")[: 1 << 16]
        except (ValueError, RecursionError):
            pass
    return mutate_bytes(text, rng)


def mutate(target: Target, data: bytes, rng: random.Random) -> bytes:
    """One more input for a target, made from a good or an earlier one."""
    if target.name == "header" and rng.random() < 0.85:
        length = int.from_bytes(data[:8], "little")
        if length <= len(data) - 8:
            head = _mutate_text(data[8 : 8 + length], rng, target.dictionary)
            claimed = max(0, len(head) + rng.choice((0, 0, 0, 0, 0, 0, -1, 1)))
            return claimed.to_bytes(8, "little") + head + data[8 + length :]
    if target.name == "cache" and data[:1] == b"F" and rng.random() < 0.8:
        line, _, rest = data[1:].partition(b"\n")
        return b"F" + _mutate_text(line, rng, ()) + b"\n" + rest
    if target.parts == 1:
        return mutate_bytes(data, rng) if target.data else _mutate_text(data, rng, target.dictionary)
    parts = split(data, target.parts)
    texts = target.parts - 1 if target.data else target.parts
    chosen = rng.randrange(len(parts))
    if target.data and len(parts) == 3 and rng.random() < 0.2:
        chosen = 2
    if chosen < texts:
        parts[chosen] = _mutate_text(parts[chosen], rng, target.dictionary)
    else:
        parts[chosen] = mutate_bytes(parts[chosen], rng)
    return NUL.join(parts)
