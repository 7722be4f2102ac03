"""Which files the plugin takes from vLLM, and which it leaves alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers import quantization as host

from conftest import Shop
from spearfish.integrations import vllm as plugin
from tiny import llama

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
CT: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
}
OURS = {"spearfish": {"format_version": "1.0"}}
MARLIN_24 = GPTQ | {"checkpoint_format": "marlin_24"}


@pytest.fixture(autouse=True)
def registered() -> None:
    plugin.register()


@pytest.mark.parametrize(
    ("block", "user", "claimed"),
    [
        (MARLIN_24, None, "gptq_marlin_24"),
        (MARLIN_24, "gptq", "gptq_marlin_24"),
        (MARLIN_24, "gptq_marlin", "gptq_marlin_24"),  # vLLM would take it for plain GPTQ and fail late
        (MARLIN_24, "auto_gptq", "gptq_marlin_24"),
        (MARLIN_24, "gptq_marlin_24", "gptq_marlin_24"),
        (MARLIN_24, "awq", None),
        (MARLIN_24, "sparse24", None),
        (GPTQ | {"checkpoint_format": "marlin"}, None, "marlin"),
        (GPTQ | {"is_marlin_format": True}, None, "marlin"),
        (GPTQ | {"is_marlin_format": True}, "marlin", "marlin"),
        (GPTQ, None, None),
        (GPTQ, "gptq_marlin_24", None),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, None, None),
        (GPTQ | {"checkpoint_format": "gptq"} | OURS, None, "gptq_marlin_24"),
        (GPTQ | OURS, "gptq_marlin", None),  # an explicit wish for vLLM's own
        (GPTQ | OURS, "gptq", None),  # the plain path there
        (CT | {"format": "marlin-24"}, None, "gptq_marlin_24"),
        (CT | {"format": "marlin-24"}, "compressed-tensors", "gptq_marlin_24"),
        (CT | {"format": "pack-quantized"}, None, None),
        (CT | {"format": "pack-quantized"} | OURS, None, "gptq_marlin_24"),
        (CT | {"format": "pack-quantized"}, "gptq_marlin_24", "gptq_marlin_24"),
        (
            CT | {"format": "pack-quantized", "sparsity_config": {"format": "dense", "sparsity_structure": "2:4"}},
            *(None, "gptq_marlin_24"),
        ),
        (CT | {"format": "float-quantized"}, None, None),
        (CT | {"config_groups": {}, "sparsity_config": {"format": "sparse-24-bitmask"}}, None, "sparse24"),
        (CT | {"format": "int-quantized", "sparsity_config": {"format": "sparse-24-bitmask"}}, None, "sparse24"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, None, None),
        ({"quant_method": "fp8"}, None, None),
        (GPTQ | {"checkpoint_format": "marlin_24", "is_marlin_format": True}, None, None),  # contradicts itself
    ],
)
def test_claims(block: dict[str, Any], user: str | None, claimed: str | None) -> None:
    for name in ("gptq_marlin_24", "marlin", "sparse24"):  # whichever vLLM asks first
        method = host.get_quantization_config(name)
        assert method.override_quantization_method(dict(block), user, hf_config=None) == claimed


def test_a_file_that_does_not_say_so_is_looked_into(int4: Shop, tmp_path: Path) -> None:
    """pack-quantized is 2:4 by its values alone; a dense one stays with vLLM, whoever wrote it."""
    from spearfish.checkpoint import CheckpointWriter
    from tiny import linears, round_to_nearest

    dense = tmp_path / "dense-int4"
    with CheckpointWriter(dense, config={"model_type": "llama"}, format="ct-pack-quantized") as writer:
        for name, linear in linears(llama()).items():
            writer.add_weight(name, round_to_nearest(linear.weight, 4, 64, sparse=False))
    block = CT | {"format": "pack-quantized"}
    for folder, claimed in ((int4.as_format("ct-pack-quantized"), "gptq_marlin_24"), (dense, None)):
        for written in (block, block | OURS):
            assert plugin.claim(written, None, SimpleNamespace(_name_or_path=str(folder))) == claimed


def test_what_cannot_be_looked_into_is_ours_only_if_we_wrote_it(int4: Shop, tmp_path: Path) -> None:
    """The hub's cache holds the config before the weights; a folder may also be damaged."""
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_bytes((int4.as_format("ct-pack-quantized") / "config.json").read_bytes())
    (damaged / "model.safetensors").write_bytes(b"nothing")
    config_only = tmp_path / "config-only"
    config_only.mkdir()
    block = CT | {"format": "pack-quantized"}
    for name in (str(damaged), str(config_only), "nobody/no-such-model"):
        assert plugin.claim(block, None, SimpleNamespace(_name_or_path=name)) is None
        assert plugin.claim(block | OURS, None, SimpleNamespace(_name_or_path=name)) == "gptq_marlin_24"


def test_quantised_experts_are_left_to_vllm(tmp_path: Path) -> None:
    """Where vLLM can run the file, if only dense, we do not take it to refuse it."""
    from spearfish.checkpoint import CheckpointWriter
    from tiny import round_to_nearest

    folder = tmp_path / "moe"
    with CheckpointWriter(folder, config={"model_type": "mixtral"}, format="ct-pack-quantized") as writer:
        for name in ("model.layers.0.mlp.experts.0.down_proj", "model.layers.0.self_attn.q_proj"):
            writer.add_weight(name, round_to_nearest(torch.randn(64, 64), 4, 32))
    for written in (CT | {"format": "pack-quantized"}, CT | {"format": "pack-quantized"} | OURS):
        assert plugin.claim(written, None, SimpleNamespace(_name_or_path=str(folder))) is None


def test_vllms_own_names_are_never_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    before = {name: host.get_quantization_config(name) for name in ("gptq", "gptq_marlin", "compressed-tensors")}
    theirs = before["gptq"]
    monkeypatch.setitem(host._CUSTOMIZED_METHOD_TO_QUANT_CONFIG, "marlin", theirs)
    plugin.register()
    assert host.get_quantization_config("marlin") is theirs
    assert plugin.claim(GPTQ | {"checkpoint_format": "marlin"}, None) == "gptq_marlin_24"
    assert all(host.get_quantization_config(name) is method for name, method in before.items())


def test_registering_twice_changes_nothing() -> None:
    before = list(host.QUANTIZATION_METHODS)
    plugin.register()
    assert before == host.QUANTIZATION_METHODS
    assert len(set(before)) == len(before)
    for name in ("gptq_marlin_24", "marlin", "sparse24"):
        method = host.get_quantization_config(name)
        assert method.get_name() == name
        assert {torch.float16, torch.bfloat16, torch.float32} <= set(method.get_supported_act_dtypes())
        assert method.get_min_capability() == 80
