"""Write docs/cli.md from the command line's own --help (`make docs`), or say that it is stale (--check, in lint)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Read by typer when it is imported: the page must not depend on the terminal it is made in.
os.environ.update(TERMINAL_WIDTH="100", NO_COLOR="1", TERM="dumb", _TYPER_FORCE_DISABLE_TERMINAL="1")

from typer.main import get_command
from typer.testing import CliRunner

from spearfish.cli import app

PAGE = Path(__file__).parent / "cli.md"
HEAD = "# The command line\n\nWritten by `make docs` from the commands' own `--help`; edit the help texts instead.\n"


def verbs() -> Iterator[tuple[str, ...]]:
    """Every command line that has a help of its own: (), ("compress",), ..., ("kernels", "build")."""
    stack = [((), get_command(app))]
    while stack:
        words, command = stack.pop()
        yield words
        below = getattr(command, "commands", {})
        stack += [((*words, name), below[name]) for name in reversed(below)]


def render() -> str:
    sections = [HEAD]
    for words in verbs():
        result = CliRunner().invoke(app, [*words, "--help"], prog_name="spearfish")
        if result.exit_code != 0:
            sys.exit(f"error: spearfish {' '.join(words)} --help ended with {result.exit_code}")
        body = "\n".join(line.rstrip() for line in result.output.strip("\n").splitlines()).strip("\n")
        sections.append(f"## {' '.join(('spearfish', *words))}\n\n```text\n{body}\n```\n")
    return "\n".join(sections)


def main() -> None:
    page = render()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
            sys.exit("error: docs/cli.md does not match the commands' help; run `make docs` and commit it")
    else:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
