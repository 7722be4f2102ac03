"""Write what is generated in docs (`make docs`), or say what is stale (--check, in lint): cli.md from the commands' own
--help, the pictures of formats.md, and the tables between `<!-- table: NAME -->` and `<!-- /table -->` in tutorial.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Read by typer when it is imported: the page must not depend on the terminal it is made in.
os.environ.update(TERMINAL_WIDTH="100", NO_COLOR="1", TERM="dumb", _TYPER_FORCE_DISABLE_TERMINAL="1")

import tables
from figures import FIGURES
from typer.main import get_command
from typer.testing import CliRunner

from spearfish.cli import app

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
HEAD = "# The command line\n\nWritten by `make docs` from the commands' own `--help`; edit the help texts instead.\n"


def verbs() -> Iterator[tuple[str, ...]]:
    """Every command line that has a help of its own: (), ("compress",), ..., ("kernels", "build")."""
    stack = [((), get_command(app))]
    while stack:
        words, command = stack.pop()
        yield words
        below = getattr(command, "commands", {})
        stack += [((*words, name), below[name]) for name in reversed(below)]


def command_line() -> str:
    """The whole of cli.md."""
    sections = [HEAD]
    for words in verbs():
        result = CliRunner().invoke(app, [*words, "--help"], prog_name="spearfish")
        if result.exit_code != 0:
            sys.exit(f"error: spearfish {' '.join(words)} --help ended with {result.exit_code}")
        body = "\n".join(line.rstrip() for line in result.output.strip("\n").splitlines()).strip("\n")
        sections.append(f"## {' '.join(('spearfish', *words))}\n\n```text\n{body}\n```\n")
    return "\n".join(sections)


def with_tables(page: str) -> str:
    """The page with its tables made anew."""
    makers = {"kernels": tables.kernels, "engine": tables.engine, "accuracy": tables.accuracy}
    made = {name: make(RESULTS / name) for name, make in makers.items()}
    for name, text in made.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- /table -->"
        before, found, rest = page.partition(begin)
        if not found or end not in rest:
            sys.exit(f"error: tutorial.md has no place for the table {name}: wanted {begin.strip()} and {end}")
        page = f"{before}{begin}{text}\n{end}{rest.partition(end)[2]}"
    return page


def generated() -> dict[Path, str]:
    """Every generated file with what it should hold."""
    tutorial = DOCS / "tutorial.md"
    return {
        DOCS / "cli.md": command_line(),
        tutorial: with_tables(tutorial.read_text(encoding="utf-8")),
        **{DOCS / "figures" / name: draw() for name, draw in FIGURES.items()},
    }


def main() -> None:
    stale = {
        path: text
        for path, text in generated().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    if "--check" not in sys.argv[1:]:
        for path, text in stale.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    elif stale:
        names = ", ".join(path.relative_to(DOCS.parent).as_posix() for path in stale)
        sys.exit(f"error: {names} do not match what they are made from; run `make docs` and commit them")


if __name__ == "__main__":
    main()
