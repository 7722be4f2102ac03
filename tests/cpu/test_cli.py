"""The command line as a stranger meets it: help, exit codes, one red line for a mistake, never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from spearfish import __version__, cli
from spearfish.cli import diagnosis
from spearfish.cli.run import print_report
from spearfish.errors import FormatError, UnsupportedError


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command line."""
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def commands() -> list[tuple[str, ...]]:
    """Every command line that has a help of its own."""
    found, stack = [], [((), typer.main.get_command(cli.app))]
    while stack:
        words, command = stack.pop()
        found.append(words)
        stack += [((*words, name), below) for name, below in getattr(command, "commands", {}).items()]
    return sorted(found)


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words) or "spearfish")
def test_every_command_explains_itself(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    short, long = run(capsys, *words, "-h"), run(capsys, *words, "--help")
    assert short == long
    code, out, _ = long
    assert code == 0
    assert f"Usage: spearfish {' '.join(words)}".rstrip() in out
    assert len(out.split()) > 20


def test_help_names_every_verb_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help")
    first_words = [line.strip("│ ").split(" ")[0] for line in out.splitlines() if line.startswith("│")]
    for words in commands():
        if len(words) == 1:
            assert first_words.count(words[0]) == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"spearfish {__version__}\n", "")


def test_no_words_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert code == 2
    assert "Usage: spearfish" in out + err


@pytest.mark.parametrize("words", [("nonsense",), ("doctor", "--nonsense"), ("generate",)])
def test_wrong_command_line_is_code_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert "Usage: spearfish" in err


def with_command(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Give the command line one verb, `fail`, that raises."""
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.callback()
    def root() -> None: ...

    @app.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (FormatError("layer 3: [wrong] shape"), "error: layer 3: [wrong] shape\n"),
        (UnsupportedError("nothing runs this:\n  A: no\n  B: no"), "error: nothing runs this:\n  A: no\n  B: no\n"),
        (FileNotFoundError(2, "No such file or directory", "a/b"), "error: No such file or directory: a/b\n"),
        (OSError("disk on fire"), "error: disk on fire\n"),
    ],
)
def test_errors_are_one_message(
    error: Exception, wanted: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_command(monkeypatch, error)
    assert run(capsys, "fail") == (1, "", wanted)


def test_a_long_message_is_not_wrapped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with_command(monkeypatch, FormatError("word " * 100))
    assert run(capsys, "fail")[2].count("\n") == 1


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with_command(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["fail"])


def test_debug_keeps_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEARFISH_LOG", "debug")
    with_command(monkeypatch, FormatError("bad"))
    with pytest.raises(FormatError):
        cli.main(["fail"])


def test_unknown_log_level(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEARFISH_LOG", "loud")
    code, _, err = run(capsys, "doctor")
    assert code == 1
    assert err == "error: SPEARFISH_LOG is 'loud', wanted one of debug, info, warning, error\n"


def test_the_installed_command_ends_with_the_code(tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("spearfish"), "doctor", tmp_path / "nowhere"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("words", [("compress", "A", "B"), ("evaluate", "A"), ("generate", "A", "hi")])
@pytest.mark.parametrize(("device", "wanted"), [("cuda:99", "torch finds"), ("warp", "no such device")])
def test_a_device_that_is_not_there(
    words: tuple[str, ...], device: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *words, "--device", device)
    assert code == 1
    assert err.startswith(f"error: --device {device}: {wanted}")


def test_doctor_tells_versions_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    code, out, _ = run(capsys, "doctor", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["broken"] == []
    assert report["Versions"]["torch"] == torch.__version__
    assert report["Versions"]["spearfish"].startswith(__version__)
    if not torch.cuda.is_available():
        assert "no GPU that torch can use" in report["Paths"]["2:4 and INT4/INT8 kernels"]
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    for title in ("Versions", "GPU", "Paths", "Hosts", "Files"):
        assert title in out


def test_doctor_ends_with_1_when_something_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = diagnosis.installed

    def installed(distribution: str) -> str | None:
        return "5.2.0" if distribution == "transformers" else real(distribution)

    monkeypatch.setattr(diagnosis, "installed", installed)
    monkeypatch.setenv("SPEARFISH_KERNEL", "warp")
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "broken: transformers 5.2.0 is too old: pip install 'transformers>=5.16'" in out
    assert "SPEARFISH_KERNEL is 'warp'" in out
    code, out, _ = run(capsys, "doctor", "--json", str(tmp_path))
    assert code == 1
    assert any(str(tmp_path) in fault for fault in json.loads(out)["broken"])


def test_doctor_prints_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    """They name extras; the printer takes them for markup unless it is told."""
    print_report({"Kernels": {"advice": "pip install 'spearfish[cu13]'"}, "broken": []})
    assert "'spearfish[cu13]'" in capsys.readouterr().out


def test_doctor_knows_a_dense_folder_that_is_2_of_4(tmp_path: Path) -> None:
    import tiny
    from spearfish import sparse24

    model = tiny.llama()
    for layer in tiny.linears(model).values():
        layer.weight.data *= sparse24.magnitude_mask(layer.weight.abs())
    model.save_pretrained(tmp_path)
    rows = diagnosis.checkpoint(tmp_path, broken := [])
    assert not broken
    assert rows["layers"] == "14 x 16-bit 2:4"
    assert f"spearfish convert {tmp_path} OUT --to marlin_24" in rows["advice"]


@pytest.mark.parametrize(
    ("version", "floor", "old"), [("2.9.1", "2.11", True), ("2.11.0+cu130", "2.11", False), ("3.0", "2.11", False)]
)
def test_versions_compare_as_numbers(version: str, floor: str, old: bool) -> None:
    assert diagnosis._older(version, floor) is old


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, built_for: str | None = "13.0") -> None:
    """A machine with a torch built for CUDA, and a GPU of a capability or none."""
    import torch

    about = type("About", (), {"name": "Some GPU", "total_memory": 80 << 30, "multi_processor_count": 132})()
    about.major, about.minor = capability or (0, 0)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(capability is not None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(diagnosis, "compiler", lambda broken: "not tried")
    monkeypatch.setattr(diagnosis, "_driver", lambda: False)
    monkeypatch.delenv("SPEARFISH_KERNEL", raising=False)


def test_doctor_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, None, built_for=None)
    report = diagnosis.examine()
    assert report["broken"] == []
    assert report["GPU"] == {"none": "this torch is built without CUDA"}
    assert "would not run: no GPU that torch can use" in report["Paths"]["2:4 and INT4/INT8 kernels"]
    assert "compress" in report["In short"]["works here"]
    assert "as small on disk" in report["In short"]["without the kernels"]
    assert report["In short"]["for the kernels"].startswith("an NVIDIA GPU of capability 8.0")

    monkeypatch.setattr(diagnosis, "_driver", lambda: True)
    report = diagnosis.examine()
    assert "although an NVIDIA driver is here" in report["GPU"]["none"]
    assert report["In short"]["for the kernels"].startswith("a CUDA build of torch")

    gpu(monkeypatch, None)
    assert "built for CUDA 13.0, but finds no usable GPU or driver" in diagnosis.examine()["GPU"]["none"]


def test_doctor_compiles_for_a_gpu_that_is_in_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from spearfish.kernels import jit

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(jit, "architecture", lambda device: "sm_121")
    broken: list[str] = []
    assert diagnosis.compiler(broken).startswith("works: one kernel for sm_121") and not broken


def test_doctor_without_the_cuda_packages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from spearfish.kernels import jit

    gpu(monkeypatch, (9, 0))
    report = diagnosis.examine()
    assert report["Paths"]["2:4 and INT4/INT8 kernels"] == "would run"
    assert report["In short"] == {
        "works here": "convert, inspect, verify, compress, evaluate, generate, all with the GPU kernels"
    }
    monkeypatch.setattr(jit, "find_spec", lambda name: None)
    _, out, _ = run(capsys, "doctor")
    assert "pip install 'spearfish[cu13]'" in " ".join(out.split())
    report = diagnosis.examine()
    assert report["broken"] == []
    assert "would not run: cuda-core is not installed" in report["Paths"]["2:4 and INT4/INT8 kernels"]
    assert "pip install 'spearfish[cu13]'" in report["In short"]["for the kernels"]


@pytest.mark.parametrize(
    ("kernel", "capability", "wanted"),
    [("auto", (7, 5), "capability 8.0 or newer"), ("dense", (9, 0), "unset SPEARFISH_KERNEL")],
)
def test_doctor_where_the_kernels_do_not_run_though_all_is_there(
    kernel: str, capability: tuple[int, int], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, capability)
    monkeypatch.setenv("SPEARFISH_KERNEL", kernel)
    report = diagnosis.examine()
    assert report["Paths"]["2:4 and INT4/INT8 kernels"].startswith("would not run: ")
    assert wanted in report["In short"]["for the kernels"]


def test_doctor_with_a_torch_that_is_too_old(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = diagnosis.installed
    monkeypatch.setattr(diagnosis, "installed", lambda name: "2.9.1+cu128" if name == "torch" else real(name))
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "torch           2.9.1+cu128, too old: 2.11 is wanted" in out
    assert "broken: torch 2.9.1+cu128 is too old: pip install 'torch>=2.11'" in out
    assert "mend what is broken" in out


def test_doctor_with_the_plugin_disabled(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name, value = "spearfish", "spearfish.integrations.vllm:register"

        def load(self) -> None: ...

    monkeypatch.setattr(diagnosis, "find_spec", lambda name: object())
    monkeypatch.setattr(diagnosis.metadata, "entry_points", lambda group: [Entry()])
    for allowed, switched_off in (("other", True), ("", True), ("other,spearfish", False)):
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
        code, out, _ = run(capsys, "doctor")
        assert code == switched_off
        assert ("the plugin is switched off by VLLM_PLUGINS" in out) == switched_off
        assert (f"broken: VLLM_PLUGINS={allowed} keeps vLLM from loading the plugin" in out) == switched_off


def test_doctor_sees_a_broken_vllm_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name, value = "spearfish", "spearfish.integrations.vllm:register"

        def load(self) -> Any:
            raise ImportError("no such thing")

    monkeypatch.setattr(diagnosis, "find_spec", lambda name: object())
    monkeypatch.setattr(diagnosis.metadata, "entry_points", lambda group: [Entry()])
    broken: list[str] = []
    assert diagnosis._vllm(broken) == "the plugin cannot be imported"
    assert "no such thing" in broken[0]
    monkeypatch.setattr(Entry, "load", lambda self: None)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    broken.clear()
    assert diagnosis._vllm(broken) == "the plugin is switched off by VLLM_PLUGINS"
    assert "add spearfish to it" in broken[0]
