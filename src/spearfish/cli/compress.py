"""`spearfish compress` and `spearfish evaluate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spearfish.cli.run import need_device
from spearfish.errors import SpearfishError

if TYPE_CHECKING:
    from spearfish.compress import Progress as Callback
    from spearfish.compress import Report

METHODS_HELP = (
    "How masks and codes are found: admm (best), joint (faster), sparsegpt, wanda, magnitude (baselines); gptq and rtn"
    " quantise without pruning."
)


def compress(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Dense model: a folder, a .gguf file, a hub name (owner/model), or package:NAME for an installed"
            " package that carries one GGUF.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to write; appears whole or not at all.", show_default=False)
    ],
    bits: Annotated[int, typer.Option(help="4 or 8; 16 prunes without quantising.")] = 4,
    group_size: Annotated[
        int, typer.Option(help="Weights along k that share a scale; 0 or -1 for one per output.")
    ] = 128,
    method: Annotated[str, typer.Option(help=METHODS_HELP)] = "admm",
    ignore: Annotated[
        list[str] | None, typer.Option(help="Modules to leave as they are: '*.o_proj' or 're:...'. Repeatable.")
    ] = None,
    dense_layers: Annotated[
        list[str] | None, typer.Option(help="Modules to quantise but not prune, same patterns. Repeatable.")
    ] = None,
    calibration: Annotated[
        str,
        typer.Option(
            help="Text: a file, a folder, hub:NAME, what comes along ('articles' or 'addresses'), or 'self': the model"
            " writes it, which is quick on a GPU."
        ),
    ] = "articles",
    num_samples: Annotated[int, typer.Option(help="Windows of calibration text.")] = 32,
    seq_len: Annotated[int, typer.Option(help="Tokens in a window.")] = 512,
    seed: Annotated[int, typer.Option(help="Which windows are drawn.")] = 0,
    catch_up: Annotated[
        float | None,
        typer.Option(
            help="Share of what was lost before a layer that it is asked to make good, 0 to 1; admm and joint: 1, the"
            " others: 0.",
            show_default=False,
        ),
    ] = None,
    reconstruct: Annotated[
        int, typer.Option(help="Training steps for each block after it is solved; 0 for none, 20 are few, 200 many.")
    ] = 0,
    together: Annotated[
        int,
        typer.Option(
            help="Neighbouring blocks that --reconstruct trains at once, such as 10: better, for that many times the"
            " memory."
        ),
    ] = 1,
    budget: Annotated[
        float,
        typer.Option(help="Share of the layers' bytes that stays dense, where pruning would hurt most; such as 0.25."),
    ] = 0.0,
    recover: Annotated[
        str,
        typer.Option(
            help="Time for learning from the dense model afterwards, such as 5m; or 50steps, which take as long as"
            " they take and give the same every time; 0 for none."
        ),
    ] = "0",
    recover_text: Annotated[
        str,
        typer.Option(
            help="Text to learn from, as for --calibration; 'auto' is 'self' on a GPU and 'articles' elsewhere;"
            " 'self+FILE' mixes prose into it."
        ),
    ] = "auto",
    to: Annotated[str, typer.Option("--to", help="Format to write, as for convert.")] = "marlin_24",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    force_generic: Annotated[
        bool, typer.Option("--force-generic", help="Try a model family that is not known here.")
    ] = False,
    keep_work: Annotated[
        bool,
        typer.Option("--keep-work", help="Keep the finished blocks in OUT.work, for a later run that adds --recover."),
    ] = False,
    layers: Annotated[bool, typer.Option("--layers", help="Print every layer's error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Make a dense model 2:4-sparse and quantised, block by block. A killed run goes on where it stopped."""
    from spearfish.compress import Recipe
    from spearfish.compress import compress as run
    from spearfish.compress.recipe import time_or_steps

    recover_time, recover_steps = time_or_steps(recover)
    recipe = Recipe(
        bits=bits,
        group_size=None if group_size in (0, -1) else group_size,
        method=method,
        ignore=tuple(ignore or ()),
        dense_layers=tuple(dense_layers or ()),
        calibration=calibration,
        num_samples=num_samples,
        seq_len=seq_len,
        seed=seed,
        reconstruct=reconstruct,
        together=together,
        budget=budget,
        recover=recover_time,
        recover_steps=recover_steps,
        recover_text=recover_text,
        catch_up=catch_up,
    )
    where = _device(device)
    with _bars(as_json) as progress:
        report = run(
            model,
            out,
            recipe,
            device=where,
            overwrite=overwrite,
            format=to,
            force_generic=force_generic,
            progress=progress,
            keep_work=keep_work,
        )
    if as_json:
        typer.echo(report.to_json())
    else:
        _print_report(Console(), report, layers)


def evaluate(
    folder: Annotated[
        str, typer.Argument(metavar="MODEL", help="Checkpoint folder, or any dense model that compress takes.")
    ],
    text: Annotated[
        str,
        typer.Option(
            help="Prose to predict: a file, a folder, hub:NAME, or what comes along: 'articles', which compress"
            " calibrates on and so flatters, 'addresses', or 'builtin', both."
        ),
    ] = "builtin",
    against: Annotated[
        str | None, typer.Option(help="Dense model to compare with: adds the distance between their predictions.")
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of text, from its start.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens in a window.")] = 512,
    questions: Annotated[
        int,
        typer.Option(
            help="Zero-shot questions of each kind, made from the same text, one right answer of four: which sentence"
            " comes next, which word a repeated list goes on with, which number continues a sequence. 100 are enough"
            " to tell large differences; 0 for none."
        ),
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Perplexity on plain text, and right answers to questions made from it. Compare two numbers only if window length,
    counts and data agree."""
    from dataclasses import asdict

    from spearfish.evaluate import evaluate as run
    from spearfish.text import head, read_text
    from spearfish.zeroshot import answer, make_questions

    if questions < 0:
        raise SpearfishError(f"--questions counts them, got {questions}; 0 for none")
    if windows < 1:
        raise SpearfishError(f"--windows counts windows of text, at least 1; got {windows}")
    asked = make_questions(read_text(text), questions) if questions else []
    where = _device(device)
    model, tokenizer = _open(folder, where)
    other, _ = _open(against, where) if against else (None, None)
    tokens = head(tokenizer, text, windows, length)
    quality = run(model, tokens, source=text, other=other)
    answers = {name: answer(m, tokenizer, asked) for name, m in (("", model), ("other", other)) if asked and m}
    if as_json:
        zero_shot = {f"{name}_zero_shot".lstrip("_"): a.to_dict() for name, a in answers.items()}
        typer.echo(json.dumps(asdict(quality) | zero_shot, indent=2))
        return
    typer.echo(str(quality))
    for name, given in answers.items():
        typer.echo(f"the other model: {given}" if name else str(given))


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    need_device(name)
    return name


def _open(source: str, device: str) -> tuple[Any, Any]:
    """A quantised folder through the transformers integration, anything else as a dense model; and the tokenizer."""
    from spearfish import models
    from spearfish.checkpoint import open_checkpoint

    folder = Path(source)
    if folder.is_dir() and open_checkpoint(folder).format != "dense":
        from spearfish.integrations.transformers import load

        return load(folder, device=device), models.load_tokenizer(folder)
    dense = models.load_dense(source, force_generic=True)
    return dense.whole(device), dense.tokenizer()


@contextmanager
def _bars(silent: bool) -> Iterator[Callback]:
    """One bar per stage, with the time left, on stderr."""
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    bars = Progress(*columns, console=Console(stderr=True), disable=silent)
    tasks: dict[str, Any] = {}

    def update(stage: str, done: int, total: int, note: str) -> None:
        bars.start()  # with the first news: an error before any leaves no empty line
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total, note=note)
        bars.update(tasks[stage], completed=done, total=total, note=note)

    try:
        yield update
    finally:
        if tasks:
            bars.stop()


def _print_report(console: Console, report: Report, layers: bool) -> None:
    from spearfish.compress.report import table

    if layers:
        console.print(table(report))
    calibration = report.calibration
    console.print(
        f"{report.out}: {len(report.layers)} layers in {report.seconds:.0f} s, at most"
        f" {report.memory_peak / 2**30:.1f} GiB; {report.bytes_before / 2**20:.0f} MiB became"
        f" {report.bytes_after / 2**20:.0f} MiB",
        soft_wrap=True,
    )
    console.print(
        f"The layers lose {report.mean_error:.2%} of their output on average, calibrated on {calibration['windows']}"
        f" windows of {calibration['length']} tokens of {calibration['source']}, seed {calibration['seed']}, data"
        f" {calibration['sha256'][:12]}. Every layer: report.json, or --layers.",
        soft_wrap=True,
    )
    if report.budget:
        share = report.budget["bytes_kept_dense"] / max(report.budget["bytes_if_all_dense"], 1)
        saved = report.budget["error_saved"] / max(report.budget["error_added"], 1e-30)
        named = [name for unit in report.budget["kept_dense"] for name in unit["layers"]]
        console.print(
            f"Kept dense: {len(named)} layers, {share:.1%} of the bytes, which saves {saved:.0%} of the error that"
            f" pruning and rounding add: {', '.join(named[:6])}{' ...' if len(named) > 6 else ''}. Why: report.json.",
            soft_wrap=True,
        )
    if found := report.reconstruction:
        console.print(
            f"Reconstruction: {found['kept']} of {found['blocks']} blocks came closer to the dense model on windows"
            f" they were not trained on; distance {found['before']:.4f} before, {found['after']:.4f} after, on average."
            " The layers' errors above are those of before.",
            soft_wrap=True,
        )
    if report.recover and report.recover["divergence_last"] is not None:
        console.print(
            f"Recovery: {report.recover['steps']} steps of {report.recover['tokens_per_step']} tokens in"
            f" {report.recover['seconds']:.0f} s; distance to the dense model's predictions"
            f" {report.recover['divergence_first']:.3f} nats at the start, {report.recover['divergence_last']:.3f} at"
            " the end. The layers' errors above are those of before.",
            soft_wrap=True,
        )
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
