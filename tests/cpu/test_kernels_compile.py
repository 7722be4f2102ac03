"""The compiler's side, without a GPU: every variant for every architecture, the cache, failures, the command."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spearfish.cli import kernels as cli
from spearfish.errors import CompileError, UnsupportedError
from spearfish.kernels import choose, jit
from spearfish.kernels.jit import ARCHITECTURES, Resources, Variant, compile_variant
from spearfish.kernels.unpack import FAMILY as UNPACK

SMALL = UNPACK.variants("sm_90")[0]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPEARFISH_CACHE_DIR", str(tmp_path))
    return tmp_path


def entries(cache: Path) -> list[Path]:
    return [path for path in (cache / "kernels").rglob("*") if path.is_file() and path.stat().st_size > 1000]


# One test per source, so that two workers can share them out.
EVERYTHING = [
    (arch, source)
    for arch in ARCHITECTURES
    for source in sorted({variant.source for variant in choose.all_variants(arch)})
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_cache_is_filled_in_a_minute(arch: str) -> None:
    gemms = [variant for variant in choose.all_variants(arch) if variant.entry.startswith("portable")]
    assert 20 <= len(gemms) <= 50


@pytest.mark.parametrize(("arch", "source"), EVERYTHING)
def test_every_variant_compiles_clean(
    arch: str, source: str, kernels_of_this_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No spills, no local memory, no warning."""
    monkeypatch.setenv("SPEARFISH_CACHE_DIR", str(kernels_of_this_run))
    complaints = {}
    for variant in choose.all_variants(arch):
        if variant.source != source:
            continue
        binary = compile_variant(variant)
        assert binary.cubin[:4] == b"\x7fELF"
        assert 16 <= binary.resources.registers <= 255
        if binary.resources.complaint:
            complaints[str(variant)] = binary.resources.complaint
    assert not complaints


def test_a_second_compile_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_variant(SMALL)
    assert first.seconds > 0

    def refuse(variant: Variant) -> None:
        raise AssertionError("the compiler was called")

    monkeypatch.setattr(jit, "_run_compiler", refuse)
    second = compile_variant(SMALL)
    assert (second.seconds, second.cubin, second.resources) == (0, first.cubin, first.resources)
    with pytest.raises(AssertionError, match="was called"):
        compile_variant(UNPACK.variants("sm_90")[1])


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_entry_is_built_again(own_cache: Path, damage: str) -> None:
    first = compile_variant(SMALL)
    (entry,) = entries(own_cache)
    content = bytearray(entry.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    entry.write_bytes({"cut": content[:-7], "flipped": content, "empty": b""}[damage])
    again = compile_variant(SMALL)
    assert again.seconds > 0
    assert again.resources == first.resources
    assert compile_variant(SMALL).seconds == 0


def _compile_in_a_process(cache: str, start: multiprocessing.synchronize.Event, results: multiprocessing.Queue) -> None:
    os.environ["SPEARFISH_CACHE_DIR"] = cache
    start.wait()
    results.put(len(compile_variant(SMALL).cubin))


def test_two_processes_may_compile_the_same_kernel_at_once(own_cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    workers = [context.Process(target=_compile_in_a_process, args=(str(own_cache), start, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    start.set()
    sizes = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert sizes[0] == sizes[1] == len(compile_variant(SMALL).cubin)
    assert len(entries(own_cache)) == 1


def test_what_does_not_compile_is_kept_with_the_compilers_words(own_cache: Path) -> None:
    broken = Variant(SMALL.source, SMALL.entry, "sm_90", (("BITS", "no_such_number"), ("SPARSE", 1), ("BF16", 0)))
    with pytest.raises(CompileError, match="did not compile") as caught:
        compile_variant(broken)
    folder = Path(caught.value.folder)
    assert folder.is_relative_to(own_cache)
    assert "no_such_number" in (folder / "log.txt").read_text()
    assert "-DBITS=no_such_number" in (folder / "command.txt").read_text()
    assert 'extern "C"' in (folder / SMALL.source).read_text()
    assert not entries(own_cache)


def test_a_cache_that_cannot_be_made_only_costs_time(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = own_cache / "file"
    blocked.write_text("")
    monkeypatch.setenv("SPEARFISH_CACHE_DIR", str(blocked))
    assert compile_variant(SMALL).seconds > 0
    assert compile_variant(SMALL).seconds > 0


def test_the_key_is_the_content(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {jit._digest(variant) for variant in choose.all_variants("sm_90")}
    assert len(keys) == len(choose.all_variants("sm_90"))
    before = jit._digest(SMALL)
    text = jit.source_text(SMALL.source)
    assert text.count("load_matrices(") >= 1  # common.cuh is part of it
    assert '#include "' not in text
    monkeypatch.setattr(jit, "source_text", lambda name: text + "// a comment")
    assert jit._digest(SMALL) != before


def test_spills_stacks_and_warnings_are_complaints() -> None:
    clean = Resources(32, 0, 0, 0, 0)
    assert clean.complaint is None
    assert "8 bytes" in (Resources(32, 0, 0, 8, 8).complaint or "")
    assert "16 bytes" in (Resources(32, 0, 16, 0, 0).complaint or "")
    log = """ptxas info    : 24 bytes gmem
x.cu(3): warning #177-D: variable "a" was declared but never referenced
ptxas info    : Compiling entry function 'k' for 'sm_90'
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 48 bytes smem
"""
    facts = jit._parse_log(log, SMALL)
    assert (facts.registers, facts.static_shared, facts.stack) == (255, 48, 16)
    assert (facts.spill_stores, facts.spill_loads, len(facts.warnings)) == (12, 20, 1)
    with pytest.raises(CompileError, match="registers"):
        jit._parse_log("nothing of the kind", SMALL)


def test_the_command_fills_a_cache_and_tells(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "all_variants", lambda arch: [SMALL])
    run = CliRunner().invoke(cli.app, ["build", "--arch", "sm_90", "--check"])
    assert run.exit_code == 0, run.output
    assert "1 kernels: 1 compiled, 0 already there, 0 with complaints" in run.output
    run = CliRunner().invoke(cli.app, ["build", "--arch", "sm_90"])
    assert "0 compiled, 1 already there" in run.output
    shown = CliRunner().invoke(cli.app, ["list", "--arch", "sm_90"])
    assert "unpack_tiles" in shown.output
    assert len(entries(own_cache)) == 1
    spilling = compile_variant(SMALL)
    bad = jit.Binary(SMALL, spilling.cubin, Resources(255, 0, 8, 8, 8))
    monkeypatch.setattr(jit, "compile_variant", lambda variant: bad)
    failed = CliRunner().invoke(cli.app, ["build", "--arch", "sm_90", "--check"])
    assert isinstance(failed.exception, CompileError)
    assert "8 bytes of stack" in failed.output


def test_the_command_names_what_there_is() -> None:
    missing = CliRunner().invoke(cli.app, ["build", "--arch", "sm_75"])
    assert isinstance(missing.exception, UnsupportedError)
    assert "sm_80" in str(missing.exception)
