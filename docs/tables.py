"""The tables of docs/tutorial.md, made from the result files below benchmarks/results and from nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from spearfish.bench.report import by_tokens, geometric_mean, number, ratio, rows, table
from spearfish.bench.results import load_all
from spearfish.compress import METHODS, Recipe
from spearfish.scheme import QuantScheme

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from engine_page import load as load_engine

NOTHING = "*(Not measured yet: no result file has been committed.)*"
OURS, LIBRARY = "spearfish", "cublas"


def kernels(folder: Path) -> str:
    """Per GPU and m: how much faster 2:4 int4 is than the best dense 4-bit kernel and than cuBLAS in 16 bit."""
    parts = []
    for results in load_all(folder):
        if results.scheme != QuantScheme(4, 128) or results.dtype != "fp16":
            continue
        body = []
        for m, found in by_tokens(rows(results)).items():
            quantised = []
            for row in found:
                others = [us for name, us in row.us.items() if not name.startswith((OURS, LIBRARY))]
                quantised.append(ratio(min(others, default=None), row.ours))
            sixteen = [row.against_cublas for row in found]
            body.append((str(m), _with_range(quantised), _with_range(sixteen)))
        if body:
            parts.append(f"{results.gpu}:\n\n" + table(("m", "× best dense 4-bit", "× cuBLAS, 16-bit"), body))
    return "\n\n".join(parts) or NOTHING


def _with_range(ratios: list[float | None]) -> str:
    known = [value for value in ratios if value is not None]
    if not known:
        return number(None)
    return f"{number(geometric_mean(known))} ({number(min(known))} to {number(max(known))})"


def engine(folder: Path) -> str:
    """Per geometry: how much faster 2:4 int4 is than dense int4 and fp16 in the same engine."""
    parts = []
    for one in load_engine(folder)[0]:
        kinds = ("sparse24-int4", "int4", "fp16")
        rows = [(f"decode, {batch}", [one.decode(kind, batch) for kind in kinds]) for batch in one.batches]
        rows += [(f"prefill, {which}", [one.prefill(kind, which) for kind in kinds]) for which in one.prefills]
        body = [
            (what, number(ratio(dense, ours)), number(ratio(half, ours)))
            for what, (ours, dense, half) in rows
            if ours is not None
        ]
        if body:
            parts.append(f"{one.geometry} on {one.where}:\n\n" + table(("requests", "× dense int4", "× fp16"), body))
    return "\n\n".join(parts) or NOTHING


DEFAULTS = {name: value for name, value in Recipe().to_dict().items() if name != "seed"}


def accuracy(folder: Path) -> str:
    """Per model and way of making it: perplexity beside the dense model's, and the size of the whole file. Seeds are
    averaged; of several settings of one way the best is shown."""
    seeds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        facts = json.loads(file.read_text(encoding="utf-8"))
        if not {"model", "recipe", "quality", "dense"} <= facts.keys():
            continue
        # Windows and text must agree before two numbers may stand side by side.
        measure = tuple(facts["quality"][name] for name in ("windows", "length", "sha256"))
        # With what has become an option since, or seeds of older and newer files would not meet.
        recipe = DEFAULTS | {name: value for name, value in facts["recipe"].items() if name != "seed"}
        key = (facts["model"], measure, way(recipe), json.dumps(recipe, sort_keys=True))
        seeds.setdefault(key, []).append(facts)
    best: dict[tuple[Any, ...], tuple[float, tuple[str, ...]]] = {}
    for (model, measure, words, _), runs in seeds.items():
        perplexity, dense = (geometric_mean(run[name]["perplexity"] for run in runs) for name in ("quality", "dense"))
        sizes = [run["bytes"] / 1e6 for run in runs if run.get("bytes")]
        size = number(sum(sizes) / len(sizes) if sizes else None, 0)
        found = (perplexity or 0.0, (model, words, size, number(perplexity, 1), number(dense, 1)))
        best[model, measure, words] = min(best.get((model, measure, words), found), found)
    order = sorted(best, key=lambda key: (key[:2], best[key][0]))
    body = [best[key][1] for key in order]
    return table(("model", "made by", "MB", "perplexity", "dense"), body) if body else NOTHING


def way(recipe: dict[str, Any]) -> str:
    """In words what was done: what counts for a newcomer, without seeds and numbers of windows."""
    bits, method = recipe["bits"], recipe["method"]
    pruned = method not in METHODS or METHODS[method].prunes
    words = [f"{'2:4, ' if pruned else 'dense, '}{bits}-bit, `{method}`"]
    if recipe.get("catch_up"):
        words.append(f"`--catch-up {recipe['catch_up']:g}`")
    if recipe.get("budget"):
        words.append(f"`--budget {recipe['budget']:g}`")
    if recipe.get("reconstruct"):
        words.append(f"`--reconstruct {recipe['reconstruct']}`")
    if recipe.get("together", 1) > 1:
        words.append(f"`--together {recipe['together']}`")
    if recipe.get("recover") or recipe.get("recover_steps"):
        words.append("`--recover`")
    return ", ".join(words)
