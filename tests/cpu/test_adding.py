"""docs/adding.md is code that works: its blocks are run in order, and what they add is tested like our own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from spearfish import quantization, reference
from spearfish.checkpoint import config, open_checkpoint, verify
from spearfish.checkpoint.conversion import convert
from spearfish.compress import METHODS, Recipe, compress
from spearfish.formats import FORMATS
from spearfish.kernels import choose
from spearfish.kernels.config import CHIPS, Problem
from spearfish.kernels.matmul import _weight_of
from spearfish.kernels.prepare import to_stream

PAGE = Path(__file__).parents[2] / "docs" / "adding.md"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The names of the page after all its blocks have run; every registry is as before afterwards."""
    registries = (FORMATS, METHODS, config._GPTQ_FORMATS, quantization.QUANTIZATION_METHODS)
    before = [dict(registry) for registry in registries]
    names: dict[str, Any] = {"folder": tmp_path_factory.mktemp("adding")}
    try:
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)):
            exec(compile(block, f"adding.md, block {number}", "exec"), names)
        yield names
    finally:
        for registry, old in zip(registries, before, strict=True):
            registry.clear()
            registry.update(old)


def test_the_format_keeps_every_bit(page: dict[str, Any]) -> None:
    first = open_checkpoint(page["folder"] / "a").weight("model.layers.0.mlp.up_proj")
    assert first.groups == 4
    assert torch.equal(reference.dequantize(first), reference.dequantize(page["weight"]))
    assert torch.equal(reference.dequantize(page["back"]), reference.dequantize(page["weight"]))
    codec, tensors = FORMATS["plain_24"], FORMATS["plain_24"].encode(page["weight"])
    for spec in codec.tensors(128, 256, page["scheme"]):
        assert tuple(tensors[spec.name].shape) == spec.shape
    half = {name: tensor[64:] for name, tensor in tensors.items()}  # a rank's rows, as the table says
    assert torch.equal(reference.dequantize(codec.decode(half)), reference.dequantize(page["weight"])[64:])


def test_method_and_format_meet_in_a_model(page: dict[str, Any], tmp_path: Path) -> None:
    """Compressed by the page's method, stored in its format, claimed by its class, run by transformers."""
    import spearfish

    tiny.llama().save_pretrained(tmp_path / "dense")
    tiny.save_tokenizer(tmp_path / "dense")
    (tmp_path / "text.txt").write_text(tiny.PROSE * 20)
    recipe = Recipe(
        group_size=64, method="importance", num_samples=4, seq_len=32, calibration=str(tmp_path / "text.txt")
    )
    compress(tmp_path / "dense", tmp_path / "out", recipe, format="plain_24", fast=False)
    assert verify(tmp_path / "out").ok
    convert(tmp_path / "out", tmp_path / "marlin", "marlin_24")
    tokens = torch.arange(1, 17)[None]
    first, second = (spearfish.load(tmp_path / name, device="cpu")(tokens).logits for name in ("out", "marlin"))
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["int4_24", "int8_24", "int4"])
@pytest.mark.parametrize("m", [1, 4])
def test_the_family_multiplies(page: dict[str, Any], kind: str, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its one call into CUDA replaced by the slow inverse of the stream; the rest is the page's own code."""

    def slow(
        problem: Problem, stream: torch.Tensor, column_scale: torch.Tensor | None, x: torch.Tensor
    ) -> torch.Tensor:
        facts = (problem.kind, problem.n, problem.k, problem.granules, problem.has_zeros, False)
        return reference.dequantize(_weight_of(x.dtype, stream, column_scale, *facts)).to(x.dtype)

    monkeypatch.setitem(page, "dense_weight", slow)
    n, k = 192, 320
    weight = tiny.round_to_nearest(torch.randn(n, k), int(kind[3]), 64, sparse=kind.endswith("_24"))
    prepared = to_stream(weight, torch.device("cpu"), torch.float16, False, path="")
    problem = Problem(kind, False, m, n, k, prepared.granules, False)
    assert prepared.stream is not None
    run = page["FAMILY"].bind("whole", problem, 0)
    x, bias, out = torch.randn(m, k).half(), torch.randn(n).half(), torch.empty(m, n).half()
    run(x, prepared.stream, prepared.column_scale, bias, out)
    wanted = reference.matmul(x, weight).double() + bias.double()
    assert (out.double() - wanted).norm() / wanted.norm() < 2e-3


def test_the_chooser_weighs_the_family(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    family, chip = page["FAMILY"], CHIPS["sm_90"]
    others = choose.families()
    monkeypatch.setattr(choose, "families", lambda: (*others, family))
    problem = Problem("int4_24", False, 4, 4096, 4096, 1, False)
    assert choose.choose(problem, chip)[0] is not family  # slow, as the page says
    assert choose.choose(problem, chip, only="unhurried") == (family, "whole")
    with pytest.raises(choose.UnsupportedError, match="4 tokens at most, not 5"):
        choose.choose(Problem("int4_24", False, 5, 4096, 4096, 1, False), chip, only="unhurried")


def test_the_table_leads_to_its_sections() -> None:
    text = PAGE.read_text("utf-8")
    headings = {
        re.sub(r"[^\w\- ]", "", line).lower().replace(" ", "-") for line in re.findall(r"^## (.+)$", text, re.M)
    }
    links = set(re.findall(r"\]\(#([^)]+)\)", text))
    assert links
    assert links <= headings
