"""The end-to-end benchmark's own arithmetic, its result files and its page. Measuring itself: tests/vllm_plugin."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from spearfish.kernels.choose import all_variants
from spearfish.kernels.jit import ARCHITECTURES

MADE_UP = {"fp16": 8.0, "int4": 4.0, "sparse24-int4": 2.5}


@pytest.fixture(scope="module")
def engine(repository: Path) -> ModuleType:
    sys.path.insert(0, str(repository / "benchmarks"))
    import engine

    return engine


@pytest.fixture(scope="module")
def engine_page(engine: ModuleType) -> ModuleType:
    import engine_page

    return engine_page


def test_our_kernels_are_known_by_their_entries(engine: ModuleType, engine_page: ModuleType) -> None:
    entries = {variant.entry for arch in ARCHITECTURES for variant in all_variants(arch)}
    assert entries == set(engine_page.OUR_KERNELS) and all(map(engine.is_ours, entries))


def head(**changes: Any) -> dict[str, Any]:
    return {
        "id": "20260101T000000",
        "date": "2026-01-01 00:00 UTC",
        "commit": "abc",
        "machine": {"gpu": "Made-up 9000", "id": "x", "driver": "1.2"},
        "versions": {"torch": "9", "vllm": "8"},
        "engine": {"compilation mode": 0},
        "environment": {},
        **changes,
    }


def task(engine: ModuleType, folder: Path, weights: str = "int4", **changes: Any) -> Any:
    prefills = (engine.Prefill(8, 512),)
    return engine.Task("yi-34b", weights, (1, 16), prefills, (1,), (), 0, {}, head(**changes), folder)


def entry(ms: float) -> dict[str, Any]:
    return {
        "run": head()["id"],
        "decode": {"1": {"ms": ms, "windows": [ms]}, "16": {"ms": 1.5 * ms, "windows": [1.5 * ms]}},
        "prefill": {"8x512": {"ms": 100 * ms, "times": [100 * ms]}},
        "queue": {"64x512x128": {"seconds": ms, "tokens_per_second": 8000 / ms}},
        "bytes": {"linears": int(1e9 * ms), "model": int(1.2e9 * ms)},
        "profile": {"1": {"busy_us": 900 * ms, "kernels": 500, "largest": [["gemm", 800 * ms, 240]]}},
    }


def measured(folder: Path) -> Path:
    path = folder / "made_up_9000" / "yi-34b.json"
    path.parent.mkdir(parents=True)
    path.write_text(
        json.dumps({"format": 1, "runs": [head()], "weights": {kind: entry(ms) for kind, ms in MADE_UP.items()}})
    )
    return path


def test_the_page_is_made_of_the_committed_files(repository: Path, engine_page: ModuleType) -> None:
    text = engine_page.render(repository / "benchmarks" / "results" / "engine")
    assert (repository / "docs" / "serving.md").read_text(encoding="utf-8") == text


def test_the_page_shows_what_is_in_the_files(tmp_path: Path, engine_page: ModuleType) -> None:
    measured(tmp_path)
    lines = [line.replace(" ", "") for line in engine_page.render(tmp_path).splitlines()]
    assert "|decode1|8.00|4.00|2.50|1.60×|3.20×|≥1.45×|1.75×|" in lines
    assert "|prefill8×512|800.0|400.0|250.0|1.60×|3.20×|≥1.25×both|1.5×|" in lines
    assert "|64requests,512in,128out:tokens/s|1000|2000|3200|1.60×|3.20×|–|–|" in lines
    assert "|linears,2:4int4|2.50|0.625(≤0.77)|0.312(≤0.21)|" in lines
    assert "2:4int4:theGPUworks2250µsof2500µs,500kernels." in lines
    assert "*notmeasured:int4,plainGPTQkernel;int4,Marlin;2:4fp16;2:4int8" in lines
    assert "Ourkernelstake" not in "".join(lines)
    assert "None yet" in engine_page.render(tmp_path / "nothing")


def test_our_kernels_are_told_from_the_rest(tmp_path: Path, engine_page: ModuleType) -> None:
    path = measured(tmp_path)
    content = json.loads(path.read_text())
    ours = content["weights"]["sparse24-int4"]
    ours["profile"]["1"]["largest"] = [["hopper_decode", 1000, 240], ["attention", 400, 60], ["hopper", 250, 4]]
    ours["kernels"] = {"int4_24 k 128 n 64": {"1": "hopper: decode 8 x 64", "4096": "unpack: rows"}}
    path.write_text(json.dumps(content))
    text = engine_page.render(tmp_path)
    assert "Our kernels take 1250 µs of that, all the rest 1000 µs" in text
    assert "2:4 int4 ran on our kernels hopper at 1 tokens; unpack at 4096 tokens" in text


def test_a_comparison_says_where_the_engines_part(tmp_path: Path, engine_page: ModuleType) -> None:
    answers = [
        {"question": "Why?", "same": 48, "tokens": 48, "lead at the first difference": None},
        {"question": "How?", "same": 7, "tokens": 48, "lead at the first difference": 0.0123},
    ]
    path = tmp_path / "made_up_9000" / "same-tiny-float16.json"
    path.parent.mkdir()
    path.write_text(json.dumps(head(model="Tiny", dtype="float16", mode=0, kernels={"a": 1}, answers=answers)))
    lines = [line.replace(" ", "") for line in engine_page.render(tmp_path).splitlines()]
    assert "|Why?|48of48|–|" in lines
    assert "|How?|7of48|0.0123|" in lines


@pytest.mark.parametrize("without", [None, "fp16"])
def test_the_chart_is_small(tmp_path: Path, engine_page: ModuleType, without: str | None) -> None:
    from PIL import Image

    path = measured(tmp_path)
    content = json.loads(path.read_text())
    content["weights"].pop(without, None)
    path.write_text(json.dumps(content))
    (tmp_path / "docs").mkdir()
    engine_page.write(tmp_path, tmp_path / "docs")
    chart = tmp_path / "docs" / "serving" / "made_up_9000-yi-34b.png"
    assert chart.stat().st_size < 150_000
    assert Image.open(chart).width > 1000


def test_several_gpus_have_a_table_of_their_own(tmp_path: Path, engine: ModuleType, engine_page: ModuleType) -> None:
    path = measured(tmp_path)
    single = path.read_text()
    twice = engine.Task("yi-34b", "int4", (1,), (), (), (), 0, {"tensor_parallel_size": 2}, head(), tmp_path)
    assert twice.path == path.with_name("yi-34b-tp2.json")
    content = engine.read_results(twice.path)
    assert engine.missing(twice, engine.entry_of(twice, content))[0] == [1]
    content |= {"runs": [head()], "ranks": 2}
    content["weights"] = {"int4": entry(3.0), "sparse24-int4": entry(2.0) | {"adders": ["A", "B"]}}
    engine.write_results(twice.path, content)
    assert path.read_text() == single
    first, second = engine_page.render(tmp_path).split("## Yi-34B on 2 × Made-up 9000")
    assert "## Yi-34B on Made-up 9000" in first
    lines = [line.replace(" ", "") for line in second.splitlines()]
    assert "|decode1|3.00|2.00|1.50×|–|" in lines
    assert "*2:4int4:A,BaddupthepartsoftheGPUs" in lines
    assert "|linears,2:4int4|2.00|0.667|–|" in lines
    assert "memory of each GPU" in second
    assert "memory of each GPU" not in first


def test_what_is_known_is_not_measured_again(tmp_path: Path, engine: ModuleType) -> None:
    content = json.loads(measured(tmp_path).read_text())
    one = task(engine, tmp_path)
    assert engine.missing(one, engine.entry_of(one, content)) == ([], [], [], [])
    del content["weights"]["int4"]["decode"]["16"]
    assert engine.missing(one, engine.entry_of(one, content)) == ([16], [], [], [])
    other = task(engine, tmp_path, commit="def")
    assert engine.missing(other, engine.entry_of(other, content)) == ([1, 16], list(one.prefills), [1], [])
    content["runs"][0]["commit"] = "abc+"
    edited = task(engine, tmp_path, commit="abc+")
    assert engine.missing(edited, engine.entry_of(edited, content))[0] == [1, 16]
    new = task(engine, tmp_path, weights="sparse24-fp16")
    assert engine.missing(new, engine.entry_of(new, content))[0] == [1, 16]


def test_runs_that_nothing_came_of_are_dropped(tmp_path: Path, engine: ModuleType) -> None:
    path = measured(tmp_path)
    content = engine.read_results(path)
    content["runs"].append(head(id="unused"))
    engine.write_results(path, content)
    assert [each["id"] for each in engine.read_results(path)["runs"]] == [head()["id"]]


def test_a_profile_counts_overlap_once(engine: ModuleType) -> None:
    """Two steps of: their kernel for 10 us, ours from 8 to 20, a copy from 30 to 31."""
    events = []
    for start in (0.0, 100.0):
        events += [
            ("std::enable_if<(8 > 0), void>::type (anonymous namespace)::norm<A<2>, 8>(A<2>*)", start, start + 10),
            ("hopper_decode", start + 8, start + 20),
            ("Memcpy DtoH", start + 30, start + 31),
        ]
    found = engine.summary(events, 2)
    assert found["busy_us"] == 21
    assert found["kernels"] == 3
    assert found["largest"] == [["hopper_decode", 12.0, 1.0], ["norm", 10.0, 1.0], ["Memcpy DtoH", 1.0, 1.0]]
    assert found["our_start_after_us"] == [-2, -2, -2]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--weights", "int5"], "want some of fp16"),
        (["--prefill", "8by512"], "PROMPTSxTOKENS"),
        (["--queue", "8x512"], "REQUESTSxTOKENSxANSWER"),
        (["--batches", "0"], "at least 1"),
        (["--tensor-parallel", "2", "--profile", "1"], "--profile looks into the process of one GPU"),
        (["--tensor-parallel", "3"], "yi-34b has 56 heads; want one of 1, 2, 4, 7"),
        (["--tensor-parallel", "0"], "want one of 1, 2"),
        (["--only-nccl"], "want --tensor-parallel 2 or more"),
    ],
)
def test_mistakes_are_named(
    engine: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], wanted: str
) -> None:
    with pytest.raises(SystemExit):
        engine.main(["run", *arguments])
    assert wanted in capsys.readouterr().err
