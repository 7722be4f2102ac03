"""What the pages say can be typed, exists; the README's example runs; its map is the tree."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

import tiny
from spearfish import cli
from spearfish.checkpoint import CheckpointWriter

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])


def shell_lines(page: Path) -> list[str]:
    """Everything on a page that is a command of ours: in indented or fenced blocks, and in `code`."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")  # a line that goes on
    blocks = [line.strip() for line in re.findall(r"^(?:    |\$ )(.+)$", text, re.MULTILINE)]
    blocks += [
        line.strip()
        for block in re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    blocks += re.findall(r"`((?:make|spearfish) [^`\n]+)`", text)
    return [line.split("#")[0].strip() for line in blocks if re.match(r"(make|spearfish) [a-z]", line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    verbs = typer.main.get_command(cli.app).commands
    for line in shell_lines(page):
        words = shlex.split(line)
        if words[0] == "make":
            assert words[1] in targets, line
            continue
        assert words[1] in verbs, line
        command = verbs[words[1]]
        if hasattr(command, "commands") and len(words) > 2:
            assert words[2] in command.commands, line
            command = command.commands[words[2]]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        if command.context_settings.get("ignore_unknown_options"):
            continue
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known | {"--help"}, line


def test_the_commands_are_found_at_all() -> None:
    lines = shell_lines(ROOT / "README.md")
    assert "make demo" in lines
    assert any(line.startswith("spearfish compress") for line in lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_first_screen() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = "\n".join(text.splitlines()[:50])
    example = re.search(r"```python\n(.*?)```", first, re.DOTALL)
    assert example is not None
    assert len([line for line in example[1].splitlines() if line.strip()]) <= 12
    assert first.index("bits a weight") < first.index("make demo") < first.index("make test") < example.start()


def test_the_map_is_the_tree() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"## The map\n\n((?:    .*\n)+)", text)
    assert block is not None
    parent = ROOT
    for line in block[1].splitlines():
        line = line.removeprefix("    ")
        if not line.startswith(" "):
            parent = ROOT
        for name in re.findall(r"(?<![\w/])[\w/{},.]+(?:/|\.py)", re.split(r"\s{3,}", line.strip())[0]) or []:
            for path in expand(name):
                assert (parent / path).exists(), f"the map names {path}"
            if name == "src/spearfish/":
                parent = ROOT / name


def expand(name: str) -> list[str]:
    """`tests/{cpu,gpu}` as two names."""
    found = re.search(r"\{(.*?)\}", name)
    return [name.replace(found[0], part) for part in found[1].split(",")] if found else [name]


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a tiny model in the place of the demo's."""
    model = tiny.llama()
    weights = {name: tiny.round_to_nearest(layer.weight) for name, layer in tiny.linears(model).items()}
    with CheckpointWriter(
        tmp_path / "m", config={**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    ) as w:
        for name, weight in weights.items():
            w.add_weight(name, weight)
        for name, tensor in model.state_dict().items():
            if name.removesuffix(".weight") not in weights:
                w.add_tensor(name, tensor)
    tiny.save_tokenizer(tmp_path / "m", chat=True)
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    program, count = re.subn(r'folder = "[^"]+"', f"folder = {str(tmp_path / 'm')!r}", example[1])
    assert count == 1
    exec(compile(program, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.strip()) > 20
