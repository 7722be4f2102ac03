"""The readers that take files from strangers, each as a function of one byte string.

A target writes its bytes into a folder, lets a reader loose on it, and takes everything out that can be taken out.
Errors of our own are a good outcome; anything else that escapes is a finding. `NUL` parts the files of one input, so
that one byte string can be a whole folder: config.json, safetensors header, data.
"""

from __future__ import annotations

import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from spearfish import layouts, sparse24
from spearfish.checkpoint import CheckpointWriter, convert, inspect, open_checkpoint, verify
from spearfish.checkpoint.config import read_config
from spearfish.checkpoint.safefile import find_tensors, read_header, read_tensor
from spearfish.compress.recipe import Recipe, matches
from spearfish.compress.report import LayerReport
from spearfish.compress.workfolder import WorkFolder, load_with_facts
from spearfish.errors import SpearfishError
from spearfish.formats import transforms
from spearfish.kernels import jit
from spearfish.models import load_dense
from spearfish.text import read_text

NUL = b"\0"
LAYER = "model.layers.0.q_proj"
FORMATS = (
    "marlin_24",
    "gptq",
    "gptq_v2",
    "marlin",
    "ct-marlin-24",
    "ct-pack-quantized",
    "ct-sparse-24-bitmask",
    "ct-sparse-bitmask",
    "dense",
)
_VARIANT = jit.Variant("unpack.cu", "unpack_tiles", "sm_90")


@dataclass
class Target:
    """A reader under attack. `run` returns True if the bytes were taken for good, and raises SpearfishError otherwise.

    seeds: good inputs. parts: how many files one input holds. data: whether the last part is binary.
    """

    name: str
    run: Callable[[bytes], bool]
    seeds: list[bytes]
    parts: int = 1
    data: bool = False
    weight: float = 1.0  # its share of a campaign
    dictionary: tuple[Any, ...] = field(default=())


class Sandbox:
    """A folder that is emptied for each input, and a forbidden neighbour that no reader may open."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
        self.root = Path(tempfile.mkdtemp(prefix="spearfish-fuzz-", dir=place)).resolve()
        self.folder = self.root / "m"
        self.folder.mkdir()
        (self.root / "forbidden").mkdir()
        (self.root / "forbidden" / "secret.safetensors").write_bytes(save({"secret": torch.ones(1)}))

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def split(data: bytes, parts: int) -> list[bytes]:
    """The files of one input; those that are missing are empty."""
    found = data.split(NUL, parts - 1)
    return found + [b""] * (parts - len(found))


def safetensors_file(header: bytes, data: bytes) -> bytes:
    """A file whose length field is right: that one is the header target's business."""
    return len(header).to_bytes(8, "little") + header + data


def as_parts(file: bytes) -> tuple[bytes, bytes]:
    """Header and data of a safetensors file."""
    length = int.from_bytes(file[:8], "little")
    return file[8 : 8 + length].rstrip(), file[8 + length :]


def _bitmask_tensors(dense: torch.Tensor) -> dict[str, torch.Tensor]:
    """As the unstructured writer stored it, an embedding and a norm compressed too."""
    tensors = {}
    for name, values in {LAYER: dense, "model.embed_tokens": dense[:2], "model.norm": dense[0]}.items():
        kept = values != 0
        counts = kept.sum(-1)
        tensors[f"{name}.weight.shape"] = torch.tensor(values.shape)
        tensors[f"{name}.weight.compressed"] = values[kept]
        tensors[f"{name}.weight.bitmask"] = layouts.pack_fields(kept.to(torch.uint8), 1, torch.uint8)
        tensors[f"{name}.weight.row_offsets"] = counts.cumsum(0) - counts
    return tensors


def folder_seed(form: str, place: Path) -> bytes:
    """A good folder of a format with one small layer, as one input."""
    dense = torch.randn(64, 64, generator=torch.manual_seed(0)).half().float()
    dense = dense * sparse24.magnitude_mask(dense.abs())
    if form == "ct-sparse-bitmask":
        config = {"model_type": "llama", "sparsity_config": {"format": "sparse-bitmask"}}
        return NUL.join((json.dumps(config).encode(), *as_parts(save(_bitmask_tensors(dense[:8].half())))))
    pruned = transforms.sparse_values(dense.half())
    weight = pruned if form in ("ct-sparse-24-bitmask", "dense") else transforms.round_to_nearest(pruned, 4, 32)
    out = place / "seed"
    with CheckpointWriter(out, config={"model_type": "llama", "dtype": "float16"}, format=form) as writer:
        writer.add_weight(LAYER, weight)
        writer.add_tensor("model.embed_tokens.weight", torch.ones(2, 8).half())
    seed = NUL.join(
        (
            json.dumps(json.loads((out / "config.json").read_text())).encode(),
            *as_parts((out / "model.safetensors").read_bytes()),
        )
    )
    shutil.rmtree(out)
    return seed


def _drain_folder(folder: Path, thorough: bool) -> bool:
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.linears:
        if checkpoint.linears[name].format == "ct-sparse-bitmask":
            checkpoint.values(name)
        else:
            checkpoint.weight(name)
    for name in checkpoint.tensor_names:
        checkpoint.tensor(name)
    if thorough:
        verify(folder)
        inspect(folder)
        try:
            convert(folder, folder.parent / "out", "ct-pack-quantized")
        finally:
            shutil.rmtree(folder.parent / "out", ignore_errors=True)
    return True


def make_targets(box: Sandbox) -> list[Target]:
    """Every target, with its seeds, bound to a sandbox."""
    folder = box.folder
    model, config, index = (folder / name for name in ("model.safetensors", "config.json", "index"))
    index = folder / "model.safetensors.index.json"
    extra = folder / "quantize_config.json"
    counter = 0

    def clean() -> None:
        for path in (model, config, index, extra):
            path.unlink(missing_ok=True)

    def header(data: bytes) -> bool:
        clean()
        model.write_bytes(data)
        for name, entry in read_header(model).items():
            read_tensor(entry, name)
        return True

    def configs(data: bytes) -> bool:
        clean()
        first, second = split(data, 2)
        config.write_bytes(first)
        if second:
            extra.write_bytes(second)
        _, quant = read_config(folder)
        for name in (LAYER, "lm_head", "", "model.layers.12.mlp.down_proj", "a" * 40):
            quant.of(name)
            quant.layer(name)
        assert all(isinstance(reason, str) for reason in quant.extended)
        return True

    shards = box.root / "shards"
    (shards / "deep").mkdir(parents=True)
    for name in ("a", "b"):
        (shards / f"{name}.safetensors").write_bytes(save({f"{name}.weight": torch.ones(1)}))
    (shards / "deep" / "c.safetensors").write_bytes(save({"c.weight": torch.ones(1)}))
    (shards / "link.safetensors").symlink_to(box.root / "forbidden" / "secret.safetensors")
    (shards / "up").symlink_to(box.root / "forbidden")

    def indexes(data: bytes) -> bool:
        (shards / index.name).write_bytes(data)
        entries = find_tensors(shards)
        for name, entry in entries.items():
            assert entry.file.resolve().parent == shards, f"{name} leads to {entry.file}"
            read_tensor(entry, name)
        return True

    def folders(data: bytes) -> bool:
        nonlocal counter
        counter += 1
        clean()
        first, head, rest = split(data, 3)
        config.write_bytes(first)
        model.write_bytes(safetensors_file(head, rest))
        return _drain_folder(folder, counter % 32 == 0)

    def dense(data: bytes) -> bool:
        clean()
        first, head, rest = split(data, 3)
        config.write_bytes(first)
        model.write_bytes(safetensors_file(head, rest))
        found = load_dense(folder)
        for name in found.reader.names():
            found.reader.shape(name)
            found.reader.tensor(name)
        return True

    def recipe(data: bytes) -> bool:
        try:
            values = json.loads(data)
        except (ValueError, RecursionError):
            return False
        made = Recipe.from_dict(values)
        matches(LAYER, made.ignore)
        assert Recipe.from_dict(made.to_dict()) == made
        return True

    def prose(data: bytes) -> bool:
        file = folder / ("t.xz" if data[:1] != b"t" else "t.txt")
        file.write_bytes(data if file.suffix == ".xz" else data[1:])
        try:
            return bool(read_text(str(file)))
        finally:
            file.unlink()

    def cache(data: bytes) -> bool:
        # Half of the inputs get a right digest, or none would pass it.
        if data[:1] == b"F":
            import hashlib

            data = jit._FRAME_MAGIC + hashlib.sha256(data[1:]).digest() + data[1:]
        return jit._unframe(data, _VARIANT) is not None

    plan = folder / "work" / "plan.json"

    def work(data: bytes) -> bool:
        plan.parent.mkdir(exist_ok=True)
        head, rest = split(data, 2)
        (plan.parent / "block-00000.safetensors").write_bytes(safetensors_file(head, rest))
        (plan.parent / "hidden.safetensors").write_bytes(safetensors_file(head, rest))
        unfinished = WorkFolder.__new__(WorkFolder)
        unfinished.path = plan.parent
        try:
            unfinished.load_block(0)
        except SpearfishError:
            unfinished.load_hidden()
        return True

    good = {form: folder_seed(form, box.root) for form in FORMATS}
    config_seeds = [seed.split(NUL)[0] for seed in good.values()] + [SPELLINGS_A, SPELLINGS_B, SPELLINGS_C]
    file_seeds = [safetensors_file(*split(seed, 3)[1:]) for seed in (good["marlin_24"], good["ct-sparse-bitmask"])]
    targets = [
        Target("header", header, file_seeds, weight=4, data=True),
        Target("config", configs, config_seeds, parts=2, weight=4),
        Target("index", indexes, [INDEX], weight=3, dictionary=PATHS),
        Target("recipe", recipe, [json.dumps(Recipe().to_dict()).encode()], weight=2),
        Target("text", prose, [b"tOne.\n\nTwo.", XZ], weight=1, data=True),
        Target("cache", cache, [b"F" + FACTS + b"\n\x7fELF", jit._FRAME_MAGIC + b"\0" * 40], parts=1, weight=3),
        Target("work", work, [_work_seed(box)], parts=2, data=True, weight=1),
        Target("dense-model", dense, [good["dense"]], parts=3, data=True, weight=1),
    ]
    for form, seed in good.items():
        targets.append(Target(f"folder-{form}", folders, [seed], parts=3, data=True, weight=0.5))
    return targets


def _work_seed(box: Sandbox) -> bytes:
    weight = transforms.round_to_nearest(torch.randn(8, 32, generator=torch.manual_seed(0)), 4, 16)
    unfinished = WorkFolder.__new__(WorkFolder)
    unfinished.path = box.root
    unfinished.save_block(7, {"q": weight}, [LayerReport("q", 8, 32, "int4", 0.1, 0.1, 0.5, 1.0)])
    file = box.root / "block-00007.safetensors"
    load_with_facts(file)
    seed = NUL.join(as_parts(file.read_bytes()))
    file.unlink()
    return seed


# Other places and spellings of a config, as old programs wrote them.
SPELLINGS_A = json.dumps(
    {
        "model_type": "llama",
        "compression_config": {
            "quant_method": "sparseml",
            "format": "marlin-24",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear", "re:.*q_proj", "model.layers.0.q_proj"],
                    "weights": {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True},
                }
            },
            "ignore": ["lm_head"],
            "sparsity_config": {"format": "dense", "sparsity_structure": "2:4"},
        },
    }
).encode()
SPELLINGS_B = (
    json.dumps({"model_type": "llama", "text_config": {"quantization_config": {"quant_method": "marlin", "bits": 4}}})
    + "\0"
    + json.dumps({"bits": 4, "group_size": 128, "is_marlin_format": True, "desc_act": False, "sym": True})
).encode()
SPELLINGS_C = json.dumps(
    {
        "quantization_config": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "checkpoint_format": "gptq_v2",
            "dynamic": {"+:.*mlp\\..*": {"bits": 8}, "-:.*lm_head.*": {}, "model\\.layers\\.[0-9]+\\.q": {"bits": 8}},
            "spearfish": {"format_version": "1.0", "layers": {"a": {"bits": 8, "shape": [3, 4]}}, "extended": ["x"]},
        }
    }
).encode()
INDEX = json.dumps(
    {"metadata": {"total_size": 8}, "weight_map": {"a.weight": "a.safetensors", "b.weight": "b.safetensors"}}
).encode()
PATHS = (
    "../forbidden/secret.safetensors", "link.safetensors", "up/secret.safetensors", "deep/c.safetensors", "..", ".",
    "/", "/etc/passwd", "/dev/zero", "deep/../a.safetensors", "..\\forbidden\\secret.safetensors",
    "a.safetensors\0.json", "//a.safetensors", "./a.safetensors", "deep", "a.SAFETENSORS", ".safetensors",
    "a.safetensors/", "~/x.safetensors", "file:///a.safetensors", "http://localhost/a.safetensors",
    "\ud800.safetensors", "x" * 300 + ".safetensors",
)  # fmt: skip
FACTS = json.dumps(
    {"registers": 32, "static_shared": 0, "stack": 0, "spill_stores": 0, "spill_loads": 0, "warnings": []}
).encode()
XZ = lzma.compress(b"One.\n\nTwo.")
