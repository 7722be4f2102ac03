"""A format that cannot hold the result is refused before any work, for the reason the writer would give after it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny
from spearfish.compress import Recipe, compress
from spearfish.compress.fit import _without_values
from spearfish.errors import UnsupportedError
from spearfish.formats import FORMATS
from spearfish.scheme import QuantScheme, QuantWeight


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model with a k_proj of 32 rows, which marlin_24 cannot hold."""
    place = tmp_path_factory.mktemp("fit")
    tiny.llama(hidden_size=64, intermediate_size=64).save_pretrained(place / "dense")
    tiny.save_tokenizer(place / "dense")
    (place / "text.txt").write_text(" ".join(tiny.PROSE.split() * 40))
    return place


def refuse(place: Path, wanted: str, format: str, **changes: object) -> None:
    recipe = Recipe(group_size=64, num_samples=4, seq_len=16, calibration=str(place / "text.txt"), **changes)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=wanted):
        compress(place / "dense", place / "out", recipe, format=format, fast=False)
    assert sorted(path.name for path in place.iterdir()) == ["dense", "text.txt"], "no work was begun"


def test_before_any_work(place: Path) -> None:
    refuse(place, r"marlin_24 cannot hold 4 of the layers(.|\n)*k_proj: n = 32 is not a multiple of 64", "marlin_24")
    refuse(place, "no format 'marlin_25'", "marlin_25")
    refuse(place, "its values are 16 bit", "gptq", bits=16)
    refuse(place, "its values are quantised", "ct-sparse-24-bitmask")


def test_what_is_left_out_does_not_count(place: Path, tmp_path: Path) -> None:
    recipe = Recipe(
        group_size=64, method="joint", num_samples=4, seq_len=16, calibration=str(place / "text.txt"),
        ignore=("[kv]_proj",),
    )  # fmt: skip
    report = compress(place / "dense", tmp_path / "out", recipe, fast=False)
    assert len(report.layers) == 2 * 5


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize(("n", "k"), [(64, 64), (32, 64), (64, 36), (128, 128), (100, 100)])
def test_the_refusals_are_those_of_real_weights(form: str, n: int, k: int) -> None:
    for sparsity, bits in (("2:4", 4), ("2:4", 8), ("dense", 4), ("2:4", 16)):
        scheme = QuantScheme(bits, None if bits == 16 else 32, sparsity=sparsity)  # type: ignore[arg-type]
        if bits == 16:
            positions = torch.full((n, k // 4), 4, dtype=torch.uint8)
            real = QuantWeight(scheme, torch.randn(n, k // 2).half(), positions=positions)
        else:
            real = tiny.round_to_nearest(torch.randn(n, k), bits, 32, sparsity == "2:4")
        assert FORMATS[form].refusals(_without_values(scheme, n, k)) == FORMATS[form].refusals(real)
