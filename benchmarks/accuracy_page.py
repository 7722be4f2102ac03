"""Writes the tables of docs/accuracy.md, one a model, from benchmarks/results/accuracy, or says that they are stale
(--check).

python benchmarks/accuracy_page.py
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "accuracy.md", ROOT / "benchmarks" / "results" / "accuracy"
BEGIN, END = "<!-- table -->\n", "<!-- /table -->"
BASELINE = "sparsegpt"
WITHOUT_TEXT = ("rtn", "magnitude")
HEAD = ("made by", "calibrated on", "seeds", "perplexity", "gap", "of R's gap", "KL", "took")


def load(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By model, the results that may stand side by side: those with the most windows of one held-out text."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        facts = json.loads(file.read_text(encoding="utf-8"))
        if "quality" in facts:
            # A model from a GGUF file lies in a folder whose name ends with the file's hash.
            found.setdefault(re.sub("-[0-9a-f]{16}$", "", facts["model"]), []).append(facts)
    for model, results in found.items():
        most = judged_on(max(results, key=lambda facts: int(facts["quality"]["windows"])))
        found[model] = [facts for facts in results if judged_on(facts) == most]
    return found


def judged_on(facts: dict[str, Any]) -> tuple[int, int, str]:
    """The held-out text of a result: windows, their length, hash."""
    quality = facts["quality"]
    return quality["windows"], quality["length"], quality["sha256"]


def caption(model: str, results: list[dict[str, Any]]) -> str:
    """What a model's rows were judged on."""
    dense = sorted((facts["dense"] for facts in results), key=lambda dense: float(dense["perplexity"]))[
        len(results) // 2
    ]
    return (
        f"**{model}**: dense {dense['perplexity']:.2f}, {dense['windows']} windows of {dense['length']} tokens,"
        f" standard error {100 * dense['standard_error']:.1f} %\n\n"
    )


def label(recipe: dict[str, Any]) -> str:
    """What was done, in the words of the command line."""
    words = [recipe["method"], *([f"--bits {recipe['bits']}"] if recipe["bits"] != 4 else [])]
    if recipe["group_size"] != 128:
        words.append(f"--group-size {recipe['group_size']}")
    options = ("catch_up", "budget", "reconstruct")
    words += [f"--{name.replace('_', '-')} {recipe[name]:g}" for name in options if recipe.get(name)]
    if recipe.get("together", 1) > 1:
        words.append(f"--together {recipe['together']}")
    if recipe["recover"]:
        words.append(f"--recover {recipe['recover']:.0f}s")
    return f"`{' '.join(words)}`"


def text_of(facts: dict[str, Any]) -> str:
    """What a result was calibrated on."""
    calibration = facts["calibration"]
    if facts["recipe"]["method"] in WITHOUT_TEXT:
        return "nothing"
    return f"{calibration['source']}, {calibration['tokens']}"


def table(results: list[dict[str, Any]]) -> str:
    """A row for each recipe and text. Its gap is compared with R's on the same text; if R was not made on that, with
    R's on the most."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    base: dict[str, list[float]] = {}
    for facts in sorted(results, key=lambda facts: -int(facts["calibration"]["tokens"])):
        groups.setdefault((label(facts["recipe"]), text_of(facts)), []).append(facts)
        if label(facts["recipe"]) == f"`{BASELINE}`":
            base.setdefault(text_of(facts), []).append(facts["gap"])
    rows = []
    for (words, text), runs in sorted(groups.items(), key=lambda item: -_mean(run["gap"] for run in item[1])):
        perplexities = sorted(run["quality"]["perplexity"] for run in runs)
        spread = f" ({perplexities[0]:.1f} to {perplexities[-1]:.1f})" if len(runs) > 1 else ""
        gap = _mean(run["gap"] for run in runs)
        gap_of_r = _mean(base.get(text) or next(iter(base.values()))) if base else None
        distances = [run["quality"]["kl"] for run in runs if run["quality"]["kl"] is not None]
        cpu = runs[0]["device"] == "cpu"
        timed = [run for run in runs if run["device"] == runs[0]["device"]]
        took = f"{_mean(run['cpu_seconds' if cpu else 'seconds'] for run in timed):.0f}"
        rows.append(
            (
                words,
                f"{text} tokens" if text != "nothing" else text,
                str(len(runs)),
                f"{math.exp(_mean(map(math.log, perplexities))):.1f}{spread}",
                f"{gap:.3f}",
                f"{gap / gap_of_r:.2f}" if gap_of_r else "",
                f"{_mean(distances):.2f}" if distances else "",
                f"{took} CPU seconds" if cpu else f"{took} s, {runs[0]['device']}",
            )
        )
    lines = ["| " + " | ".join(row) + " |" for row in (HEAD, ("---",) * len(HEAD), *rows)]
    return "\n".join(lines) + "\n"


def _mean(values: Any) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def page(text: str) -> str:
    """The page with its tables made anew."""
    before, _, rest = text.partition(BEGIN)
    tables = "\n".join(caption(model, results) + table(results) for model, results in sorted(load(RESULTS).items()))
    return before + BEGIN + tables + END + rest.partition(END)[2]


def main() -> None:
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if "--check" in sys.argv and new != old:
        raise SystemExit("docs/accuracy.md is stale: run python benchmarks/accuracy_page.py")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
