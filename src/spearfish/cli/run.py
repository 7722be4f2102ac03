"""`spearfish generate`, `spearfish serve` and `spearfish doctor`."""

from __future__ import annotations

import json
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from spearfish.checkpoint import open_checkpoint
from spearfish.cli import diagnosis
from spearfish.errors import FormatError, UnsupportedError

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder, of any format.", show_default=False)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a GPU is taken if there is one.")]


class DType(StrEnum):
    """What to compute in."""

    auto = "auto"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


Compute = Annotated[DType, typer.Option("--dtype", help="Compute in this type; auto: float32 on a CPU, else 16 bit.")]


def generate(
    folder: Folder,
    prompt: Annotated[str, typer.Argument(help="The text to answer or go on from; - reads it from standard input.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Stop after this many.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample among the likeliest, up to this share.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Use the model's chat template, if it has one.")] = True,
    device: Device = None,
    dtype: Compute = DType.auto,
) -> None:
    """Answer a prompt.

    The answer goes to standard output, word by word; everything else to standard error.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise FormatError("the prompt is empty")
    model, tokenizer = open_model(folder, device, dtype)

    import torch

    from spearfish.integrations.transformers import streamer

    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(text, return_tensors="pt")
    highest, known = int(inputs["input_ids"].max()), model.get_input_embeddings().weight.shape[0]
    if highest >= known:
        raise FormatError(
            f"the tokenizer in {folder} gives token {highest}, the model has an embedding for {known} tokens: they"
            " belong to different models; put the model's own tokenizer files there"
        )
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    sampling |= (
        {"temperature": temperature, "top_p": top_p} if temperature > 0 else {"temperature": None, "top_p": None}
    )
    length = inputs["input_ids"].shape[1]
    start = time.perf_counter()
    with torch.inference_mode():
        tokens = model.generate(
            **inputs.to(model.device), max_new_tokens=max_new_tokens, streamer=streamer(tokenizer), **sampling
        )
    seconds = time.perf_counter() - start
    new = tokens.shape[1] - length
    note(f"{new} tokens in {seconds:.1f} s, {new / seconds:.1f} tokens/s")


def serve(context: typer.Context) -> None:
    """Serve checkpoints over HTTP, OpenAI style: `spearfish serve DIR --port 8000`.

    transformers' own server, with all its options (`spearfish serve DIR --help` lists them), on files that it could not
    read by itself.
    """
    if not context.args:
        typer.echo(context.get_help())
        raise typer.Exit(2)
    models = need_models()
    folder = Path(context.args[0])
    if folder.is_dir():  # and no option, and no hub name: a folder's faults are better told now than by the server
        open_checkpoint(folder)
        models.load_tokenizer(folder)
    from spearfish.integrations import transformers

    transformers.serve(context.args)


def open_model(folder: Path, device: str | None, dtype: DType) -> tuple[Any, Any]:
    """Model and tokenizer of a checkpoint folder; says on stderr what it takes."""
    models = need_models()
    need_device(device)
    open_checkpoint(existing(folder))
    tokenizer = models.load_tokenizer(folder)
    import torch

    from spearfish.integrations.transformers import load
    from spearfish.nn import QuantLinear

    start = time.perf_counter()
    with models.quiet_transformers():
        model = load(folder, None if dtype == DType.auto else getattr(torch, dtype), device)
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    total = sum(layer.prepared.nbytes for layer in layers if layer.prepared)
    paths = sorted({layer.prepared.path for layer in layers if layer.prepared})
    note(
        f"loaded in {time.perf_counter() - start:.1f} s: {len(layers)} quantised layers, {total / 2**20:.0f} MiB,"
        f" {model.dtype} ({'; '.join(paths) or 'no quantised layer'})"
    )
    return model, tokenizer


def need_device(name: str | None) -> None:
    """Raises UnsupportedError for a device that torch does not know or does not have here; None is any."""
    import torch

    if name is None:
        return
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UnsupportedError(f"--device {name}: no such device; wanted cpu, cuda or cuda:1 and so on") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(
            f"--device {name}: torch finds {torch.cuda.device_count()} GPUs here; leave the option out to take what"
            " there is. `spearfish doctor` says more"
        )


def need_models() -> Any:
    """spearfish.models, after a check that transformers is there to run them."""
    from spearfish import models

    models.need_transformers("running a model")
    return models


def existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise FormatError(f"{folder} is no folder; wanted one with config.json and .safetensors files")
    return folder


def note(text: str) -> None:
    """One grey line on stderr."""
    Console(stderr=True).print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def doctor(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Also say what would run this checkpoint.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same for a machine to read.")] = False,
) -> None:
    """Look at this machine: versions, GPU, which paths would run and why others would not, and the plugins' state.

    Exit code 1 if something is broken (not merely absent).
    """
    report = diagnosis.examine(None if folder is None else existing(folder))
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        print_report(report)
    if report["broken"]:
        raise typer.Exit(1)


def print_report(report: dict[str, Any]) -> None:
    console = Console(markup=False)  # advice names extras in brackets
    for title, rows in report.items():
        if title == "broken" or not rows:
            continue
        table = Table(
            title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2)
        )
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in rows.items():
            table.add_row(name, str(text))
        console.print(table)
        console.print()
    for fault in report["broken"]:
        console.print(f"broken: {fault}", style="red", markup=False)
