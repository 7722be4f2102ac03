"""docs/accuracy.md shows what lies in benchmarks/results/accuracy, and its sums are right."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from spearfish.compress import Recipe


@pytest.fixture
def accuracy_page(repository: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    import accuracy_page

    yield accuracy_page
    sys.modules.pop("accuracy_page")


def result(method: str, perplexity: float, gap: float, **recipe: Any) -> dict[str, Any]:
    return {
        "recipe": {"method": method, "bits": 4, "group_size": 128, "recover": 0, **recipe},
        "calibration": {"source": "articles", "tokens": 4096},
        "quality": {"perplexity": perplexity, "kl": None},
        "gap": gap,
        "seconds": 10.0,
        "cpu_seconds": 20.0,
        "device": "cpu",
    }


def test_the_page_is_that_of_the_files(accuracy_page: Any) -> None:
    old = accuracy_page.PAGE.read_text(encoding="utf-8")
    assert accuracy_page.page(old) == old, "run python benchmarks/accuracy_page.py"


def test_seeds_are_averaged_and_compared_with_the_baseline(accuracy_page: Any) -> None:
    lines = accuracy_page.table(
        [result("sparsegpt", 40.0, 1.0), result("sparsegpt", 90.0, 2.0), result("joint", 20.0, 0.6, reconstruct=20)]
    ).splitlines()
    assert lines[2].startswith("| `sparsegpt` | articles, 4096 tokens | 2 | 60.0 (40.0 to 90.0) | 1.500 | 1.00 |")
    assert lines[2].endswith("| 20 CPU seconds |")
    assert lines[3].startswith("| `joint --reconstruct 20` | articles, 4096 tokens | 1 | 20.0 | 0.600 | 0.40 |")


def test_a_gap_is_compared_with_the_baseline_on_the_same_text(accuracy_page: Any) -> None:
    """Rows on a text without a baseline, or on none, are compared with the baseline on the most text."""

    def on(tokens: int, facts: dict[str, Any]) -> dict[str, Any]:
        return facts | {"calibration": {"source": "articles", "tokens": tokens}}

    lines = accuracy_page.table(
        [
            on(4096, result("sparsegpt", 60.0, 2.0)),
            on(16384, result("sparsegpt", 40.0, 1.0)),
            on(16384, result("sparsegpt", 35.0, 0.5, group_size=64)),
            on(4096, result("joint", 30.0, 0.4)),
            on(16384, result("joint", 20.0, 0.3)),
            on(4096, result("magnitude", 99.0, 3.0)),
        ]
    ).splitlines()[2:]
    cells = {(row[1], row[2]): row[6] for row in ([cell.strip() for cell in line.split("|")] for line in lines)}
    assert cells == {
        ("`magnitude`", "nothing"): "3.00",
        ("`sparsegpt`", "articles, 4096 tokens"): "1.00",
        ("`sparsegpt`", "articles, 16384 tokens"): "1.00",
        ("`sparsegpt --group-size 64`", "articles, 16384 tokens"): "0.50",
        ("`joint`", "articles, 4096 tokens"): "0.20",
        ("`joint`", "articles, 16384 tokens"): "0.30",
    }


def test_a_result_is_not_replaced_by_another_measurement(
    repository: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    import accuracy

    recipe, tokens = Recipe(method="joint", catch_up=1.0), torch.zeros(96, 512)
    path = tmp_path / f"{accuracy.name_of('tiny', recipe, '0')}.json"
    assert path.name == "tiny-joint-w4-g128-s0-catchup1.json"
    accuracy.refuse_another(path, recipe, tokens, "cpu")  # nothing is there
    facts = {"recipe": recipe.to_dict(), "quality": {"windows": 96, "length": 512}, "device": "cpu"}
    path.write_text(json.dumps(facts))
    accuracy.refuse_another(path, recipe, tokens, "cpu")
    for other in (
        (replace(recipe, recover_text="self"), tokens, "cpu"),
        (recipe, tokens[:24], "cpu"),
        (recipe, tokens, "cuda"),
    ):
        with pytest.raises(SystemExit, match="holds another measurement"):
            accuracy.refuse_another(path, *other)
