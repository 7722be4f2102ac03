"""The method registry against the answers of vLLM 0.4.3, cell by cell."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spearfish.errors import QuantizationError
from spearfish.formats import FORMATS
from spearfish.quantization import (
    QUANTIZATION_METHODS,
    QuantizationConfig,
    get_quantization_config,
    register,
    resolve,
)
from spearfish.quantization.deviations import DEVIATIONS

TABLE = json.loads((Path(__file__).parents[1] / "golden" / "vllm_0_4_3_override_table.json").read_text())

# What the table calls a config, and what the list of deviations calls it.
SAYS = {
    "gptq 4b g128 sym": "gptq",
    "gptq desc_act": "gptq",
    "gptq_v2 fmt": "gptq_v2",
    "marlin (is_marlin_format)": "marlin",
    "marlin (checkpoint_format)": "marlin",
    "marlin_24": "marlin_24",
    "marlin_24 w/o sym,desc_act": "marlin_24 without sym and desc_act",
}
MESSAGES = {
    "serialized-format": "serialized in {chosen} format",
    "convertible-at-runtime": "can be converted to {chosen}",
    "could-run-with-marlin-but-forced": "could run with gptq_marlin, but gptq was asked for explicitly",
}
CELLS = [pytest.param(row, id=f"{row['checkpoint']}-{row['user']}") for row in TABLE["rows"]]
BY_CELL = {(each.says, each.user): each for each in DEVIATIONS}
COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": []}


def expected(row: dict[str, Any]) -> str | None:
    deviation = BY_CELL.get((SAYS.get(row["checkpoint"], ""), row["user"]))
    return row["chosen"] if deviation is None else deviation.ours


@pytest.mark.parametrize("row", CELLS)
def test_every_cell_of_the_record(row: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    config, wanted = TABLE["configs"][row["checkpoint"]], expected(row)
    caplog.set_level(logging.INFO, logger="spearfish")
    if wanted is None:
        with pytest.raises(QuantizationError) as error:
            resolve(config, row["user"])
        assert all(name in str(error.value) for name in QUANTIZATION_METHODS)
    else:
        assert resolve(config, row["user"]) == wanted
    said = [record.getMessage() for record in caplog.records]
    if wanted == row["chosen"]:
        texts = [MESSAGES[row["log"]].format(chosen=wanted)] if row["log"] else []
        assert len(said) == len(texts)
        assert all(text in message for text, message in zip(texts, said, strict=True))
    else:
        assert len(said) == 1  # every deviation is an acceptance, and tells of it like the others
        assert str(wanted) in said[0]


def test_every_deviation_is_one() -> None:
    recorded = {
        (SAYS[row["checkpoint"]], row["user"]): row["chosen"] for row in TABLE["rows"] if row["checkpoint"] in SAYS
    }
    for each in DEVIATIONS:
        assert recorded[each.says, each.user] == each.recorded != each.ours
        assert each.reason
    assert len(BY_CELL) == len(DEVIATIONS)


def test_every_deviation_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
    for each in DEVIATIONS:
        cells = (each.says, each.user, each.recorded or "an error", each.ours, each.reason)
        assert f"| {' | '.join(cells)} |" in page


def test_the_methods_and_their_names() -> None:
    assert list(QUANTIZATION_METHODS) == [
        *("marlin", "gptq_marlin_24", "gptq_marlin", "gptq", "sparse24", "compressed-tensors")
    ]
    for name, method in QUANTIZATION_METHODS.items():
        assert method.name == name
        assert get_quantization_config(name) is method


@pytest.mark.parametrize(
    ("config", "method", "form", "bits", "group"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq", "gptq", 3, 128),
        (TABLE["configs"]["gptq_v2 fmt"], "gptq_marlin", "gptq_v2", 4, 128),
        (TABLE["configs"]["marlin (is_marlin_format)"], "marlin", "marlin", 4, 128),
        (TABLE["configs"]["marlin_24"], "gptq_marlin_24", "marlin_24", 4, 128),
        ({"bits": 8, "group_size": -1, "checkpoint_format": "marlin-24"}, "gptq_marlin_24", "marlin_24", 8, -1),
        ({"bits": 4, "group_size": -1}, "gptq", "gptq", 4, -1),
        (
            COMPRESSED
            | {
                "format": "marlin-24",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 128}}},
            },
            *("compressed-tensors", "ct-marlin-24", 4, 128),
        ),
        (
            {
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel", "group_size": None}}},
            },
            *("compressed-tensors", "ct-pack-quantized", 8, -1),
        ),
        (
            COMPRESSED | {"format": "dense", "sparsity_config": {"format": "sparse-24-bitmask"}},
            *("sparse24", "ct-sparse-24-bitmask", 16, None),
        ),
        (
            COMPRESSED | {"sparsity_config": {"format": "dense", "sparsity_structure": "2:4", "targets": ["Linear"]}},
            *("sparse24", "dense", 16, None),
        ),
    ],
)
def test_a_method_reads_its_config(
    config: dict[str, Any], method: str, form: str, bits: int, group: int | None
) -> None:
    assert resolve(config) == method
    made = get_quantization_config(method).from_config(config)
    assert (made.format, made.bits, made.group_size) == (form, bits, group)
    assert made.format in FORMATS


@pytest.mark.parametrize(
    ("method", "config", "words"),
    [
        ("gptq", {"quant_method": "gptq", "group_size": 128}, "bits is None"),
        ("gptq_marlin", {"bits": 3, "group_size": 128}, "bits is 3 .*wanted one of 4, 8"),
        ("gptq", {"bits": 4, "group_size": 0}, "group_size is 0"),
        ("gptq", {"bits": 4, "group_size": 128, "checkpoint_format": "marlin_24"}, "gptq and gptq_v2"),
        ("gptq_marlin_24", {"bits": 4, "group_size": 128}, "not stored in that layout"),
        ("compressed-tensors", COMPRESSED | {"format": "float-quantized"}, "marlin-24 and pack-quantized"),
        ("sparse24", COMPRESSED | {"format": "pack-quantized"}, "no sparsity_config"),
    ],
)
def test_a_config_of_another_method_is_refused(method: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(QuantizationError, match=words):
        get_quantization_config(method).from_config(config)


def test_an_unknown_method_is_told_the_valid_ones() -> None:
    for config, user in (({"quant_method": "awq"}, None), ({}, None), ({"quant_method": "gptq"}, "gtpq")):
        with pytest.raises(QuantizationError, match="marlin, gptq_marlin_24, gptq_marlin, gptq, sparse24"):
            resolve(config, user)
    with pytest.raises(QuantizationError, match="sparse24"):
        get_quantization_config("exl2")


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(QUANTIZATION_METHODS)
    yield
    QUANTIZATION_METHODS.clear()
    QUANTIZATION_METHODS.update(before)


@pytest.mark.usefixtures("registry")
def test_a_third_party_method_is_asked_first() -> None:
    class Guest(QUANTIZATION_METHODS["gptq"]):  # type: ignore[misc]  # a class from a table
        name = "guest"

        @classmethod
        def override_quantization_method(
            cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
        ) -> str | None:
            return cls.name if hf_config == "mine" else None

    assert register(Guest) is Guest
    assert register(Guest) is Guest
    config = TABLE["configs"]["marlin_24"]
    assert resolve(config, hf_config="mine") == "guest"
    assert resolve(config) == "gptq_marlin_24"
    assert resolve({"quant_method": "guest"}) == "guest"


@pytest.mark.usefixtures("registry")
def test_a_clash_of_names_is_reported() -> None:
    class Thief(QUANTIZATION_METHODS["gptq"]):  # type: ignore[misc]  # a class from a table
        name = "marlin"

    before = dict(QUANTIZATION_METHODS)
    with pytest.raises(QuantizationError, match=r"already the name of spearfish\.quantization\.marlin\.MarlinConfig"):
        register(Thief)
    assert before == QUANTIZATION_METHODS


@pytest.mark.usefixtures("registry")
def test_a_claim_for_nobody_is_an_error() -> None:
    class Liar(QUANTIZATION_METHODS["gptq"]):  # type: ignore[misc]  # a class from a table
        name = "liar"

        @classmethod
        def override_quantization_method(
            cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
        ) -> str | None:
            return "nobody"

    register(Liar)
    with pytest.raises(QuantizationError, match="'nobody', which is no method here"):
        resolve({"quant_method": "gptq"})


def test_the_base_class_claims_nothing() -> None:
    assert QuantizationConfig.override_quantization_method({"quant_method": "gptq"}, None) is None


def test_no_format_is_named_outside_its_own_class() -> None:
    """Formats are reached through their classes. Spelt out are only a class's own names and the registry's keys."""
    folder = Path(__file__).parents[2] / "src" / "spearfish" / "quantization"
    names = {*FORMATS, *QUANTIZATION_METHODS, "marlin-24", "pack-quantized", "sparse-24-bitmask", "sparse-bitmask"}
    found = {}
    for file in sorted(folder.glob("*.py")):
        if file.name == "deviations.py":
            continue  # another program's words
        tree = ast.parse(file.read_text(encoding="utf-8"))
        own = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        allowed = {
            id(constant)
            for scope in own
            for line in scope.body
            if isinstance(line, ast.Assign)
            for constant in ast.walk(line)
        }
        tables = [node for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)]
        allowed |= {id(key) for table in tables for key in table.value.keys}  # type: ignore[union-attr]  # a Dict
        found[file.name] = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and node.value in names and id(node) not in allowed
        ]
    assert len(found) >= 5
    assert not any(found.values()), found
