"""The command line: `spearfish VERB ...`. One file per group of verbs; each parses, calls the library and prints.

A group file offers plain functions with typer annotations (`VERBS` below names them) or, for a noun with verbs of its
own such as `spearfish kernels build`, a `typer.Typer` called `app`. Group files import torch and transformers inside
their functions where they can, so that help stays quick.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

from spearfish.errors import SpearfishError

MAKE, FILES, RUN, MEASURE = "Make a checkpoint", "Look at and change checkpoints", "Run one", "Kernels and measurements"

# Panel of the help, module under spearfish.cli, and its verbs in the order of the help. No verbs: the module's `app` is
# mounted under the module's name.
VERBS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (MAKE, "compress", ("compress",)),
    (FILES, "files", ("inspect", "convert", "verify")),
    (RUN, "run", ("generate",)),
    (RUN, "compress", ("evaluate",)),
    (RUN, "run", ("serve", "doctor")),
    (MEASURE, "kernels", ()),
    (MEASURE, "bench", ("bench",)),
)

# `serve` hands its words to transformers' own command; with nothing but -h it explains itself.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

app = typer.Typer(
    name="spearfish",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Environment: SPEARFISH_CACHE_DIR (compiled kernels), SPEARFISH_LOG (debug, info, warning),"
    " SPEARFISH_KERNEL (force one kernel path).",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from spearfish import __version__

        typer.echo(f"spearfish {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """LLM weights that are both 2:4-sparse and quantised (INT4/INT8): make them, look at them, run them."""


def _register() -> None:
    for panel, module_name, verbs in VERBS:
        module = importlib.import_module(f"spearfish.cli.{module_name}")
        if not verbs:
            for command in module.app.registered_commands:
                command.help = _flowing(command.callback)
            app.add_typer(module.app, name=module_name, rich_help_panel=panel)
        for verb in verbs:
            function = getattr(module, verb)
            passed_on: dict[str, Any] = {"context_settings": PASSED_ON, "options_metavar": "DIR [OPTIONS]"}
            extra = passed_on if verb == "serve" else {}
            app.command(name=verb, rich_help_panel=panel, help=_flowing(function), **extra)(function)


def _flowing(function: Callable[..., Any]) -> str:
    """A docstring with one line for each paragraph: the help wraps them to the terminal, and would keep our breaks."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


_register()


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `spearfish` command. Ends the process: 0, 1 for an error, 2 for a wrong command line."""
    level = os.environ.get("SPEARFISH_LOG", "warning").upper()
    if level not in logging.getLevelNamesMapping():
        _fail(f"SPEARFISH_LOG is {level.lower()!r}, wanted one of debug, info, warning, error")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("spearfish").setLevel(level)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="spearfish")
    except SpearfishError as error:
        if level == "DEBUG":
            raise
        _fail(str(error))
    except OSError as error:
        # A missing file or a full disk is the user's to mend; where it happened in our code does not help.
        if level == "DEBUG":
            raise
        _fail(f"{error.strerror}: {error.filename}" if error.strerror and error.filename else str(error))


def _fail(message: str) -> None:
    """Print one red line on stderr and leave with exit code 1."""
    console = Console(stderr=True)
    console.print("error:", style="bold red", end=" ")
    console.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(1)
