"""`make tutorial`: run every command of docs/tutorial.md and compare what it prints with what the page says.

    python examples/run_tutorial.py            # fails where the page and the program disagree
    python examples/run_tutorial.py --write    # puts the new output into the page instead

A ```console block holds commands behind `$ ` (a line that ends in a backslash goes on) and their output; a ```python
block whose first line is `# name.py` is written to that file first. Everything runs in a fresh folder beside
`examples`, from top to bottom. Compared are words; numbers with a fraction or a percent sign may differ by TOLERANCE,
since processors round differently; times, memory and numbers of steps are not compared. A comment before a block says
what is special about it:

    <!-- not run: needs a GPU -->    the reason must begin with "needs"
    <!-- varies -->                  text of a model: only that there is some
    <!-- fails -->                   the last command is to end with an error, which is shown
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
TOLERANCE = 0.15
WIDTH = 110

_BLOCK = re.compile(r"(?:^<!-- ([^>]*) -->\n)?^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What no two runs share: durations, memory, speeds, steps done within a time.
_VOLATILE = re.compile(r"\d[\d.,]*(?= (?:s\b|GiB\b|tokens/s\b|steps\b))")
_NUMBER = re.compile(r"([(\[=~]*)(-?\d[\d,]*(?:\.\d+)?)(%?[)\],.;:%]*)")


@dataclass
class Command:
    """One command line of the page, and the lines that it is said to print."""

    line: str
    output: list[str] = field(default_factory=list)


@dataclass
class Block:
    """A fenced block of the page. `mark` is the comment in front of it; start and end bound the fence's inside."""

    kind: str
    mark: str
    text: str
    start: int
    end: int

    @property
    def commands(self) -> list[Command]:
        """Of a console block. Raises ValueError where output comes before any command."""
        found: list[Command] = []
        goes_on = False
        for line in self.text.splitlines():
            if goes_on:
                found[-1].line += "\n" + line
            elif line.startswith("$ "):
                found.append(Command(line.removeprefix("$ ")))
            elif found:
                found[-1].output.append(line)
            else:
                raise ValueError(f"output before a command: {line!r}")
            goes_on = (goes_on or line.startswith("$ ")) and line.endswith("\\")
        return found

    @property
    def file(self) -> str | None:
        """The name of the file that a python block is to be written to."""
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found and self.kind == "python" else None


def blocks(page: str) -> list[Block]:
    """Every console and python block, in order. Raises ValueError on a mark that means nothing."""
    found = []
    for match in _BLOCK.finditer(page):
        mark = (match[1] or "").strip()
        if mark and not re.fullmatch(r"varies|fails|not run: needs .+", mark):
            mark = ""  # some other comment, such as the end of a generated table
        found.append(Block(match[2], mark, match[3], match.start(3), match.end(3)))
    return found


def differs(said: str, printed: str) -> bool:
    """Whether two outputs differ in more than rounding, times and white space."""
    left, right = (_VOLATILE.sub("N", text).split() for text in (said, printed))
    return len(left) != len(right) or not all(map(_alike, left, right))


def _alike(a: str, b: str) -> bool:
    if a == b or {a[:1], b[:1]} <= {"━", "─"}:
        return True
    x, y = _NUMBER.fullmatch(a), _NUMBER.fullmatch(b)
    if x is None or y is None or (x[1], x[3]) != (y[1], y[3]):
        return False
    if "." not in x[2] + y[2] and "%" not in x[3]:
        return False
    p, q = (float(match[2].replace(",", "")) for match in (x, y))
    last_place = 10.0 ** -len(x[2].partition(".")[2])
    return abs(p - q) <= max(TOLERANCE * max(abs(p), abs(q)), 1.5 * last_place)


def as_shown(output: str) -> list[str]:
    """Lines of output as the page shows them: no spaces at the end, long lines folded as a terminal would."""
    lines: list[str] = []
    for line in output.rstrip().splitlines():
        lines += textwrap.wrap(line, WIDTH, drop_whitespace=True, break_long_words=False) or [""]
    return [line.rstrip() for line in lines]


class Shell:
    """Runs commands in one folder, and ends at its own end what was started with `&`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "TERM": "dumb",
            "PYTHONWARNINGS": "ignore",
        }

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()

    def run(self, line: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error; a command ending in `&` is left running."""
        if line.endswith("&"):
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            command = ["bash", "-c", f"exec {line.removesuffix('&')}"]
            self.started.append(
                subprocess.Popen(command, cwd=self.folder, env=self.environment, start_new_session=True, **quiet)
            )
            return 0, "", ""
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr


def run_page(
    page: str, shell: Shell, only: Sequence[str] = (), renew: bool = False
) -> Iterator[tuple[Block, list[Command], list[str]]]:
    """Runs the page's blocks in order. Yields each console block that was run with its commands, their outputs replaced
    by what was printed where the two differ (with `renew` also where they may), and the complaints. `only`: run the
    commands that contain one of these texts and leave the others as they are."""
    for block in blocks(page):
        if block.file and not block.mark.startswith("not run"):
            (shell.folder / block.file).write_text(block.text.partition("\n")[2], encoding="utf-8")
        if block.kind != "console" or block.mark.startswith("not run"):
            continue
        commands, complaints = block.commands, []
        for command in commands:
            if only and not any(words in command.line for words in only):
                continue
            start, spent = time.perf_counter(), processor_time()
            code, out, err = shell.run(command.line)
            took, spent = time.perf_counter() - start, processor_time() - spent
            say(f"{took:6.1f} s, processor {spent:6.1f} s  $ {command.line}")
            last = command is commands[-1]
            if (code != 0) != (block.mark == "fails" and last):
                complaints.append(f"$ {command.line}\nended with {code}:\n{(err or out)[-3000:]}")
                continue
            shown = as_shown(err if code else out)
            said = "\n".join(command.output)
            if block.mark == "varies":
                if bool(said.strip()) != bool(shown):
                    complaints.append(f"$ {command.line}\nprinted {'something' if shown else 'nothing'}")
                if renew or complaints:
                    command.output = shown
            elif differs(said, "\n".join(shown)):
                diff = difflib.unified_diff(command.output, shown, "the page", "the program", lineterm="")
                complaints.append(f"$ {command.line}\n" + "\n".join(diff))
                command.output = shown
        yield block, commands, complaints


def processor_time() -> float:
    """Seconds that all ended commands have kept processors busy: unlike the clock's, the same on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def render(commands: list[Command]) -> str:
    """The inside of a console block."""
    return "".join(f"{line}\n" for command in commands for line in (f"$ {command.line}", *command.output))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put what differs into the page")
    parser.add_argument(
        "--only", action="append", default=[], help="only commands with this text, in the folder that --keep left"
    )
    parser.add_argument("--keep", action="store_true", help="keep the folder, .tutorial, and what is in it")
    options = parser.parse_args()
    folder, start = ROOT / ".tutorial", time.perf_counter()
    if not options.only:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    page = PAGE.read_text(encoding="utf-8")
    changed, shift, count, wrong = page, 0, 0, []
    with Shell(folder) as shell:
        for block, commands, complaints in run_page(page, shell, options.only, options.write):
            count += len(commands)
            wrong += complaints
            new = render(commands)
            changed = changed[: block.start + shift] + new + changed[block.end + shift :]
            shift += len(new) - (block.end - block.start)
            for complaint in complaints:
                say(textwrap.indent(complaint, "          "))
            if options.write:
                PAGE.write_text(changed, encoding="utf-8")
    if not (options.keep or options.only):
        shutil.rmtree(folder)
    took = time.perf_counter() - start
    say(f"{took:.0f} s, processor {processor_time():.0f} s")
    broken = [complaint for complaint in wrong if "\nended with " in complaint]
    if broken or (wrong and not options.write):
        sys.exit(
            f"error: {len(wrong)} of {count} commands do not do what docs/tutorial.md says (above). If the page is to"
            " follow: python examples/run_tutorial.py --write"
        )
    say(f"the tutorial: {count} commands, {len(wrong)} outputs renewed")


if __name__ == "__main__":
    main()
