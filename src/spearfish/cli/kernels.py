"""`spearfish kernels`: compile the GPU kernels ahead of time, and list them with what the compiler says of each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from spearfish.errors import CompileError, UnsupportedError

if TYPE_CHECKING:
    from spearfish.kernels.jit import Binary

app = typer.Typer(no_args_is_help=True, help="Compile the GPU kernels ahead of time, list them.")

Arch = Annotated[list[str] | None, typer.Option("--arch", help="Such as sm_80 or sm_90a; may be repeated.")]
All = Annotated[bool, typer.Option("--all", help="Every architecture that is tested: sm_80 to sm_120.")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Compilers at a time.")]


@app.command()
def build(
    arch: Arch = None,
    every: All = False,
    check: Annotated[bool, typer.Option("--check", help="Fail on register spills and compiler warnings.")] = False,
    jobs: Jobs = 2,
) -> None:
    """Fill the kernel cache, so that no compiler is needed where it is used (say, in a container).

    Without --arch and --all: for the GPUs of this machine. Needs no GPU otherwise. The cache is SPEARFISH_CACHE_DIR,
    by default the user's cache folder.
    """
    from spearfish.cache import cache_folder

    started = time.perf_counter()
    binaries = _compile(_architectures(arch, every), jobs)
    bad = [binary for binary in binaries if binary.resources.complaint]
    for binary in bad:
        typer.echo(f"{binary.variant}: {binary.resources.complaint}")
    fresh = sum(binary.seconds > 0 for binary in binaries)
    typer.echo(
        f"{len(binaries)} kernels: {fresh} compiled, {len(binaries) - fresh} already there, {len(bad)} with complaints;"
        f" {time.perf_counter() - started:.0f} s, in {cache_folder() / 'kernels'}"
    )
    if check and bad:
        raise CompileError(f"{len(bad)} of {len(binaries)} kernels spill registers or have warnings, listed above")


@app.command(name="list")
def list_(arch: Arch = None, every: All = False, jobs: Jobs = 2) -> None:
    """Show every kernel variant with its registers, spills, shared memory and size; compiles what is missing."""
    table = Table("arch", "kernel", "variant", "registers", "spilled bytes", "shared KiB", "cubin KiB", box=None)
    for binary in _compile(_architectures(arch, every), jobs):
        facts = binary.resources
        table.add_row(
            binary.variant.arch,
            binary.variant.entry,
            " ".join(f"{name.lower()}={value}" for name, value in binary.variant.macros),
            str(facts.registers),
            str(facts.spill_stores + facts.spill_loads + facts.stack),
            f"{(facts.static_shared + binary.variant.dynamic_shared) / 1024:.0f}",
            f"{len(binary.cubin) / 1024:.0f}",
        )
    Console(width=200).print(table)


def _architectures(arch: list[str] | None, every: bool) -> list[str]:
    """The architectures asked for; those of this machine's GPUs if none is named."""
    import torch

    from spearfish.kernels.jit import ARCHITECTURES, architecture

    if every:
        return list(ARCHITECTURES)
    if arch:
        return list(dict.fromkeys(arch))
    if not torch.cuda.is_available():
        raise UnsupportedError("no GPU here to build for: name an architecture, --arch sm_90a, or take --all")
    return sorted({architecture(device) for device in range(torch.cuda.device_count())})


def _compile(architectures: list[str], jobs: int) -> list[Binary]:
    from concurrent.futures import ThreadPoolExecutor

    from spearfish.kernels.choose import all_variants
    from spearfish.kernels.jit import compile_variant

    variants = [variant for arch in architectures for variant in all_variants(arch)]
    with Progress(console=Console(stderr=True), transient=True) as progress, ThreadPoolExecutor(jobs) as workers:
        task = progress.add_task("compiling", total=len(variants))
        binaries = []
        for binary in workers.map(compile_variant, variants):
            binaries.append(binary)
            progress.advance(task)
    return binaries
