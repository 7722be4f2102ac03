"""What the benchmark shows without a GPU: explanations, compile times, reports, plots; and its command line."""

from __future__ import annotations

import re
import struct
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_bench as made_up
import torch

import tiny
from spearfish import cli, sparse24
from spearfish.bench import costs, page, plot
from spearfish.bench.ceilings import SOURCE, Ceilings, CudaProbes
from spearfish.bench.device import CudaDevice
from spearfish.bench.explain import chip_named, explain, problem_for
from spearfish.bench.implementations import problem_of, ranked
from spearfish.bench.problems import Point, Weights, parse_scheme, parse_seconds
from spearfish.bench.report import layers_table, rows
from spearfish.bench.results import load_all, run_head
from spearfish.bench.runner import Settings
from spearfish.cli.bench import _layers
from spearfish.errors import FormatError, UnsupportedError
from spearfish.kernels import jit
from spearfish.kernels.choose import choose
from spearfish.kernels.prepare import to_stream


def spearfish(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(("bench", *words))
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


# ---------------------------------------------------------------------------------------------------------- ceilings

ENTRIES = (
    *(("read_plain", arch) for arch in jit.ARCHITECTURES),
    *(("rate_mma_sp", arch) for arch in jit.ARCHITECTURES),
    *(("read_bulk", arch) for arch in ("sm_90", "sm_100")),
    ("rate_wgmma_sp", "sm_90a"),
)


@pytest.mark.parametrize(("entry", "arch"), ENTRIES, ids=lambda word: word)
def test_the_kernels_of_the_ceilings_compile_without_a_complaint(entry: str, arch: str) -> None:
    binary = jit.compile_variant(jit.Variant(SOURCE, entry, arch), use_cache=False)
    assert binary.resources.complaint is None
    # Two blocks of mma.sp on a multiprocessor, one of wgmma.sp: what the launches are made for.
    assert binary.resources.registers <= 128


# ----------------------------------------------------------------------------------------------------------- explain


@pytest.mark.parametrize(
    "word",
    ["int4-g128", "int4-g64", "int4-g32", "int4-g256", "int8-channel", "int4-channel-asym", "f16", "dense-int4-g96"],
)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_problem_without_its_weight_is_that_of_the_weight(word: str, dtype: str) -> None:
    point = Point(256, 64, 9, dtype, parse_scheme(word))
    weights = Weights(
        256, 64, point.scheme, {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype], torch.device("cpu")
    )
    assert problem_for(point) == problem_of(to_stream(weights.own, "cpu", weights.dtype), 9)


def test_groups_that_no_kernel_takes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="groups of 48"):
        problem_for(Point(96, 64, 1, "fp16", parse_scheme("int4-g48")))
    assert problem_for(Point(48, 64, 1, "fp16", parse_scheme("int4-g48"))).granules == 0  # one group: per column


@pytest.mark.parametrize("m", [1, 16, 64, 300, 4096])
def test_the_first_of_the_ranking_is_what_the_chooser_takes(m: int) -> None:
    point, chip = Point(4096, 4096, m, "fp16", parse_scheme("int4-g128")), chip_named("sm_90")
    ways = ranked(problem_for(point), chip)
    able = [way for way in ways if way.why_not is None]
    assert [way.microseconds for way in able] == sorted(way.microseconds for way in able)
    first = able[0]
    assert (first.family, first.config) == choose(problem_for(point), chip)
    lines = explain(point, chip).splitlines()
    (chosen,) = [line for line in lines if line.endswith(" chosen |")]
    assert f"| {first.family.name}: {first.config} " in chosen


def test_a_forced_kernel_is_what_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEARFISH_KERNEL", "unpack")
    lines = explain(Point(4096, 4096, 128, "fp16", parse_scheme("int4-g128")), chip_named("sm_80")).splitlines()
    assert lines[0].endswith("SPEARFISH_KERNEL=unpack")
    (chosen,) = [line for line in lines if line.endswith(" chosen |")]
    assert chosen.startswith("| unpack: ")


def test_explain_and_compile_time_need_no_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPEARFISH_CACHE_DIR", str(tmp_path))
    code, out, _ = spearfish(capsys, "4096x4096", "--m", "1,4096", "--explain", "--arch", "sm_80")
    assert code == 0
    assert out.count("chosen") == 2
    assert "cannot run (1): unpack: unpacking for 1 tokens cannot win" in out
    code, out, _ = spearfish(capsys, "4096x4096", "--m", "1", "--compile-time", "--arch", "sm_80")
    assert code == 0
    first = next(line for line in out.splitlines() if line.startswith("| portable["))
    assert "BITS=4" in first
    cold, cached = (float(cell) for cell in first.split("|")[2:4])
    assert cold * 1e3 > cached > 0


# ------------------------------------------------------------------------------------------------------------- costs


def test_an_eager_call_and_a_node_cost_what_they_cost() -> None:
    device = made_up.FakeDevice()
    assert costs.node_microseconds(lambda: device.spend(0.7), device) == pytest.approx(0.7)
    calls = []
    assert 0 < costs.call_microseconds(lambda: calls.append(1), lambda: None, calls=10, turns=3) < 1e4
    assert len(calls) == 31


def test_a_chain_is_all_layers_once() -> None:
    device = made_up.FakeDevice()
    shapes = ((64, 96), (64, 64))
    ones = [
        made_up.FakeOne("spearfish", device, 10.0),
        made_up.FakeOne("marlin", device, lambda m: 15.0 * m),
        made_up.FakeOne("machete", device, 1.0, reason="no library"),
        made_up.FakeOne("humming", device, 1.0, spoil=lambda y: y @ y),
    ]
    scheme = parse_scheme("int4-g32")
    found = costs.chains(ones, (1, 2), scheme, "fp16", device, layers=3, shapes=shapes)  # type: ignore[arg-type]
    assert {(one.name, one.m): one.us for one in found if one.us} == {
        ("spearfish", 1): 60.0,
        ("spearfish", 2): 60.0,
        ("marlin", 1): 90.0,
        ("marlin", 2): 180.0,
    }
    assert ones[0].prepared == 6
    size = 3 * sum(Point(k, n, 1, "fp16", scheme).bytes for k, n in shapes)
    text = costs.chain_table(found, scheme, "fp16", Ceilings([(size, 30.0)]), layers=3, shapes=shapes)
    line = next(line for line in text.splitlines() if line.startswith("| spearfish"))
    assert "60.0 |" in line
    assert "50 %" in line
    assert "no library" in text
    assert "failed" not in text
    assert "RuntimeError" in text


def test_the_cost_table_goes_on_after_a_failure() -> None:
    device = made_up.FakeDevice(every_call=2.0)
    ones = [
        made_up.FakeOne("absent", device, 1.0, reason="is not installed"),
        made_up.FakeOne("broken", device, 1.0, spoil=lambda y: y.view(7)),
    ]
    found = costs.eager(ones, parse_scheme("int4-g128"), "fp16", device)  # type: ignore[arg-type]
    assert found[0] == costs.Eager("absent", None, None, "is not installed")
    assert found[1].reason.startswith("RuntimeError: shape '[7]' is invalid")
    text = costs.eager_table([*found, costs.Eager("spearfish", 12.34, 0.567)])
    assert "12.3 |" in text
    assert "0.57 |" in text


def test_costs_are_kept_and_shown(tmp_path: Path) -> None:
    device, scheme = made_up.FakeDevice(), parse_scheme("int4-g128")
    head = run_head(device, Settings(), Ceilings([(1_000_000, 1.0)]), "abc")
    chain = [
        costs.Chain("spearfish", 1, 700.0),
        costs.Chain("marlin", 1, 1050.0),
        costs.Chain("machete", 1, None, "no"),
    ]
    # On a CPU the weight is held dense: 32 MiB.
    prepare = costs.prepare_cost(scheme, "fp16", device)
    assert prepare.nbytes == 2 * 4096 * 4096
    assert prepare.seconds > 0
    found = costs.Costs(device.name, scheme, "fp16", head, prepare, [costs.Eager("spearfish", 12.34, 0.5)], chain)
    path = found.save(tmp_path)
    assert path == tmp_path / "made_up_gpu_9" / "costs-int4-g128-fp16.json"
    assert costs.load_costs(path) == found
    assert load_all(tmp_path) == []
    text = page.render(tmp_path)
    assert "None yet" not in text
    assert "33.55 MB held afterwards." in text
    assert re.search(r"\| marlin +\| 1 \| +1050 \| +1\.50 \|", text)
    path.write_text("{}")
    with pytest.raises(FormatError, match=r"costs-int4-g128-fp16\.json"):
        costs.load_costs(path)


# ------------------------------------------------------------------------------------------------- reports and plots


def test_a_model_is_the_sum_of_its_layers(tmp_path: Path) -> None:
    results = made_up.measured(tmp_path)
    counts = {(256, 128, made_up.G128): 3, (128, 64, made_up.G128): 2}
    line = layers_table(rows(results), counts).splitlines()[2].replace(" ", "")
    assert line.startswith("|1|0.050|0.125|2.50|")
    del results.points[0]["us"]["spearfish"]
    assert layers_table(rows(results), counts).splitlines()[2].replace(" ", "").startswith("|1|–|0.125|–|")


def test_reports_and_plots_come_from_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    results = made_up.measured(tmp_path, tokens=(1, 16, 64))
    code, out, _ = spearfish(capsys, "--report", "--results", str(tmp_path), "--plots", str(tmp_path / "plots"))
    assert code == 0
    assert "# int4-g128, fp16, Made Up GPU 9" in out
    assert "## Where we lose" in out
    paths = sorted((tmp_path / "plots" / "made_up_gpu_9").iterdir())
    assert [path.name for path in paths] == [f"int4-g128-fp16-{name}.png" for name in ("layers", "roofline", "speedup")]
    for path in paths:
        head = path.read_bytes()[:24]
        width, height = struct.unpack(">II", head[16:24])
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert 600 <= width <= 1600
        assert height >= 350
        assert path.stat().st_size < 150_000
    assert plot._names(rows(results)) == ["spearfish", "marlin"]


def test_every_implementation_has_a_place_in_the_plots() -> None:
    from spearfish.bench.peers import all_peers

    assert {one.name for one in all_peers()} | {"spearfish"} == set(plot._STYLES)


def test_the_page_is_made_of_the_committed_files(repository: Path) -> None:
    results, plots = repository / "benchmarks" / "results" / "kernels", repository / "docs" / page.PLOTS
    assert (repository / "docs" / "performance.md").read_text(encoding="utf-8") == page.render(results, plots)


def test_the_page_shows_what_is_in_the_files(tmp_path: Path) -> None:
    assert "None yet" in page.render(tmp_path / "results")
    results = made_up.measured(tmp_path / "results", tokens=(1, 16))
    plot.draw_all([results], tmp_path / "plots")
    text = page.render(tmp_path / "results", tmp_path / "plots")
    assert "![int4-g128-fp16-speedup](performance/made_up_gpu_9/int4-g128-fp16-speedup.png)" in text
    assert "× best rival" in text
    assert "Every point\n" not in text
    for line in ("128 × 64, m = 16: 0.80× of marlin", "humming: wrong: relative error"):
        assert line in text


# ---------------------------------------------------------------------------------------------------- the command line


def test_a_measurement_without_a_gpu_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words in ((), ("--eager",), ("--chain",)):
        code, out, err = spearfish(capsys, *words)
        assert (code, out) == (1, "")
        assert err == "error: a measurement needs an NVIDIA GPU, and torch finds none here\n"
    assert "name an architecture, --arch sm_90" in spearfish(capsys, "--explain")[2]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("7x7",), "'7x7' is neither a set of shapes"),
        (("--scheme", "int5"), "scheme 'int5' is not known"),
        (("--dtype", "fp8"), "--dtype is 'fp8'"),
        (("--m", "many"), "m is 'many'"),
        (("--explain", "--arch", "sm_70"), "no chip is listed for 'sm_70'"),
        (("--report",), "--results DIR"),
        (("--only", "cutlass"), "there are spearfish, cublas,"),
        (("--peer-lib", "nowhere.so"), "nowhere.so does not load"),
        (("--report", "--results", "nowhere"), "no result file below nowhere"),
    ],
)
def test_wrong_words_are_named(
    words: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spearfish.bench.device.CudaDevice", made_up.FakeDevice)
    code, _, err = spearfish(capsys, *words)
    assert code == 1
    assert what in err
    assert err.count("\n") == 1


def test_durations() -> None:
    assert [parse_seconds(text) for text in (None, "240s", "240", "1.5m")] == [None, 240.0, 240.0, 90.0]
    with pytest.raises(UnsupportedError, match="soon"):
        parse_seconds("soon")


def test_the_layers_of_a_checkpoint_are_measured(tmp_path: Path) -> None:
    model = tiny.llama()
    for layer in tiny.linears(model).values():
        layer.weight.data *= sparse24.magnitude_mask(layer.weight.abs())
    model.save_pretrained(tmp_path)
    layers, counts = _layers([str(tmp_path), "4096x4096"], "int4-g128,f16")
    assert sum(counts.values()) == len(tiny.linears(model)) == 14
    shapes = {(layer.weight.shape[1], layer.weight.shape[0]) for layer in tiny.linears(model).values()}
    assert set(counts) == {(k, n, parse_scheme("f16")) for k, n in shapes}
    assert layers == [*counts, (4096, 4096, parse_scheme("int4-g128")), (4096, 4096, parse_scheme("f16"))]


# ------------------------------------------------------------------------------------------- the probes' own launches


def test_the_probes_launch_what_their_kernels_want(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grid, shared memory and parameters of every launch, against what ceilings.cu declares."""
    launched: list[tuple[str, tuple[int, int, int], int, int, bytes]] = []

    class Function:
        def __init__(self, variant: jit.Variant) -> None:
            self.variant = variant

        def launcher(self, grid: tuple[int, int, int], block: int, shared: int, size: int) -> SimpleNamespace:
            params = bytearray(size)
            name = str(self.variant.entry)
            return SimpleNamespace(
                params=params, launch=lambda stream: launched.append((name, grid, block, shared, bytes(params)))
            )

    facts = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
    monkeypatch.setattr(jit, "load", lambda variant, device: Function(variant))
    monkeypatch.setattr(jit, "architecture", lambda device, specific=False: "sm_90a" if specific else "sm_90")
    monkeypatch.setattr(jit, "current_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40_000_000, 0))
    device = made_up.FakeDevice(l2_bytes=4_000_000)
    probes = CudaProbes(device)
    readers = probes.readers(1_000_064)
    assert {name: len(calls) for name, calls in readers.items()} == {"plain": 10, "bulk": 10}
    for calls in readers.values():
        for call in calls:
            call()
    pieces = []
    for name, grid, block, shared, params in launched:
        start, size, sink = struct.unpack("<QQQ", params)
        assert (size, sink) == (1_000_064, probes.sink.data_ptr())
        assert (grid, block, shared) == (((528, 1, 1), 512, 0) if name == "read_plain" else ((132, 1, 1), 32, 196608))
        pieces.append(start - probes.buffer.data_ptr())
    assert pieces == [i * 1_000_064 for i in range(10)] * 2
    assert max(pieces) + 1_000_064 <= probes.buffer.numel()
    assert all(start % 128 == 0 for start in pieces)
    assert probes.readers(15_000_000) == {}, "two copies do not fit"

    launched.clear()
    made = {name: make() for name, make in probes.rates().items() if name != "cublas 8192"}
    for call, _ in made.values():
        call()
    assert [(name, grid, block) for name, grid, block, *_ in launched] == [
        ("rate_mma_sp", (264, 1, 1), 256),
        ("rate_wgmma_sp", (132, 1, 1), 512),
    ]
    # Warps or warpgroups of all blocks, instructions of a round, operations of one: 2 m n k as if dense.
    assert made["mma.sp"][1] == 264 * 8 * (8000 * 16) * (2 * 16 * 8 * 32)
    assert made["wgmma.sp"][1] == 132 * 4 * (2000 * 8) * (2 * 64 * 128 * 32)
    for (*_, params), rounds in zip(launched, (8000, 2000), strict=True):
        assert struct.unpack("<QiiQ", params)[1] == rounds


def test_a_recording_is_replayed_and_a_broken_one_tells_what_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own code, on stand-ins for torch's graph, stream and events."""
    log: list[str] = []

    class Graph:
        def capture_begin(self) -> None:
            log.append("begin")

        def capture_end(self) -> None:
            log.append("end")
            if "broken" in log:
                raise RuntimeError("the capture was invalidated")

        def replay(self) -> None:
            log.append("replay")

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: object) -> float:
            return 0.25

    facts = SimpleNamespace(name="Some GPU", L2_cache_size=50 << 20, uuid="1234")
    for name, stand_in in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda device: facts,
        "synchronize": lambda: log.append("synchronize"),
        "Stream": lambda device: None,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": Graph,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    device = CudaDevice()
    assert (device.name, device.l2_bytes, device.torch_device) == ("Some GPU", 50 << 20, torch.device("cuda:0"))
    replay = device.record([lambda: log.append("a"), lambda: log.append("b")])
    assert replay() == 250.0
    assert log == ["synchronize", "begin", "a", "b", "end", "event", "replay", "event", "wait"]

    def breaks() -> None:
        log.append("broken")
        raise ValueError("this broke")

    log.clear()
    with pytest.raises(ValueError, match="this broke"):
        device.record([breaks])
    assert log == ["synchronize", "begin", "broken", "end"]


def test_the_state_of_a_card_is_read_and_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = object.__new__(CudaDevice)
    device._uuid = "GPU-1234"
    asked: list[list[str]] = []

    def shown(command: list[str], **options: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout="580.1, 1980, 1980, 3201, 120.5, 700.00, 41\n")

    monkeypatch.setattr("spearfish.bench.device.subprocess.run", shown)
    state = device.state()
    assert (state["driver"], state["clock MHz"], state["power W"], state["temperature C"]) == (
        "580.1",
        "1980",
        "120.5",
        "41",
    )
    # It only looks: no option that sets anything.
    assert asked[0][0] == "nvidia-smi"
    assert all(word.startswith(("--query-gpu=", "--format=", "-i", "GPU-")) for word in asked[0][1:])

    def absent(command: list[str], **options: object) -> SimpleNamespace:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr("spearfish.bench.device.subprocess.run", absent)
    assert device.state() == {}
