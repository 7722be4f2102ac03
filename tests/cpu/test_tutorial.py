"""The tool behind `make tutorial` finds what it should find, and the generated tables say what the result files say.

The tutorial's own commands take minutes and are run by `make tutorial` in CI, not here.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from spearfish.bench.ceilings import Ceilings
from spearfish.bench.results import Results
from spearfish.scheme import QuantScheme

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return module("examples", "run_tutorial")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return module("docs", "tables")


def module(folder: str, name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / folder))


PAGE = """
# A page
```python
# hello.py
print("hello", 1.25)
```
<!-- not run: needs a GPU -->
```console
$ false
```
```console
$ python hello.py
hello 1.25
$ echo one \\
    two
one two
```
<!-- fails -->
```console
$ echo no room >&2; exit 3
no room
```
<!-- varies -->
```console
$ echo anything
something else
```
"""


def run(tool: ModuleType, page: str, folder: Path) -> tuple[list[str], list[str]]:
    """The complaints, and the commands that were run."""
    complaints, lines = [], []
    with tool.Shell(folder) as shell:
        for _, commands, found in tool.run_page(page, shell):
            complaints += found
            lines += [command.line for command in commands]
    return complaints, lines


def test_a_page_that_is_right(tool: ModuleType, tmp_path: Path) -> None:
    complaints, lines = run(tool, PAGE, tmp_path)
    assert complaints == []
    assert lines == ["python hello.py", "echo one \\\n    two", "echo no room >&2; exit 3", "echo anything"]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("hello 1.25", "hello 1.65"),
        ("hello 1.25", "hallo 1.25"),
        ("hello 1.25\n", ""),
        ("one two\n", "one two\nthree\n"),
        ("$ python hello.py", "$ python nothing.py"),
        ("<!-- fails -->\n", ""),
        ("exit 3", "exit 0"),
        ("no room\n```", "some room\n```"),
        ("something else\n", ""),
        ("<!-- not run: needs a GPU -->\n", ""),
    ],
)
def test_a_page_that_is_wrong(tool: ModuleType, tmp_path: Path, right: str, wrong: str) -> None:
    assert PAGE.count(right) == 1
    assert run(tool, PAGE.replace(right, wrong), tmp_path)[0]


@pytest.mark.parametrize(
    ("said", "printed", "same"),
    [
        ("perplexity 134.7 (+- 13.3 %)", "perplexity  121.9\n(+- 12.1 %)", True),
        ("perplexity 134.7", "perplexity 99.1", False),
        ("lost 2.37% of", "lost 2.41% of", True),
        ("210 layers in 156 s", "210 layers in 31 s", True),
        ("210 layers in 156 s", "211 layers in 156 s", False),
        ("data 8430448fe4fc;", "data 8430448fe4fd;", False),
        ("12 steps of 512", "7 steps of 512", True),
        ("0.04 nats", "0.05 nats", True),
        ("a b", "a", False),
    ],
)
def test_numbers_may_differ_as_processors_do(tool: ModuleType, said: str, printed: str, same: bool) -> None:
    assert tool.differs(said, printed) is not same


def test_what_is_shown_is_what_is_compared(tool: ModuleType) -> None:
    long = "word " * 60
    assert max(map(len, tool.as_shown(long))) <= tool.WIDTH
    assert not tool.differs(long, "\n".join(tool.as_shown(long)))


def test_servers_end_with_the_page(tool: ModuleType, tmp_path: Path) -> None:
    with tool.Shell(tmp_path) as shell:
        assert shell.run("sleep 60 &") == (0, "", "")
        (process,) = shell.started
        assert process.poll() is None
    assert process.poll() is not None


def test_every_step_of_the_tutorial_is_run_or_says_why_not(tool: ModuleType) -> None:
    page = tool.PAGE.read_text(encoding="utf-8")
    console = [block for block in tool.blocks(page) if block.kind == "console"]
    assert len(console) == page.count("```console")
    left_out = [block for block in console if block.mark.startswith("not run")]
    assert len(console) - len(left_out) >= 12
    reasons = {block.mark for block in left_out}
    assert reasons <= {
        "not run: needs a GPU",
        "not run: needs an account",
        "not run: needs nothing, the checks have done it",
    }
    for block in left_out:
        assert not any(command.output for command in block.commands), "what was not run has no output to show"
    for block in console:
        for command in block.commands:
            for name in re.findall(r"python (\w+\.py)", command.line):
                assert any(other.file == name for other in tool.blocks(page)), f"{name} is on no page"


def test_the_kernel_table_is_the_files(tables: ModuleType, tmp_path: Path) -> None:
    assert "Not measured" in tables.kernels(tmp_path)
    results = Results("Some GPU", QuantScheme(4, 128), "fp16")
    ceilings = Ceilings([(1 << 20, 1.0), (1 << 30, 300.0)], {})
    results.runs = [
        {"id": "r", "sources": "x", "ceilings": {"read": ceilings.read, "rates": {}, "notes": {}}, "errors": {}}
    ]
    for k, ours, marlin, cublas in ((4096, 2.0, 3.0, 8.0), (8192, 4.0, 5.0, 12.0)):
        times = {"spearfish": ours, "marlin": marlin, "machete": 9.0, "cublas": cublas, "spearfish-dense": 0.1}
        us = {name: [value, value, value] for name, value in times.items()}
        results.points.append({"k": k, "n": 4096, "m": 16, "run": "r", "us": us, "how": {}})
    results.save(tmp_path)
    text = tables.kernels(tmp_path)
    assert "Some GPU" in text
    assert "1.37 (1.25 to 1.50)" in text  # the geometric mean of 3/2 and 5/4
    assert "3.46 (3.00 to 4.00)" in text


def test_the_engine_table_is_the_files(tables: ModuleType, tmp_path: Path) -> None:
    assert "Not measured" in tables.engine(tmp_path)

    def kind(ms: float) -> dict[str, Any]:
        return {"run": "r", "decode": {"1": {"ms": ms}, "16": {"ms": 2 * ms}}, "prefill": {"8x512": {"ms": 100 * ms}}}

    weights = {"sparse24-int4": kind(4.0), "int4": kind(6.0), "fp16": kind(10.0)}
    weights["sparse24-int4"]["decode"]["16"]["ms"] = 12.0  # slower than its rival, and shown so
    (tmp_path / "gpu").mkdir()
    runs = [{"id": "r", "machine": {"gpu": "Some GPU"}}]
    (tmp_path / "gpu" / "yi-34b.json").write_text(json.dumps({"weights": weights, "runs": runs}))
    text = tables.engine(tmp_path)
    assert "Yi-34B on Some GPU" in text
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[4:]]
    assert cells == [["decode, 1", "1.50", "2.50"], ["decode, 16", "1.00", "1.67"], ["prefill, 8x512", "1.50", "2.50"]]


def test_the_accuracy_table_is_the_files(tables: ModuleType, tmp_path: Path) -> None:
    assert "Not measured" in tables.accuracy(tmp_path)

    def result(name: str, perplexity: float, text: str = "a", **recipe: Any) -> None:
        quality = {"perplexity": perplexity, "windows": 8, "length": 512, "sha256": text}
        facts = {
            "model": "M",
            "bytes": 98_303_616,
            "quality": quality,
            "dense": quality | {"perplexity": 15.47},
            "recipe": {"bits": 4, "method": "joint", **recipe},
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(facts))

    result("a", 81.87)
    result("b", 83.0, num_samples=4)  # other settings of the same way: the best is shown
    result("c", 20.0, method="rtn", seed=0)  # seeds are averaged
    result("f", 24.2, method="rtn", seed=1)
    result("d", 43.5, budget=0.25, recover=420.0)
    result("e", 20.0, text="another", method="rtn")
    body = tables.accuracy(tmp_path).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in body]
    assert cells == [
        ["M", "dense, 4-bit, `rtn`", "98", "22.0", "15.5"],
        ["M", "2:4, 4-bit, `joint`, `--budget 0.25`, `--recover`", "98", "43.5", "15.5"],
        ["M", "2:4, 4-bit, `joint`", "98", "81.9", "15.5"],
        ["M", "dense, 4-bit, `rtn`", "98", "20.0", "15.5"],
    ]


def test_pictures_are_small_and_drawn_from_the_code() -> None:
    figures = module("docs", "figures").FIGURES
    for name, draw in figures.items():
        file = ROOT / "docs" / "figures" / name
        assert file.read_text(encoding="utf-8") == draw()
        assert file.stat().st_size < 150_000
        assert f"figures/{name}" in (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
