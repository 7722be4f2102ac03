"""Mutated folders: whatever is done to a file, only errors of our own come out, and quickly."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spearfish import layouts, sparse24
from spearfish.checkpoint import CheckpointWriter, convert, inspect, open_checkpoint, verify
from spearfish.errors import SpearfishError
from spearfish.formats import transforms

FORMATS = (
    "marlin_24",
    "gptq",
    "marlin",
    "ct-marlin-24",
    "ct-pack-quantized",
    "ct-sparse-24-bitmask",
    "ct-sparse-bitmask",
    "dense",
)
CASES = 40  # per format and kind of mutation

NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 3, 5, 7, 16, 64, 127, 2**31, 2**63, 2**80, 1e300, float("nan"), "", "x", "marlin_24",
    "gptq", "BF16", "I8", [], {}, [1], [0, 0], [2**40, 2**40], {"a": 1}, [None], ["Linear"], "re:(", "-1",
)  # fmt: skip


def old_bitmask_folder(out: Path, dense: torch.Tensor) -> Path:
    """As the unstructured writer stored it, the embedding and a norm compressed too."""
    out.mkdir()
    config = {"model_type": "llama", "sparsity_config": {"format": "sparse-bitmask"}}
    (out / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, values in {
        "model.layers.0.q_proj": dense,
        "model.embed_tokens": dense[:8],
        "model.norm": dense[0],
    }.items():
        kept = values != 0
        counts = kept.sum(-1)
        tensors[f"{name}.weight.shape"] = torch.tensor(values.shape)
        tensors[f"{name}.weight.compressed"] = values[kept]
        tensors[f"{name}.weight.bitmask"] = layouts.pack_fields(kept.to(torch.uint8), 1, torch.uint8)
        tensors[f"{name}.weight.row_offsets"] = counts.cumsum(0) - counts
    save_file(tensors, out / "model.safetensors")
    return out


def small_folder(out: Path, form: str) -> Path:
    dense = torch.randn(64, 64, generator=torch.manual_seed(0))
    if form == "ct-sparse-bitmask":
        return old_bitmask_folder(out, dense * sparse24.magnitude_mask(dense.abs()))
    pruned = transforms.sparse_values(dense * sparse24.magnitude_mask(dense.abs()))
    weight = pruned if form in ("ct-sparse-24-bitmask", "dense") else transforms.round_to_nearest(pruned, 4, 32)
    with CheckpointWriter(out, config={"model_type": "llama", "dtype": "float16"}, format=form) as writer:
        writer.add_weight("model.layers.0.q_proj", weight)
        writer.add_tensor("model.embed_tokens.weight", torch.ones(4, 64))
    (out / "quantize_config.json").unlink(missing_ok=True)
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {form: small_folder(tmp_path_factory.mktemp("fuzz") / form, form) for form in FORMATS}


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a JSON value."""
    if isinstance(value, dict):
        return [(value, key) for key in value] + [place for item in value.values() for place in places(item)]
    if isinstance(value, list):
        return [(value, i) for i in range(len(value))] + [place for item in value for place in places(item)]
    return []


def mutate_json(value: Any, rng: random.Random) -> Any:
    for _ in range(rng.randint(1, 2)):
        container, key = rng.choice(places(value) or [({"": 0}, "")])
        action = rng.randrange(4)
        if action == 0 and isinstance(container, dict):
            container.pop(key)
        elif action == 1 and isinstance(container, dict):
            container[rng.choice(("spearfish", "format", "sym", "dynamic", key + "x"))] = copy.deepcopy(
                rng.choice(NASTY)
            )
        elif action == 2 and isinstance(container[key], int) and not isinstance(container[key], bool):
            container[key] += rng.choice((-64, -8, -1, 1, 8, 64))
        else:
            container[key] = copy.deepcopy(rng.choice(NASTY))
    return value


def mutate_config(folder: Path, rng: random.Random) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(mutate_json(json.loads(file.read_text()), rng)))


def mutate_header(folder: Path, rng: random.Random) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(mutate_json(json.loads(content[8 : 8 + length]), rng)).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def mutate_bytes(folder: Path, rng: random.Random) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    action = rng.randrange(4)
    if action == 0:
        del content[rng.randrange(len(content)) :]
    elif action == 1:
        content += rng.randbytes(rng.randint(1, 100))
    elif action == 2:
        start = rng.randrange(len(content))
        content[start : start + rng.randint(1, 64)] = rng.randbytes(rng.randint(1, 64))
    else:
        for _ in range(rng.randint(1, 20)):
            content[rng.randrange(min(len(content), rng.choice((8, 400, len(content)))))] = rng.randrange(256)
    file.write_bytes(content)


def mutate_shape_tensors(folder: Path, rng: random.Random) -> None:
    """Values inside the data, where formats store sizes, groups and positions."""
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    for _ in range(rng.randint(1, 30)):
        place = rng.randrange(start, len(content) - 8)
        content[place : place + 8] = rng.choice((b"\xff" * 8, b"\0" * 8, b"\x7f" * 8, rng.randbytes(8)))
    file.write_bytes(content)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("mutate", [mutate_config, mutate_header, mutate_bytes, mutate_shape_tensors])
def test_only_our_errors_come_out(
    folders: dict[str, Path], tmp_path: Path, form: str, mutate: Callable[[Path, random.Random], None]
) -> None:
    rng = random.Random(f"{form} {mutate.__name__}")
    refused = 0
    for _ in range(CASES):
        folder = tmp_path / "m"
        shutil.copytree(folders[form], folder)
        mutate(folder, rng)
        report = verify(folder)
        try:
            checkpoint = open_checkpoint(folder)
            for name in checkpoint.linears:
                checkpoint.weight(name)
            for name in checkpoint.tensor_names:
                checkpoint.tensor(name)
            inspect(folder)
            convert(folder, tmp_path / "out", rng.choice(("ct-pack-quantized", "marlin_24", "dense")))
        except SpearfishError as error:
            refused += 1
            assert str(error)
        else:
            assert not [problem for problem in report.problems if problem.where in checkpoint.linears]
        shutil.rmtree(folder)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert refused > 0 or (form, mutate) == ("dense", mutate_config), "the mutations reach the checks"
