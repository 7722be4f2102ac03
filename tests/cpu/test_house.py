"""The house itself: which part may import which, what `import spearfish` costs, what the repository may weigh."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import spearfish

PACKAGE = Path(spearfish.__file__).parent

# A part may import itself and the parts named here; "a b" also stands for all that a and b may import.
ARROWS = {
    "errors": "",
    "cache": "",
    "scheme": "errors",
    "sparse24": "scheme",
    "layouts": "scheme",
    "reference": "sparse24 layouts",
    "formats": "reference",
    "quantization": "formats",
    "checkpoint": "quantization",
    "models": "checkpoint cache",
    "text": "errors",
    "compress": "models text",
    "evaluate": "models text",
    "zeroshot": "errors",
    "kernels": "reference cache",
    "nn": "kernels",
    "integrations": "models nn",
    "bench": "compress evaluate integrations",
    "cli": "bench zeroshot",
}

# A heavy package, and the only files that may import it. Some of these are themselves about the package and may do so
# at their top; the others do it inside a function, so that importing them stays light.
GATES = {
    "transformers": {"models.py": "inside", "integrations/transformers.py": "top"},
    "vllm": {"integrations/vllm.py": "top"},
    "cuda": {"kernels/jit.py": "inside"},
    "matplotlib": {"bench/plot.py": "inside"},
    "pickle": {},
}


def allowed(part: str) -> set[str]:
    """`part` and every part it may import."""
    return {part}.union(*(allowed(below) for below in ARROWS[part].split()))


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(dotted name, line, whether it runs when the file is imported) of every import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late: set[ast.AST] = set()
    for node in ast.walk(tree):
        type_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if type_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            late.update(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, node not in late
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "relative import", node.lineno, True
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno, node not in late


def part_of(dotted: str) -> str | None:
    """The part of spearfish that an imported name belongs to; "" for a name of the package's own __init__."""
    head, _, rest = dotted.partition(".")
    if head != "spearfish":
        return None
    part = rest.partition(".")[0]
    return part if part in ARROWS else ""


def test_every_part_has_its_place() -> None:
    parts = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir() if not path.name.startswith("_")}
    assert parts - {"py"} <= set(ARROWS), "a new part of the package needs a line in ARROWS"


def test_arrows_of_imports() -> None:
    wrong = []
    for path in sources():
        own = name_of(path).partition("/")[0].removesuffix(".py")
        if own == "__init__":
            continue
        for dotted, line, _ in imports(path):
            part = part_of(dotted)
            if dotted == "relative import" or part == "" and dotted != "spearfish.__version__":
                wrong.append(f"{name_of(path)}:{line}: import the module that defines {dotted}, not the package root")
            elif part and part not in allowed(own):
                wrong.append(f"{name_of(path)}:{line}: {own} may not import {part}")
    assert not wrong, "\n".join(wrong)


def test_arrows_would_be_seen(tmp_path: Path) -> None:
    sample = tmp_path / "sample.py"
    sample.write_text("from spearfish import kernels\ndef f():\n    import spearfish.formats.gptq\n")
    assert [(part_of(dotted), top) for dotted, _, top in imports(sample)] == [("kernels", True), ("formats", False)]
    assert "kernels" not in allowed("formats") and "formats" not in allowed("kernels")
    assert "errors" in allowed("cli")


def test_heavy_packages_come_in_through_their_gate() -> None:
    wrong = []
    for path in sources():
        for dotted, line, at_top in imports(path):
            gates = GATES.get(dotted.partition(".")[0])
            if gates is None:
                continue
            where = gates.get(name_of(path))
            if where is None:
                wrong.append(f"{name_of(path)}:{line}: {dotted} may be imported only by {', '.join(gates) or 'nobody'}")
            elif where == "inside" and at_top:
                wrong.append(f"{name_of(path)}:{line}: import {dotted} inside the function that needs it")
    assert not wrong, "\n".join(wrong)


def test_import_is_light() -> None:
    """`import spearfish` adds only its own modules to torch's, in well under a second."""
    program = (
        "import sys, time, torch\n"
        "before, start = set(sys.modules), time.perf_counter()\n"
        "import spearfish\n"
        "seconds = time.perf_counter() - start\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(seconds, *sorted(new - set(sys.stdlib_module_names)))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert out[1:] == ["spearfish"]
    assert float(out[0]) < 0.5


def test_public_names() -> None:
    assert list(spearfish.__all__) == sorted(spearfish.__all__)
    assert len(spearfish.__all__) <= 14
    missing = [name for name in spearfish.__all__ if getattr(spearfish, name, None) is None]
    assert not missing
    assert set(spearfish.__all__) <= set(dir(spearfish))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = spearfish.no_such_name


def test_environment_variables_are_three() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources())
    known = {"SPEARFISH_CACHE_DIR", "SPEARFISH_LOG", "SPEARFISH_KERNEL"}
    assert set(re.findall(r"\bSPEARFISH_[A-Z_]+\b", text)) <= known


@pytest.fixture(scope="module")
def tracked(repository: Path) -> list[Path]:
    """Every file that git tracks and that is still there."""
    out = subprocess.run(["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True, check=True).stdout
    return [path for name in out.split("\0") if name and (path := repository / name).is_file()]


def test_tree_travels_light(tracked: list[Path], repository: Path) -> None:
    size = {path.relative_to(repository).as_posix(): path.stat().st_size for path in tracked}
    assert sum(size.values()) <= 4 << 20, f"largest: {sorted(size.items(), key=lambda item: -item[1])[:5]}"
    assert sum(bytes_ for name, bytes_ in size.items() if name.startswith("tests/golden/")) <= 2 << 20
    assert not [name for name, bytes_ in size.items() if name.endswith(".png") and bytes_ > 200 << 10]


def test_no_path_of_somebodys_machine(tracked: list[Path], repository: Path) -> None:
    pattern = re.compile(rb"/(?:root|work|home/[a-z]+)/[a-z.]")
    found = {}
    for path in tracked:
        if path.suffix not in {".png", ".safetensors", ".gz", ".xz"}:
            hits = pattern.findall(path.read_bytes())
            if hits:
                found[path.relative_to(repository).as_posix()] = hits[0]
    assert not found


def test_every_dependency_has_its_reason(repository: Path) -> None:
    text = (repository / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    groups = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    lines = text.splitlines()
    bare = [
        f"{group}: {requirement}"
        for group, requirements in groups.items()
        for requirement in requirements
        if not any(f'"{requirement}"' in line and re.search(r"#\s*\w", line) for line in lines)
    ]
    assert not bare
    assert {"transformers", "vllm", "cu12", "cu13", "bench", "dev"} <= set(groups)


def test_constraints_pin_what_the_project_names(repository: Path) -> None:
    """Every package that pyproject.toml asks for is pinned, except those that follow the machine's torch build."""
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {
        re.split(r"[\[<>=]", requirement)[0]
        for requirements in [project["dependencies"], *project["optional-dependencies"].values()]
        for requirement in requirements
    }
    lines = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower() for line in lines if "==" in line and not line.startswith("#")}
    unpinned = {name for name in asked if name.lower() not in pinned and not name.startswith("nvidia-")}
    assert unpinned <= {"vllm", "setuptools"}
    assert "torch==2.13.0" in lines


def test_version_is_in_the_changelog(repository: Path) -> None:
    changelog = (repository / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {spearfish.__version__}" in changelog
