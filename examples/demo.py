"""`make demo`: a real small language model, made 2:4-sparse and 4-bit on this machine, measured, and talked to.

What was finished is kept in demo/, so a second run goes on where the first stopped. DEMO_SHORT=1 compresses a few
blocks only and measures on little text, for continuous integration: its numbers say nothing about a whole model.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from get_model import MODEL, write_prose
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from transformers.utils import logging as transformers_logging

import spearfish
from spearfish.checkpoint import open_checkpoint
from spearfish.compress import Recipe, compress
from spearfish.errors import SpearfishError
from spearfish.evaluate import evaluate
from spearfish.models import DenseModel, load_dense
from spearfish.text import cut_windows, read_text

SHORT = bool(os.environ.get("DEMO_SHORT"))
FOLDER = Path("demo")
OUT = FOLDER / ("smollm2-135m-2of4-short" if SHORT else "smollm2-135m-2of4")
PROSE = FOLDER / "held-out.txt"

# k is 576 and 1536 in this model: groups of 64 fit both. The quickest method that compensates its errors, and then five
# minutes of learning from the dense model: seven minutes in all on two cores. (With so little text `joint` and its
# catching up start closer to the dense model and end further from it.) The short form does the first three of the
# thirty blocks, and does not learn.
REST = ("re:layers\\.([3-9]|[12][0-9])\\.",)
FULL = Recipe(group_size=64, method="sparsegpt", num_samples=16, recover=300, catch_up=0.0)
RECIPE = replace(FULL, num_samples=4, recover=0, ignore=REST) if SHORT else FULL
WINDOWS = 4 if SHORT else 32
QUESTIONS = ["What is a river?"] if SHORT else ["What is a river?", "Why is the sky blue?", "Name three animals."]

console = Console(highlight=False)


def main() -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(os.cpu_count() or 1)
    transformers_logging.disable_progress_bar()
    start = time.perf_counter()
    step("1. The dense model: SmolLM2-135M-Instruct")
    dense = load_dense(MODEL)
    weights = sum(math.prod(dense.reader.shape(name)) for name in dense.reader.names())
    tell(f"{weights / 1e6:.0f} million weights, read from a GGUF file and kept as safetensors in {dense.folder}")

    step(f"2. Two of every four weights out, the others to 4 bits in groups of {RECIPE.group_size}")
    if SHORT:
        tell("the short form: only the first three blocks, the others stay dense")
    if finished():
        tell(f"{OUT} is there already; remove it to compress again")
    else:
        options = f"--group-size {RECIPE.group_size} --method {RECIPE.method} --num-samples {RECIPE.num_samples}"
        say(
            f"spearfish compress {MODEL} {OUT} {options}"
            + (f" --recover {RECIPE.recover:.0f}s" if RECIPE.recover else "")
        )
        squeeze(dense)
    sizes()

    step("3. What it lost: perplexity on prose that neither run has seen")
    write_prose(PROSE)
    original, compressed, tokenizer = dense.whole(), spearfish.load(OUT, device="cpu"), dense.tokenizer()
    perplexities(original, compressed, tokenizer)

    step("4. The same questions to both")
    for question in QUESTIONS:
        console.print(f"   [bold]{question}[/bold]")
        for name, model in (("dense", original), ("2:4 + INT4", compressed)):
            tell(answer(model, tokenizer, question) or "(nothing)", f"   {name:>10}  ")

    step(f"Done in {time.perf_counter() - start:.0f} s. The checkpoint lies in {OUT}")
    tell("What to do next:")
    for command, purpose in (
        (f"inspect {OUT}", "what is in the file, layer by layer"),
        (f'generate {OUT} "Your question"', "talk to it"),
        (f"convert {OUT} {FOLDER / 'gptq'} --to gptq", "a file that other engines run, dense"),
        ("compress FOLDER OUT", "your own model: larger ones lose far less"),
    ):
        say(f".venv/bin/spearfish {command}", purpose)


def tell(text: str, indent: str = "   ", style: str = "") -> None:
    """Wrapped and indented text; `indent` may be a label, whose width is kept free below it."""
    width = min(console.width, 100)
    lines = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=" " * len(indent))
    console.print("\n".join(lines), style=style, markup=False, soft_wrap=True)


def step(title: str) -> None:
    console.print(f"\n[bold]{title}[/bold]")


def say(command: str, purpose: str = "") -> None:
    console.print(f"   [cyan]$ {command}[/cyan]" + (f"   [dim]# {purpose}[/dim]" if purpose else ""), soft_wrap=True)


def finished() -> bool:
    """Whether a whole checkpoint made with the same recipe lies in OUT (they only ever appear whole)."""
    try:
        made_with = open_checkpoint(OUT).config["quantization_config"]["spearfish"]["recipe"]
    except (SpearfishError, KeyError):
        return False
    return bool(made_with == RECIPE.to_dict())


def squeeze(dense: DenseModel) -> None:
    if OUT.with_name(f"{OUT.name}.work").exists():
        tell("an earlier run was stopped; its finished blocks are kept")
    columns = (TextColumn("   {task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("compressing", total=None)

        def progress(stage: str, done: int, total: int, note: str) -> None:
            bar.update(task, description=f"{stage} {done}/{total}", completed=done, total=total)

        report = compress(dense, OUT, RECIPE, overwrite=True, progress=progress)
    tell(
        f"{len(report.layers)} layers in {report.seconds:.0f} s, {report.memory_peak / 2**30:.1f} GiB at most;"
        f" they lose {report.mean_error:.1%} of their output on average"
    )
    if report.recover:
        tell(
            f"then {report.recover['steps']} steps of learning from the dense model; the distance between their"
            f" predictions fell from {report.recover['divergence_first']:.2f} to"
            f" {report.recover['divergence_last']:.2f} nats per token"
        )
    for warning in report.warnings:
        tell(warning, "   note: ", style="yellow")


def sizes() -> None:
    """One table: what the linears and the file weigh before and after."""
    checkpoint = open_checkpoint(OUT)
    weights = sum(info.n * info.k for info in checkpoint.linears.values())
    packed = sum(info.nbytes for info in checkpoint.linears.values())
    rest = sum(checkpoint.entries[name].nbytes for name in checkpoint.tensor_names)
    table = Table(box=None, padding=(0, 2), show_header=True, header_style="dim")
    for title in ("", "dense, 16 bit", "2:4 + INT4", ""):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    table.add_row("bits per weight", "16", f"{8 * packed / weights:.2f}", f"{2 * weights / packed:.1f} times smaller")
    table.add_row("linear layers", mebibytes(2 * weights), mebibytes(packed), "")
    table.add_row("the rest", mebibytes(rest), mebibytes(rest), "not compressed")
    console.print(table)


def mebibytes(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


def perplexities(original: Any, compressed: Any, tokenizer: Any) -> None:
    tokens = cut_windows(tokenizer, read_text(str(PROSE)), 256)[:WINDOWS]
    with console.status("   measuring both models ..."):
        quality = evaluate(compressed, tokens, source=PROSE.name, other=original)
    tell(
        f"dense {quality.other_perplexity:.1f}, compressed {quality.perplexity:.1f} (lower is better); both put the"
        f" same token first {quality.agree:.0%} of the time"
    )
    tell(
        f"{quality.windows} windows of {quality.length} tokens of {quality.source}, data {quality.sha256[:12]}",
        style="dim",
    )
    tell("A model this small has nothing to spare and loses a lot at 2:4. Larger ones lose less.")


def answer(model: Any, tokenizer: Any, question: str) -> str:
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=20 if SHORT else 60, do_sample=False)
    new = tokens[0, inputs["input_ids"].shape[1] :]
    return " ".join(tokenizer.decode(new, skip_special_tokens=True).split())


if __name__ == "__main__":
    try:
        main()
    except SpearfishError as error:
        sys.exit(f"error: {error}")
