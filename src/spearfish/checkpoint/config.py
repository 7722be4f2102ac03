"""What a checkpoint's config says about its quantisation, in all the places and spellings that were in use.

Places: `quantization_config` or the older `compression_config` in config.json, and quantize_config.json beside it.
Spellings of the GPTQ family: `checkpoint_format`, `format`, `is_marlin_format`, or the quant_method itself. Two that
disagree are an error that names both; nothing is guessed from the order in which they are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spearfish.checkpoint.patterns import Budget, Module, Pattern
from spearfish.checkpoint.safefile import read_json
from spearfish.errors import FormatError, UnsupportedError
from spearfish.formats import Declared

FORMAT_VERSION = "1.0"  # of what lies under our own key; a reader refuses a newer major number
OUR_KEY = "spearfish"

_GPTQ_FORMATS = {"gptq": "gptq", "gptq_v2": "gptq_v2", "marlin": "marlin", "marlin_24": "marlin_24"}
_CT_METHODS = ("compressed-tensors", "sparseml")
_READ = "spearfish reads gptq (gptq, gptq_v2, marlin, marlin_24) and compressed-tensors (marlin-24, pack-quantized," + (
    " sparse-24-bitmask, sparse-bitmask)"
)


@dataclass(frozen=True)
class Rule:
    """A statement about the modules that `pattern` matches, or about all if it is None."""

    pattern: Pattern | Module | None
    declared: Declared


@dataclass(frozen=True)
class QuantConfig:
    """The quantisation that a config describes. `format` is a key of `FORMATS`; `where` names where it was read."""

    format: str
    where: str = "config.json"
    declared: Declared = field(default_factory=Declared)
    rules: tuple[Rule, ...] = ()
    ours: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def of(self, module: str) -> Declared:
        """What is said of one module: our own per-layer facts, else the first matching rule, else the general one."""
        declared = self.declared
        budget = Budget(module)
        for rule in self.rules:
            if rule.pattern is None or rule.pattern.search(module, budget):
                declared = rule.declared
                break
        own = self.layer(module)
        return Declared(
            bits=own.get("bits", declared.bits),
            group_size=own.get("group_size", declared.group_size),
            symmetric=declared.symmetric,
            act_order=declared.act_order,
            ours=self.ours is not None,
        )

    def layer(self, module: str) -> Mapping[str, Any]:
        """Our own facts about a layer that differs from the general statement: bits, group_size, true shape."""
        facts: Mapping[str, Any] = (self.ours or {}).get("layers", {}).get(module, {})
        return facts

    @property
    def extended(self) -> tuple[str, ...]:
        """Why only spearfish runs this folder; empty if the original programs can."""
        reasons: Any = (self.ours or {}).get("extended") or ()
        return tuple(str(reason) for reason in reasons) if isinstance(reasons, list) else ()


def read_config(folder: Path) -> tuple[dict[str, Any], QuantConfig]:
    """config.json and what it and its neighbours say of quantisation. Raises FormatError where two places disagree and
    UnsupportedError for a method that is not read."""
    file = folder / "config.json"
    if not file.is_file():
        raise FormatError(f"{folder}: no config.json in this folder; is it a checkpoint?")
    config = read_json(file)
    blocks = [
        (f"config.json: {key}", config[key])
        for key in ("quantization_config", "compression_config")
        if config.get(key) is not None
    ]
    text = config.get("text_config")
    if not blocks and isinstance(text, dict) and text.get("quantization_config") is not None:
        blocks.append(("config.json: text_config.quantization_config", text["quantization_config"]))
    separate = folder / "quantize_config.json"
    if separate.is_file():
        blocks.append((separate.name, read_json(separate)))
    if not blocks and isinstance(config.get("sparsity_config"), dict):
        blocks.append(("config.json", {"quant_method": "compressed-tensors"}))
    found = [interpret(block, where, config.get("sparsity_config")) for where, block in blocks]
    if not found:
        return config, QuantConfig("dense")
    first = found[0]
    for other in found[1:]:
        _compare(first, other)
    return config, next((each for each in found if each.ours is not None), first)


def _compare(a: QuantConfig, b: QuantConfig) -> None:
    pairs = [("format", a.format, b.format)]
    pairs += [
        (key, getattr(a.declared, key), getattr(b.declared, key))
        for key in ("bits", "group_size", "symmetric", "act_order")
    ]
    for key, left, right in pairs:
        if left is not None and right is not None and left != right:
            raise FormatError(
                f"{a.where} says {key} {left!r} and {b.where} says {right!r}. Remove the one that is wrong"
            )


def interpret(block: Any, where: str, sparsity: Any = None) -> QuantConfig:
    """What one block says. Raises FormatError where it contradicts itself, UnsupportedError for what is not read."""
    if not isinstance(block, dict):
        raise FormatError(f"{where} is not a JSON object")
    ours = block.get(OUR_KEY)
    if ours is not None:
        _check_ours(ours, where)
    method = str(block.get("quant_method") or block.get("method") or "").lower().replace("_", "-")
    if method in _CT_METHODS or (not method and ("config_groups" in block or "sparsity_config" in block)):
        return _compressed_tensors(block, where, sparsity, ours)
    if method in ("gptq", "marlin", "gptq-marlin", "gptq-marlin-24", "") and (method or "bits" in block):
        return _gptq(block, where, method, ours)
    raise UnsupportedError(f"{where}: quant_method {block.get('quant_method')!r} is not read; {_READ}")


def _check_ours(ours: Any, where: str) -> None:
    version = ours.get("format_version") if isinstance(ours, dict) else None
    match = re.fullmatch(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    if match is None:
        raise FormatError(f"{where}: {OUR_KEY}.format_version is {version!r}, wanted a text like {FORMAT_VERSION!r}")
    if int(match[1]) > int(FORMAT_VERSION.split(".")[0]):
        raise UnsupportedError(
            f"{where}: written in format version {version}, this spearfish reads up to {FORMAT_VERSION}."
            f" Update spearfish (pip install -U spearfish)"
        )
    layers = ours.get("layers", {})
    if not isinstance(layers, dict) or not all(_is_layer(facts) for facts in layers.values()):
        raise FormatError(f"{where}: {OUR_KEY}.layers is malformed: wanted bits, group_size and shape by layer name")


def _is_layer(facts: Any) -> bool:
    if not isinstance(facts, dict):
        return False
    shape = facts.get("shape", [1, 1])
    numbers = [facts.get("bits", 4), facts.get("group_size", -1)]
    return (
        isinstance(shape, list) and len(shape) == 2 and all(type(number) is int for number in numbers + shape)
    ) and (numbers[1] == -1 or numbers[1] > 0)


def _gptq(block: dict[str, Any], where: str, method: str, ours: Any) -> QuantConfig:
    claims: dict[str, str] = {}
    for key in ("checkpoint_format", "format"):
        value = block.get(key)
        if value is None:
            continue
        known = _GPTQ_FORMATS.get(str(value).lower().replace("-", "_"))
        if known is None:
            raise UnsupportedError(f"{where}: {key} {value!r} is not read; {_READ}")
        claims[key] = known
    flags = {"is_marlin_format": "marlin", "is_marlin_24_format": "marlin_24"}
    claims |= {key: meaning for key, meaning in flags.items() if block.get(key) is True}
    if method in ("marlin", "gptq-marlin-24"):
        claims["quant_method"] = "marlin_24" if method.endswith("24") else "marlin"
    if len(set(claims.values())) > 1:
        said = " and ".join(f"{key} says {value}" for key, value in claims.items())
        raise FormatError(f"{where}: {said}. Remove the one that is wrong")
    form = next(iter(claims.values()), "gptq")
    notes = []
    symmetric = _flag(block, "sym", where)
    act_order = _flag(block, "desc_act", where)
    for key, value, assumed in (("sym", symmetric, "the zero points decide"), ("desc_act", act_order, "false")):
        if value is None and form in ("gptq", "gptq_v2"):
            notes.append(f"{where} has no {key}; taken: {assumed}")
    declared = Declared(
        bits=_whole(block, "bits", where, range(1, 9)),
        group_size=_group(block.get("group_size"), where),
        symmetric=symmetric,
        act_order=act_order,
        ours=ours is not None,
    )
    return QuantConfig(form, where, declared, _dynamic(block, declared, where), ours, tuple(notes))


def _dynamic(block: dict[str, Any], declared: Declared, where: str) -> tuple[Rule, ...]:
    """GPTQModel's overrides by module: "+:regex" (or the bare regex) changes bits or group size, "-:regex" excludes."""
    dynamic = block.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise FormatError(f"{where}: dynamic is not a JSON object")
    rules = []
    for key, change in dynamic.items():
        if key.startswith("-:") or not isinstance(change, dict):
            continue
        rules.append(
            Rule(
                Pattern(key.removeprefix("+:"), where),
                Declared(
                    bits=_whole(change, "bits", where, range(1, 9)) or declared.bits,
                    group_size=_group(change.get("group_size", declared.group_size), where),
                    symmetric=_flag(change, "sym", where) if "sym" in change else declared.symmetric,
                    act_order=bool(change.get("desc_act", declared.act_order)),
                    ours=declared.ours,
                ),
            )
        )
    return tuple(rules)


def _compressed_tensors(block: dict[str, Any], where: str, sparsity: Any, ours: Any) -> QuantConfig:
    sparsity = block.get("sparsity_config") or sparsity or {}
    if not isinstance(sparsity, dict):
        raise FormatError(f"{where}: sparsity_config is not a JSON object")
    sparse = str(sparsity.get("format") or "dense")
    groups = block.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise FormatError(f"{where}: config_groups is not an object of objects")
    named = {str(group["format"]) for group in groups.values() if group.get("format")}
    form = str(block.get("format") or (named.pop() if len(named) == 1 else "dense")).replace("_", "-")
    if form == "mixed-precision" and named == {"pack-quantized"}:
        form = "pack-quantized"
    if form in ("sparse-24-bitmask", "sparse-bitmask"):
        form, sparse = "dense", form
    rules = tuple(rule for group in groups.values() for rule in _ct_group(group, where, ours is not None))
    if form in ("marlin-24", "pack-quantized"):
        found = f"ct-{form}"
    elif sparse in ("sparse-24-bitmask", "sparse-bitmask") and form in _UNPACKED:
        found = f"ct-{sparse}"
    elif form == "dense" and sparse == "dense" and not groups:
        found = "dense"
    else:
        raise UnsupportedError(
            f"{where}: compressed-tensors format {form!r} with sparsity format {sparse!r} is not read; {_READ}"
        )
    everything = [rule for rule in rules if rule.pattern is None]
    declared = everything[0].declared if everything else Declared(ours=ours is not None)
    return QuantConfig(found, where, declared, tuple(rule for rule in rules if rule.pattern is not None), ours)


# Formats whose layers keep a tensor named `weight`, which the sparse formats then wrap.
_UNPACKED = ("dense", "int-quantized", "float-quantized", "naive-quantized")


def _ct_group(group: dict[str, Any], where: str, ours: bool) -> list[Rule]:
    weights = group.get("weights")
    targets = group.get("targets") or []
    if not isinstance(targets, list):
        raise FormatError(f"{where}: targets is not a list")
    if weights is None:
        return []
    if not isinstance(weights, dict):
        raise FormatError(f"{where}: weights is not a JSON object")
    strategy = weights.get("strategy")
    group_size = _group(weights.get("group_size"), where)
    if strategy in ("channel", "tensor"):
        group_size = -1
    declared = Declared(
        bits=_whole(weights, "num_bits", where, range(1, 17)),
        group_size=group_size,
        symmetric=_flag(weights, "symmetric", where),
        act_order=weights.get("actorder") in ("group", True),
        ours=ours,
    )
    rules = []
    for target in targets:
        if not isinstance(target, str):
            raise FormatError(f"{where}: target {target!r} is not a text")
        if target.startswith("re:"):
            rules.append(Rule(Pattern(f"^(?:{target[3:]})", where), declared))
        elif target == "Linear" or target.endswith("Linear"):
            rules.append(Rule(None, declared))
        else:
            rules.append(Rule(Module(target), declared))
    return rules


def _whole(block: Mapping[str, Any], key: str, where: str, legal: range) -> int | None:
    value = block.get(key)
    if value is None:
        return None
    if type(value) is not int or value not in legal:
        raise FormatError(f"{where}: {key} is {value!r}, wanted a whole number {legal.start}..{legal.stop - 1}")
    return value


def _group(value: Any, where: str) -> int | None:
    if value is None:
        return None
    if type(value) is not int or value == 0 or value < -1:
        raise FormatError(f"{where}: group_size is {value!r}, wanted a positive number, or -1 for one group per column")
    return value


def _flag(block: Mapping[str, Any], key: str, where: str) -> bool | None:
    value = block.get(key)
    if value is None or isinstance(value, bool):
        return value
    raise FormatError(f"{where}: {key} is {value!r}, wanted true or false")
