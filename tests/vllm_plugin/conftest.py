"""Tests of the vLLM plugin inside a real vLLM, on a CPU. They have an environment of their own: `make test-vllm`.

(The folder is not called vllm: pytest puts its parent on the path, where such a folder would look like the package.)
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# vLLM reads these when it is imported. One process, so that a case costs seconds; and no inductor, which has nothing
# of ours to compile.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # What it compiles is kept by the model's config, which is the same from run to run though the code is not.
    "VLLM_CACHE_ROOT": tempfile.mkdtemp(prefix="vllm-cache-"),
}

import pytest
import torch

import tiny
from spearfish.checkpoint import CheckpointWriter
from spearfish.formats import transforms
from spearfish.reference import dequantize
from spearfish.scheme import QuantWeight
from spearfish.sparse24 import magnitude_mask

atexit.register(shutil.rmtree, os.environ["VLLM_CACHE_ROOT"], ignore_errors=True)

# Without vLLM there is nothing here to run; `make test-vllm` then fails because it ran nothing.
collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@dataclass(frozen=True)
class Shop:
    """Folders of one random model: its dense twin, and the same weights in any format."""

    folder: Path
    model: Any
    weights: dict[str, QuantWeight]

    @property
    def dense(self) -> Path:
        return self.folder / "dense"

    def as_format(self, form: str, **options: Any) -> Path:
        out = self.folder / form
        if not out.exists():
            with CheckpointWriter(out, source=self.dense, format=form, **options) as writer:
                for name, weight in self.weights.items():
                    writer.add_weight(name, weight)
                for name, tensor in self.model.state_dict().items():
                    if name.removesuffix(".weight") not in self.weights:
                        writer.add_tensor(name, tensor)
        return out


def shop(folder: Path, quantise: Callable[[str, torch.Tensor], QuantWeight | None], **changes: Any) -> Shop:
    """A random Llama in float32 whose linears are what `quantise` makes of them (None: left alone)."""
    model = tiny.llama(**changes)
    weights = {}
    for name, linear in tiny.linears(model).items():
        weight = quantise(name, linear.weight)
        if weight is not None:
            weights[name] = weight
            linear.weight.data = dequantize(weight)
    model.save_pretrained(folder / "dense")
    tiny.save_tokenizer(folder / "dense")
    return Shop(folder, model, weights)


@pytest.fixture(scope="session")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """Every linear int4 2:4 in groups of 64: with two ranks, o_proj keeps exactly one group."""
    return shop(tmp_path_factory.mktemp("int4"), lambda _, dense: tiny.round_to_nearest(dense, 4, 64))


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """With biases. Within the fused layers: q int4 2:4, k int8 2:4, v float; gate dense int4, up int4 2:4."""

    def quantise(name: str, dense: torch.Tensor) -> QuantWeight | None:
        if "v_proj" in name or "layers.0.mlp.down_proj" in name:
            return None
        return tiny.round_to_nearest(dense, 8 if "k_proj" in name else 4, 64, sparse="gate_proj" not in name)

    return shop(tmp_path_factory.mktemp("mixed"), quantise, bias=True)


@pytest.fixture(scope="session")
def half(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """Every linear 2:4 in 16 bits, and tied embeddings."""

    def quantise(_: str, dense: torch.Tensor) -> QuantWeight:
        values = dense.detach().half()
        return transforms.sparse_values(values * magnitude_mask(values.abs()))

    return shop(tmp_path_factory.mktemp("half"), quantise, tie_word_embeddings=True)


@pytest.fixture
def vllm_config() -> Iterator[Any]:
    """vLLM's own config as its layers want to find it while they are made."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config
