"""The verbs about files: inspect, convert, verify."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from spearfish.checkpoint import ConvertReport, Inspection, LayerRow

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Checkpoint folder (config.json and safetensors).", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]
MORE_THAN = 40  # layers or names; longer lists are folded


def inspect(
    folder: Folder,
    layers: Annotated[bool, typer.Option("--layers", help="Every layer, not one row per kind of layer.")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="Headers only: do not read the weights to count zeros.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a checkpoint is: format, bits, groups, measured sparsity, sizes, and what runs it."""
    from spearfish.checkpoint import inspect as look

    with _bar("Reading", as_json) as progress:
        found = look(folder, measure=not fast, progress=progress)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    _print_inspection(_console(), found, layers)


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Checkpoint folder to read.", show_default=False)],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to write; appears whole or not at all.", show_default=False)
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="One of marlin_24, gptq, gptq_v2, marlin, ct-marlin-24, ct-pack-quantized, ct-sparse-24-bitmask,"
            " dense.",
            show_default=False,
        ),
    ],
    bits: Annotated[
        int | None,
        typer.Option(help="4 or 8: quantise layers of 16-bit 2:4 values (round-to-nearest); 4 if not given."),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="Weights that share one scale when quantising; -1: a whole column; 128 if not given."),
    ] = None,
    reproject: Annotated[
        bool, typer.Option("--reproject", help="Make layers that are almost 2:4 exactly so, and report the damage.")
    ] = False,
    pad: Annotated[
        bool,
        typer.Option("--pad", help="Add zeros to layers whose size the format cannot hold (needs spearfish to run)."),
    ] = False,
    require_sparse: Annotated[
        bool, typer.Option("--require-sparse", help="Fail if any linear layer but the output head is not 2:4.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="float16, bfloat16 or float32: of dequantised values; the model's own if not given."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is at OUT.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another format, layer by layer; what cannot be done is refused with the reason."""
    from spearfish.checkpoint import convert as run

    with _bar("Converting", as_json) as progress:
        report = run(
            source,
            out,
            to,
            bits=bits,
            group_size=group_size,
            reproject=reproject,
            pad=pad,
            require_sparse=require_sparse,
            dtype=dtype,
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
        return
    _print_conversion(_console(), report)


def verify(folder: Folder, as_json: AsJson = False) -> None:
    """Check every invariant and every value of a checkpoint. Exit code 1 if anything is wrong."""
    from spearfish.checkpoint import verify as check

    with _bar("Checking", as_json) as progress:
        report = check(folder, progress=progress)
    if as_json:
        typer.echo(json.dumps({**asdict(report), "ok": report.ok}, indent=2))
    else:
        console = _console()
        for problem in report.problems[:MORE_THAN]:
            text = problem.what if problem.where in problem.what else f"{problem.where}: {problem.what}"
            console.print(text, style="red", soft_wrap=True)
        if len(report.problems) > MORE_THAN:
            console.print(f"... and {len(report.problems) - MORE_THAN} more (--json lists all)", style="red")
        _notes(console, report.notes)
        if report.ok:
            counts = f"{_many(report.layers, 'layer')} and {_many(report.tensors, 'other tensor')}"
            console.print(f"Good: {report.format}, {counts} checked.")
        else:
            console.print(f"Bad: {_many(len(report.problems), 'problem')}.", style="bold red")
    if not report.ok:
        raise typer.Exit(1)


def _print_inspection(console: Console, found: Inspection, every: bool) -> None:
    said = f", says {found.where}" if found.format != "dense" else ""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("Folder", found.path)
    facts.add_row("Format", f"{found.format} ({found.title})" + said)
    facts.add_row("Layers", f"{len(found.layers)} linear, {found.weights:,} weights")
    if found.layers:
        facts.add_row("Size", f"{_size(found.linear_bytes)} = {found.bits_per_weight:.3f} bits per weight")
    facts.add_row("Other tensors", _size(found.other_bytes))
    if found.plain_linears:
        facts.add_row("Left plain", _folded(found.plain_linears))
    console.print(facts)
    if found.layers:
        console.print(_layer_table(found, every))
    elif found.format == "dense":
        console.print("No linear layer is 2:4: an ordinary dense model. `spearfish compress` makes one that is.")
    if found.extended:
        console.print("Extended: needs spearfish. " + "; ".join(found.extended) + ".", style="yellow", soft_wrap=True)
    console.print("Runs on:")
    for line in found.runs_on:
        console.print(f"  {line}")
    _notes(console, found.notes)


def _layer_table(found: Inspection, every: bool) -> Table:
    rows: dict[tuple[Any, ...], list[LayerRow]] = {}
    for row in found.layers:
        name = row.name if every else _kind(row.name)
        key = (name, row.n, row.k, row.format, row.bits, row.group_size, row.symmetric, row.act_order, row.sparsity)
        rows.setdefault(key, []).append(row)
    table = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    table.add_column("layer", overflow="fold")
    headers = ["count", "n", "k", "bits", "group", "2:4", "zeros", "bits/\nweight"]
    for header in headers if not every else headers[1:]:
        table.add_column(header, justify="right")
    for key, members in rows.items():
        first = members[0]
        group = "column" if first.group_size is None else str(first.group_size)
        if first.bits >= 16:
            group = "-"
        marks = ("" if first.symmetric else " asym") + (" act-order" if first.act_order else "")
        if first.format != found.format:
            marks += f" {first.format}"
        cells = [str(first.n), str(first.k), f"{first.bits}{marks}", group, _pattern(members), _zeros(members)]
        cells.append(f"{8 * sum(m.nbytes for m in members) / sum(m.n * m.k for m in members):.3f}")
        table.add_row(key[0] if len(members) > 1 else first.name, *([] if every else [str(len(members))]), *cells)
    return table


def _pattern(rows: list[LayerRow]) -> str:
    spoilt = [row.spoilt for row in rows if row.spoilt is not None]
    if not spoilt:
        return "yes" if rows[0].sparsity == "2:4" else "not looked"
    worst = max(spoilt)
    if worst == 0:
        return "yes"
    return "no" if worst >= 0.5 else f"almost: {worst:.2%} spoilt"


def _zeros(rows: list[LayerRow]) -> str:
    shares = [row.zeros for row in rows if row.zeros is not None]
    return f"{sum(shares) / len(shares):.1%}" if shares else "-"


def _print_conversion(console: Console, report: ConvertReport) -> None:
    lossy = [layer for layer in report.layers if layer.error is not None]
    console.print(
        f"{report.source} ({report.source_format}) -> {report.out} ({report.format}):"
        f" {_many(len(report.layers), 'layer')}, {_size(report.bytes_before)} -> {_size(report.bytes_after)}",
        soft_wrap=True,
    )
    if not lossy:
        console.print("Every value was kept.")
    else:
        worst = max(lossy, key=lambda layer: layer.error or 0)
        mean = sum(layer.error or 0 for layer in lossy) / len(lossy)
        console.print(
            f"{_many(len(lossy), 'layer')} changed in value: relative error {mean:.4f} on average,"
            f" worst {worst.error:.4f} in {worst.name}",
        )
        dropped = [layer for layer in lossy if layer.dropped]
        if dropped:
            total = _many(sum(layer.dropped for layer in dropped), "value")
            console.print(f"Dropped to make 2:4: {total} in {_many(len(dropped), 'layer')}.", style="yellow")
    if report.plain:
        console.print(f"Left plain: {_folded(report.plain)}")
    if report.extended:
        console.print("Extended: needs spearfish. " + "; ".join(report.extended) + ".", style="yellow", soft_wrap=True)
    _notes(console, report.notes)
    console.print(f"Next: spearfish inspect {report.out}", soft_wrap=True)


def _notes(console: Console, notes: list[str]) -> None:
    for note in notes:
        console.print(f"Note: {note}", soft_wrap=True)


def _console() -> Console:
    """Standard output; wide if it is a file or a pipe, where nobody wants lines cut at 80. Names come from files, so
    brackets in them are no markup."""
    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def _kind(name: str) -> str:
    """A layer's name with its numbers folded away."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _folded(names: list[str]) -> str:
    """Each kind of layer once, with its number; a single one by its full name."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_kind(name), []).append(name)
    return ", ".join(f"{kind} ({len(some)})" if len(some) > 1 else some[0] for kind, some in kinds.items())


def _size(nbytes: int) -> str:
    unit, name = next((unit, name) for unit, name in _UNITS if nbytes >= unit or unit == 1)
    return f"{nbytes / unit:,.1f} {name}" if unit > 1 else f"{nbytes} bytes"


_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))


@contextmanager
def _bar(verb: str, quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A progress bar on stderr if that is a terminal and the run is not for machines."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn(verb),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)

        def step(name: str, done: int, total: int) -> None:
            progress.update(task, completed=done - 1, total=total, description=name)

        yield step
