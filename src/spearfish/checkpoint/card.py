"""The texts that go beside the weights: a model card and the recipe as YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spearfish.checkpoint.hosts import hosts

if TYPE_CHECKING:
    from spearfish.checkpoint.writer import Written


def to_yaml(value: Any, indent: int = 0) -> str:
    """A value of dicts, lists and JSON scalars as block YAML. (Every JSON scalar is one of YAML.)"""
    pad = "  " * indent
    lines = []
    if isinstance(value, Mapping):
        for key, item in value.items():
            name = key if isinstance(key, str) and key.isidentifier() else json.dumps(str(key))
            lines.append(f"{pad}{name}:{_yaml_item(item, indent)}")
    else:
        lines += [f"{pad}-{_yaml_item(item, indent)}" for item in value]
    return "\n".join(lines) + ("\n" if indent == 0 else "")


def _yaml_item(item: Any, indent: int) -> str:
    if isinstance(item, (Mapping, list, tuple)) and item:
        return "\n" + to_yaml(item, indent + 1)
    if isinstance(item, (Mapping, list, tuple)):
        return " {}" if isinstance(item, Mapping) else " []"
    return " " + json.dumps(item, ensure_ascii=False, default=str)


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
