"""CPU seconds a block and peak memory of compressing a 7B model on a CPU, from a few blocks of its size.

    python benchmarks/large_blocks.py /path/with/3/GB --blocks 3

The model has the geometry of Llama-2-7B but few blocks, random weights in bfloat16, one shard a block. Its words are
those of a tokenizer trained on the calibration text that comes along. Memory is the process's resident peak, set back
at the start of each block (Linux only), so a peak that grows with the number of blocks would show. Killed, the same
command goes on at the block where it was.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import spearfish
from spearfish.compress import Recipe, compress
from spearfish.text import read_text

RESULTS = Path(__file__).parent / "results" / "accuracy"
WIDTH, INNER, HEADS, WORDS, BLOCKS = 4096, 11008, 32, 32000, 32
LINEARS = {
    "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (WIDTH, WIDTH), "self_attn.v_proj": (WIDTH, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}  # fmt: skip


def build(folder: Path, blocks: int) -> None:
    """Writes the model and a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(std=0.02, generator=generator).bfloat16()

    folder.mkdir(parents=True)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=blocks,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=4096, rms_norm_eps=1e-5,
        tie_word_embeddings=False, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    places: dict[str, str] = {}

    def store(tensors: dict[str, torch.Tensor], file: str) -> None:
        save_file(tensors, folder / file, {"format": "pt"})
        places.update(dict.fromkeys(tensors, file))

    for index in range(blocks):
        path = f"model.layers.{index}"
        tensors = {f"{path}.{name}.weight": random(*shape) for name, shape in LINEARS.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{path}.{norm}.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
        store(tensors, f"block-{index:05d}.safetensors")
    ends = {"model.embed_tokens.weight": random(WORDS, WIDTH), "lm_head.weight": random(WORDS, WIDTH)}
    store(ends | {"model.norm.weight": torch.ones(WIDTH, dtype=torch.bfloat16)}, "ends.safetensors")
    index_file = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(read_text("articles"), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def peak_since_reset() -> int:
    """Bytes: the most that was resident since the last call."""
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return peak * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model and its result may lie while this runs")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--method", default="joint")
    parser.add_argument("--samples", type=int, default=4)
    options = parser.parse_args()
    source, out = options.folder / "dense", options.folder / "compressed"
    if not source.exists():
        # In a process of its own, so that its memory does not count.
        unfinished = options.folder / "dense.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        maker = multiprocessing.get_context("spawn").Process(target=build, args=(unfinished, options.blocks))
        maker.start()
        maker.join()
        if maker.exitcode:
            raise SystemExit(f"the model was not built: exit code {maker.exitcode}")
        unfinished.rename(source)
    notes = options.folder / "stages.json"
    stages: dict[str, Any] = json.loads(notes.read_text()) if notes.exists() else {}
    doing, began = "before", time.process_time()

    def progress(stage: str, done: int, total: int, note: str) -> None:
        nonlocal doing, began
        now = time.process_time()
        stages[doing] = {"cpu_seconds": now - began, "peak": peak_since_reset()}
        notes.write_text(json.dumps(stages))
        print(f"{doing}: {stages[doing]}", flush=True)
        doing, began = f"block {done}" if stage == "blocks" and done < total else "after", now

    recipe = Recipe(method=options.method, num_samples=options.samples)
    report = compress(source, out, recipe, progress=progress)
    blocks = [stages[f"block {index}"] for index in range(options.blocks)]
    times = [block["cpu_seconds"] for block in blocks]
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout or "unknown"
    facts: dict[str, Any] = {
        "geometry": "Llama-2-7B blocks, random weights in bfloat16",
        "hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "vocab_size": WORDS, "blocks": options.blocks, "recipe": report.recipe, "calibration": report.calibration,
        "cpu_seconds_per_block": times, "projected_cpu_seconds": BLOCKS * sum(times) / len(times),
        "peak_per_block": [block["peak"] for block in blocks], "peak_before_blocks": stages["before"]["peak"],
        "peak_while_writing": stages["after"]["peak"],
        "memory_estimate": report.memory_estimate, "threads": torch.get_num_threads(),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "memory": memory()},
        "commit": commit.strip(), "python": platform.python_version(), "torch": torch.__version__,
        "spearfish": spearfish.__version__,
    }  # fmt: skip
    name = f"llama-2-7b-geometry-{options.method}-cpu.json"
    (RESULTS / name).write_text(json.dumps(facts, indent=1) + "\n")


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))


def memory() -> int:
    """Bytes of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
