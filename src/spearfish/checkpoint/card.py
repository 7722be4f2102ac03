"""The texts that go beside the weights: a model card and the recipe as YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spearfish.checkpoint.hosts import hosts

if TYPE_CHECKING:
    from spearfish.checkpoint.writer import Written


def to_yaml(value: Any, indent: int = 0) -> str:
    """A value of dicts, lists and JSON scalars as block YAML that parsers of YAML 1.1 and 1.2 read alike."""
    pad = "  " * indent
    lines = []
    if isinstance(value, Mapping):
        for key, item in value.items():
            plain = isinstance(key, str) and re.fullmatch(r"[A-Za-z_]\w*", key) and key.lower() not in _YAML_WORDS
            name = key if plain else json.dumps(str(key))
            lines.append(f"{pad}{name}:{_yaml_item(item, indent)}")
    else:
        lines += [f"{pad}-{_yaml_item(item, indent)}" for item in value]
    return "\n".join(lines) + ("\n" if indent == 0 else "")


def _yaml_item(item: Any, indent: int) -> str:
    if isinstance(item, (Mapping, list, tuple)) and item:
        return "\n" + to_yaml(item, indent + 1)
    if isinstance(item, (Mapping, list, tuple)):
        return " {}" if isinstance(item, Mapping) else " []"
    text = json.dumps(item, ensure_ascii=False, default=str)
    # YAML takes these three for line ends, JSON does not.
    text = re.sub("[\x85\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)
    if isinstance(item, float):
        # YAML 1.1 takes 1e-05 for a text; JSON's words for what is not finite are none of YAML's.
        special = {"Infinity": ".inf", "-Infinity": "-.inf", "NaN": ".nan"}
        text = special.get(text, text if "." in text else text.replace("e", ".0e"))
    return " " + text


# Plain words that YAML 1.1 takes for truth values or nothing.
_YAML_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def model_card(
    name: str,
    form: str,
    config: Mapping[str, Any],
    layers: Mapping[str, Written],
    extended: list[str],
    recipe: Mapping[str, Any] | None,
    total: int,
) -> str:
    """README.md of a written folder: what it is, how large, and what runs it."""
    front: dict[str, Any] = {"library_name": "spearfish", "tags": ["spearfish", "2:4", form]}
    base = config.get("_name_or_path") or (recipe or {}).get("model")
    if isinstance(base, str) and base.count("/") == 1 and not base.startswith((".", "/")):
        front["base_model"] = base
    weights = sum(layer.n * layer.k for layer in layers.values())
    nbytes = sum(layer.nbytes for layer in layers.values())
    schemes = sorted({str(layer.scheme) for layer in layers.values()})
    lines = ["---", to_yaml(front).rstrip(), "---", "", f"# {name}", ""]
    lines.append(f"Format `{form}`, {total / 2**20:,.1f} MiB of weights in all.")
    if weights:
        lines.append(
            f"{len(layers)} linear layers ({', '.join(schemes)}) at {8 * nbytes / weights:.3f} bits per weight;"
            f" the other tensors are as they were."
        )
    lines += ["", "## What runs it", ""]
    if extended:
        lines += ["**Extended: needs spearfish.** " + "; ".join(extended) + ".", ""]
    lines += [f"- {line}" for line in hosts(form, bool(extended))]
    lines += ["", "```sh", f"spearfish inspect {name}", f'spearfish generate {name} "Once upon a time"', "```", ""]
    if recipe:
        lines += ["## How it was made", "", "```yaml", to_yaml(recipe).rstrip(), "```", ""]
    return "\n".join(lines)
