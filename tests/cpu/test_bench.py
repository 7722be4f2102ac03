"""The benchmark without a GPU: everything but the clock, on a device whose time is made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from spearfish import reference
from spearfish.bench import check
from spearfish.bench.campaign import Campaign
from spearfish.bench.ceilings import READ_BYTES, Ceilings, measure
from spearfish.bench.device import Call, Replay, per_call, sustained
from spearfish.bench.implementations import Cublas, Prepared, Spearfish, WeightKind
from spearfish.bench.problems import (
    SHAPE_SETS,
    TOKENS,
    Point,
    Weights,
    parse_scheme,
    parse_shapes,
    parse_tokens,
    passes,
    scheme_name,
    weight_bytes,
)
from spearfish.bench.report import baseline_for, losses, means_table, regrets, report, rivals_table, rows
from spearfish.bench.results import Results, begin_run, load, load_all, open_for
from spearfish.bench.runner import Budget, Measured, Settings, run
from spearfish.errors import FormatError, UnsupportedError
from spearfish.kernels.prepare import to_stream
from spearfish.scheme import QuantScheme

CPU = torch.device("cpu")
G128 = QuantScheme(4, 128)


@dataclass
class FakeDevice:
    """Time passes only when somebody spends it."""

    name: str = "Made Up GPU 9"
    l2_bytes: int = 40_000
    torch_device: torch.device = CPU
    now_us: float = 0.0
    lost: bool = False
    every_call: float = 0.0  # µs of a call that spends nothing itself
    recorded: list[int] = field(default_factory=list)

    def spend(self, us: float) -> None:
        self.now_us += us

    def record(self, calls: Sequence[Call]) -> Replay:
        self.recorded.append(len(calls))

        def replay() -> float:
            begin = self.now_us
            for call in calls:
                call()
                self.now_us += self.every_call
            return self.now_us - begin

        return replay

    def seconds(self) -> float:
        return self.now_us / 1e6

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def release(self) -> None:
        pass

    def state(self) -> dict[str, str]:
        return {"driver": "1.2", "clock MHz": "1500"}


class FakeOne:
    """An implementation that takes `us` for each call; `spoil` makes its result wrong."""

    takes: WeightKind = "codes"

    def __init__(
        self,
        name: str,
        device: FakeDevice,
        us: float | Callable[[int], float],
        spoil: Callable[[torch.Tensor], torch.Tensor] = lambda y: y,
        reason: str | None = None,
    ) -> None:
        self.name, self.device, self.us, self.spoil, self.reason = name, device, us, spoil, reason
        self.prepared = 0
        self.calls: list[str] = []

    def why_not(self, point: Point) -> str | None:
        return self.reason

    def prepare(self, weights: Weights) -> Prepared:
        self.prepared += 1
        dense = reference.dequantize(weights.codes, torch.float64)
        known: dict[int, torch.Tensor] = {}  # thousands of replays of one product

        def call(x: torch.Tensor) -> torch.Tensor:
            self.device.spend(self.us(x.shape[0]) if callable(self.us) else self.us)
            if x.shape[0] not in known:
                known[x.shape[0]] = self.spoil((x.double() @ dense.T).to(x.dtype))
            return known[x.shape[0]]

        return Prepared(call, 10_000, lambda m: f"way for {m}")


class FakeProbes:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def readers(self, size: int) -> dict[str, list[Call]]:
        def read(us: float) -> list[Call]:
            return [lambda: self.device.spend(us)] * 3

        return {"plain": read(2 + size / 4e6), "bulk": read(1 + size / 4.6e6)} if size < 5e8 else {}

    def rates(self) -> dict[str, Callable[[], tuple[Call, float]]]:
        def broken() -> tuple[Call, float]:
            raise UnsupportedError("not on this chip\nand more")

        return {
            "cublas 8192": lambda: (lambda: self.device.spend(1000.0), 700e9),
            "mma.sp": lambda: (lambda: self.device.spend(500.0), 450e9),
            "wgmma.sp": broken,
        }


def go(device: FakeDevice, ones: Sequence[object], points: Sequence[Sequence[Point]], budget: float | None = None):
    kept: list[Measured] = []
    outcome = run(points, ones, device, Settings(rounds=5), Budget(device, budget), kept.append)  # type: ignore[arg-type]
    return kept, outcome


POINT = Point(256, 128, 16, "fp16", G128)

# ---------------------------------------------------------------------------------------------------------- problems


@pytest.mark.parametrize(
    "word", ["int4-g128", "int8-channel", "dense-int4-g64", "int4-g64-asym", "dense-int8-channel-asym", "f16"]
)
def test_schemes_are_words_and_back(word: str) -> None:
    assert scheme_name(parse_scheme(word)) == word


def test_words_that_are_wrong_are_refused() -> None:
    assert parse_scheme("int4") == G128
    assert parse_tokens("1, 16,1") == (1, 16)
    assert parse_tokens("all") == TOKENS
    assert parse_shapes("4096x28672") == ((4096, 28672),)
    assert parse_shapes("nine") == SHAPE_SETS["nine"]
    for parse, word in ((parse_scheme, "int3"), (parse_tokens, "0"), (parse_tokens, "1,x"), (parse_shapes, "10x64")):
        with pytest.raises(UnsupportedError, match=word):
            parse(word)


@pytest.mark.parametrize("word", ["int4-g128", "int8-g128", "int4-g32", "f16", "dense-int4-g128"])
def test_weight_bytes_are_what_the_stream_holds(word: str) -> None:
    weights = Weights(256, 128, parse_scheme(word), torch.float16, CPU)
    assert to_stream(weights.own, "cpu", torch.float16).nbytes == weight_bytes(128, 256, weights.scheme)


def test_bits_for_each_weight() -> None:
    assert weight_bytes(4096, 4096, G128) * 8 / 4096**2 == 3.125
    point = Point(4096, 4096, 16, "fp16", G128)
    assert point.bytes == point.weight_bytes + 2 * 16 * 8192
    assert point.flops == 2 * 16 * 4096 * 4096


def test_the_most_important_tokens_come_first_over_all_layers() -> None:
    layers = [(256, 128, G128), (128, 64, G128)]
    order = [[(p.k, p.m) for p in points] for points in passes(layers, (1, 16, 64, 256, 32), "fp16")]
    assert order[0] == [(256, 1), (256, 16), (256, 64), (256, 256)]
    assert order[1:] == [[(128, m) for m in (1, 16, 64, 256)], [(256, 32)], [(128, 32)]]
    assert len(set(TOKENS)) == 14
    assert len(set(SHAPE_SETS["nine"])) == 9


def test_weights_are_what_they_say() -> None:
    for word in ("int4-g128", "int8-g64-asym", "f16", "dense-int4-g32"):
        weights = Weights(256, 64, parse_scheme(word), torch.bfloat16, CPU)
        weights.own.check()
        assert weights.own.scheme == weights.scheme
        if weights.scheme.bits == 16:
            assert not (weights.full == 0).any()
        else:
            weights.codes.check()
            assert weights.codes.scheme.sparsity == "dense"
            assert len(weights.own.codes.unique()) == 2**weights.scheme.bits
            assert torch.equal(weights.full.double(), weights.exact("codes", slice(None)).bfloat16().double())


# ------------------------------------------------------------------------------------------------------------- check


def product(m: int) -> tuple[torch.Tensor, check.Truth]:
    weights = Weights(256, 192, G128, torch.float16, CPU)
    x = torch.randn((m, 256), generator=torch.Generator().manual_seed(1)).half()
    y = (x.double() @ weights.exact("own", slice(None)).T).half()
    return y, check.truth(x, weights, "own")


@pytest.mark.parametrize("m", [1, 2, 8, 9, 100])
def test_a_right_product_passes_and_a_slightly_wrong_one_does_not(m: int) -> None:
    y, known = product(m)
    assert check.error(y, known) < 3e-4
    assert check.error(y * 1.004, known) == pytest.approx(4e-3, rel=0.2)
    assert check.error(-y, known) > 1
    assert check.error(torch.full_like(y, float("nan")), known) == float("inf")
    assert check.error(y.T, known) == float("inf")


@pytest.mark.parametrize("row", range(0, 100, 7))
def test_one_wrong_tile_anywhere_is_seen(row: int) -> None:
    y, known = product(100)
    y[row, 64:128] = y[(row + 1) % 100, 64:128]
    assert check.error(y, known) > check.TOLERANCE[torch.float16]


def test_one_unwritten_value_is_seen() -> None:
    y, known = product(100)
    y[57, 190] = float("nan")
    assert check.error(y, known) == float("inf")


# ------------------------------------------------------------------------------------------------------------ timing


def test_short_calls_are_repeated_until_they_can_be_timed() -> None:
    device = FakeDevice()
    replay = per_call(device, [lambda: device.spend(3.0), lambda: device.spend(5.0)])
    assert replay() == pytest.approx(4.0)
    assert device.recorded == [2, 2 * 188]
    slow = per_call(device, [lambda: device.spend(4000.0)])
    assert slow() == 4000.0
    assert device.recorded[2:] == [1]


def test_sustained_is_the_second_half() -> None:
    device = FakeDevice()

    def call() -> None:
        device.spend(100.0 if device.seconds() < 0.6 else 150.0)

    # In the second half 1000 calls of 100 µs and 2667 of 150.
    assert sustained(device, device.record([call]), 1.0) == pytest.approx(0.5e6 / 3667, rel=1e-3)


def test_a_run_checks_rotates_takes_turns_and_writes_down() -> None:
    device = FakeDevice()
    order: list[str] = []

    def noted(name: str, us: float) -> Callable[[int], float]:
        def spend(m: int) -> float:
            order.append(name)
            return us

        return spend

    ones = [
        FakeOne("spearfish", device, noted("a", 1000.0)),
        FakeOne("slow", device, noted("b", 3000.0)),
        FakeOne("wrong", device, 1.0, spoil=lambda y: y * 1.05),
        FakeOne("unwritten", device, 1.0, spoil=lambda y: y.index_fill(0, torch.tensor([3]), float("nan"))),
        FakeOne("broken", device, 1.0, spoil=lambda y: y[:, :7] @ y),
        FakeOne("absent", device, 1.0, reason="is not installed"),
    ]
    kept, outcome = go(device, ones, [[POINT, Point(256, 128, 3, "fp16", G128)]])
    first = kept[0]
    assert (outcome.measured, outcome.asked, outcome.stopped) == (2, 2, None)
    assert first.us == {"spearfish": (1000.0, 1000.0, 1000.0), "slow": (3000.0, 3000.0, 3000.0)}
    assert first.how["spearfish"] == "way for 16"
    assert 0 < first.errors["spearfish"] < 3e-4
    assert first.missing["wrong"].startswith("wrong: relative error 5e-02")
    assert first.missing["unwritten"] == "wrong: relative error inf, allowed 2e-03"
    assert first.missing["broken"].startswith("failed: RuntimeError: ")
    assert first.missing["absent"] == "is not installed"
    # 2.5 times an L2 of 40 kB in copies of 10 kB; for both points of the layer the same.
    assert [one.prepared for one in ones] == [10, 10, 10, 10, 10, 0]
    turns = [order[i] for i in range(len(order)) if i == 0 or order[i - 1] != order[i]]
    # Check and warm-up of each, then five turns that begin with one and the other by turns, so neighbours melt: of each
    # point ab, then ab ba ab ba ab.
    assert "".join(turns) == "ab" * 8
    assert order.count("a") == order.count("b")


def test_a_spread_is_quartiles() -> None:
    device = FakeDevice()
    count = iter(range(1000))

    def us(m: int) -> float:
        # A check, a round of ten copies, two replays of it, and one of the graph of twenty: then five turns of twenty.
        turn = (next(count) - 51) // 20
        return (2000.0, 5000.0, 1000.0, 3000.0, 4000.0)[turn] if turn >= 0 else 100.0

    kept, _ = go(device, [FakeOne("spearfish", device, us)], [[POINT]])
    assert kept[0].us["spearfish"] == (3000.0, 2000.0, 4000.0)


def test_what_fails_to_prepare_is_not_prepared_again() -> None:
    device = FakeDevice()

    class Fails(FakeOne):
        def prepare(self, weights: Weights) -> Prepared:
            self.prepared += 1
            raise MemoryError("no room\nat all")

    fails, works = Fails("peer", device, 1.0), FakeOne("spearfish", device, 10.0)
    kept, outcome = go(device, [fails, works], [[POINT, POINT]])
    assert fails.prepared == 1
    assert [one.missing for one in kept] == [{"peer": "failed: MemoryError: no room"}] * 2
    assert outcome.measured == 2


def test_a_budget_ends_a_run_cleanly() -> None:
    device = FakeDevice()
    one = FakeOne("spearfish", device, 10_000.0)
    kept, outcome = go(device, [one], [[POINT] * 100], budget=10.0)
    # A point takes 0.11 s to check and warm up, 0.2 s to record, 0.5 s for five turns.
    assert outcome.stopped == "the budget of 10 s is spent"
    assert 8 <= len(kept) == outcome.measured <= 12
    assert device.seconds() <= 10.0


def test_a_lost_device_ends_a_run_with_what_there_is() -> None:
    device = FakeDevice()

    def dies(m: int) -> float:
        if m == 3:
            device.lost = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return 10.0

    ones = [FakeOne("spearfish", device, 10.0), FakeOne("peer", device, dies)]
    kept, outcome = go(device, ones, [[POINT, Point(256, 128, 3, "fp16", G128), POINT]])
    assert len(kept) == 1
    assert outcome.stopped is not None
    assert "the device is lost at 256 x 128, m = 3" in outcome.stopped
    assert "peer failed: RuntimeError: CUDA error" in outcome.stopped


@pytest.mark.parametrize("word", ["int4-g128", "int8-channel", "f16", "dense-int4-g128-asym"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_ourselves_and_the_library_are_right_on_a_cpu(word: str, dtype: str) -> None:
    device = FakeDevice(every_call=500.0)
    ones = [Spearfish(), Cublas(), Cublas(transposed=True)]
    kept, _ = go(device, ones, [[Point(256, 192, 20, dtype, parse_scheme(word))]])
    assert kept[0].missing == {}
    assert kept[0].us.keys() == {"spearfish", "cublas", "cublas kn"}
    assert kept[0].how == {"spearfish": "dense: the device is cpu"}


# ---------------------------------------------------------------------------------------------------------- ceilings


def test_ceilings_take_the_best_reader_and_go_on_after_a_failure() -> None:
    device = FakeDevice()
    found = measure(device, FakeProbes(device))
    assert [size for size, _ in found.read] == [size for size in READ_BYTES if size < 5e8]
    assert dict(found.read)[4_000_000] == pytest.approx(1 + 4 / 4.6, abs=1e-3)
    assert dict(found.read)[500_000 // 128 * 128] == pytest.approx(1 + 0.5 / 4.6, abs=1e-3)
    assert found.rates == {"cublas 8192": 700.0, "mma.sp": 900.0}
    assert found.notes == {"wgmma.sp": "UnsupportedError: not on this chip"}


def test_the_roof() -> None:
    ceilings = Ceilings(
        [(1_000_000, 2.0), (10_000_000, 5.0), (100_000_000, 25.0)], {"mma.sp": 900.0, "wgmma.sp": 1390.0}
    )
    assert ceilings.read_us(10) == 2.0
    assert ceilings.read_us(5_500_000) == pytest.approx(3.5)
    assert ceilings.read_us(200_000_000) == pytest.approx(50.0)
    few, many = Point(4096, 4096, 1, "fp16", G128), Point(4096, 4096, 4096, "fp16", G128)
    assert ceilings.roof_us(few) == pytest.approx(2 + (6_553_600 + 16_384 - 1e6) * 3 / 9e6)
    assert ceilings.roof_us(many) == pytest.approx(2 * 4096**3 / 1390e6)
    assert ceilings.roof_us(Point(4096, 4096, 1, "fp16", QuantScheme(4, 128, sparsity="dense"))) is None
    assert Ceilings().roof_us(few) is None


# ----------------------------------------------------------------------------------------------------------- results


def campaign(device: FakeDevice, folder: Path, tokens: tuple[int, ...] = (1, 16), ours: float = 10.0) -> Campaign:
    ones = [
        FakeOne("spearfish", device, ours),
        FakeOne("cublas", device, 30.0),
        FakeOne("cublas kn", device, 25.0),
        FakeOne("marlin", device, lambda m: 8.0 if m == 16 else 20.0),
        FakeOne("humming", device, 1.0, spoil=lambda y: y * 2),
        FakeOne("gemlite", device, 1.0, reason="gemlite is not installed"),
    ]
    layers = [(256, 128, G128), (128, 64, G128)]
    return Campaign(layers, tokens, ["fp16"], ones, Settings(rounds=3), folder, commit="abc123")  # type: ignore[arg-type]


def measured(folder: Path, **options: object) -> Results:
    device = FakeDevice()
    (results,), _ = campaign(device, folder, **options).run(device, FakeProbes(device), Budget(device, None))  # type: ignore[arg-type]
    return results


def test_a_file_says_everything_and_comes_back(tmp_path: Path) -> None:
    results = measured(tmp_path)
    path = tmp_path / "made_up_gpu_9" / "int4-g128-fp16.json"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    text = path.read_text(encoding="utf-8")
    assert load(path) == results == load_all(tmp_path)[0]
    assert json.loads(text)["points"] == results.points
    (head,) = results.runs
    assert head["commit"] == "abc123"
    assert head["outcome"] == "4 of 4 points"
    assert head["state"]["before"]["driver"] == "1.2"
    assert head["versions"]["torch"] == torch.__version__
    assert head["absent"] == {"gemlite": "gemlite is not installed"}
    assert head["errors"].keys() == {"spearfish", "cublas", "cublas kn", "marlin"}
    entry = next(entry for entry in results.points if entry["k"] == 256 and entry["m"] == 16)
    assert entry["us"]["spearfish"] == [10.0, 10.0, 10.0]
    assert entry["missing"]["humming"].startswith("wrong: relative error 1")
    assert text.count("\n") < 90, "one line for each point and short heads"


def test_a_later_run_replaces_its_points_and_heads_without_points_go(tmp_path: Path) -> None:
    first = measured(tmp_path).runs[0]["id"]
    path = tmp_path / "made_up_gpu_9" / "int4-g128-fp16.json"
    changed = path.read_text(encoding="utf-8").replace(first, "earlier")
    path.write_text(changed, encoding="utf-8")
    both = measured(tmp_path, tokens=(16, 64), ours=9.0)
    assert len(both.points) == 6
    assert {(p["m"], p["run"] == "earlier", p["us"]["spearfish"][0]) for p in both.points} == {
        (1, True, 10.0),
        (16, False, 9.0),
        (64, False, 9.0),
    }
    assert len(load(path).runs) == 2
    measured(tmp_path, ours=8.0)
    assert "earlier" not in [head["id"] for head in load(path).runs]


def test_a_resumed_run_measures_what_is_missing(tmp_path: Path) -> None:
    first = measured(tmp_path)
    device = FakeDevice()
    again = campaign(device, tmp_path, tokens=(1, 16, 64))
    again.resume = True
    (results,), outcome = again.run(device, FakeProbes(device), Budget(device, None))
    assert (outcome.measured, len(results.points)) == (2, 6)
    # Points of other sources, or without a result of ours, are not there.
    assert len(first.measured_now()) == 4
    del first.points[0]["us"]["spearfish"]
    assert len(first.measured_now()) == 3
    first.runs[0]["sources"] = "others"
    assert first.measured_now() == set()


def test_a_run_that_stops_has_saved_what_it_measured(tmp_path: Path) -> None:
    device = FakeDevice()
    seen: list[int] = []

    def say(text: str) -> None:
        if text.startswith("256 x 128"):
            seen.append(len(load_all(tmp_path)[0].points))

    campaign(device, tmp_path).run(device, FakeProbes(device), Budget(device, None), say)
    assert seen == [1, 2]


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content in ("{", "[]", "{}", '{"format": "spearfish bench 0"}'):
        path.write_text(content)
        with pytest.raises(FormatError, match=r"x\.json"):
            load(path)
    assert open_for(tmp_path, "No Such GPU", G128, "fp16").points == []


# ------------------------------------------------------------------------------------------------------------ report


def test_the_tables_have_the_numbers(tmp_path: Path) -> None:
    results = measured(tmp_path)
    found = rows(results)
    row = next(row for row in found if (row.point.k, row.point.m) == (256, 16))
    assert (row.ours, row.cublas, row.rival) == (10.0, 25.0, ("marlin", 8.0))
    assert row.against_cublas == 2.5
    assert row.against_rival == 0.8
    assert row.roof_us == pytest.approx(1 + 0.5 / 4.6, abs=1e-2)
    assert row.of_roof == pytest.approx(row.roof_us / 10)
    one, sixteen = means_table(found).splitlines()[2:]
    assert one.replace(" ", "").startswith("|1|2|2.50|2.00|2.00|")
    assert sixteen.replace(" ", "").startswith("|16|2|2.50|0.80|0.80|")
    assert losses(found) == [
        "128 × 64, m = 16: 0.80× of marlin (10.0 against 8.0 µs)",
        "256 × 128, m = 16: 0.80× of marlin (10.0 against 8.0 µs)",
    ]
    everybody = rivals_table(found).replace(" ", "")
    assert "|spearfish|2.50|2.50|" in everybody
    assert "|marlin|1.25|3.12|" in everybody
    text = report(results)
    assert "humming: wrong: relative error" in text
    assert "(at 128 × 64, m = 1 and 3 more)" in text
    assert "| 256 × 128 | 16 | 10.0 |  0.0 % |" in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({len(line) for line in block.splitlines()}) == 1, "columns are aligned"


def test_no_result_of_ours_is_a_loss(tmp_path: Path) -> None:
    results = measured(tmp_path)
    del results.points[0]["us"]["spearfish"]
    assert losses(rows(results))[0] == "128 × 64, m = 1: no result of ours"
    assert "no result of ours" in report(results)


def test_a_better_way_of_our_own_is_told(tmp_path: Path) -> None:
    results = measured(tmp_path)
    assert regrets(results) == []
    assert "own ways" not in report(results)
    results.points[0]["us"] |= {"spearfish #2": [8.0, 8.0, 8.0], "spearfish hopper": [9.8, 9.8, 9.8]}
    results.points[0]["how"]["spearfish #2"] = "portable: some cut"
    results.points[1]["us"]["spearfish #2"] = [9.8, 9.8, 9.8]
    assert regrets(results) == ["128 × 64, m = 1: 8.0 µs by portable: some cut, 10.0 by the chosen way for 1"]
    assert regrets(results)[0] in report(results)


def test_the_kernel_of_2024_stands_beside_us(tmp_path: Path) -> None:
    results = measured(tmp_path)
    assert baseline_for(tmp_path, results.gpu) is None
    times = {"int4-g128": {"256x128": {"1": 12.0}, "128x64": {"1": 27.0}}}
    path = tmp_path / "made_up_gpu_9" / "baseline_2024_kernel.json"
    path.write_text(json.dumps({"about": "made up", "us": times}))
    baseline = baseline_for(tmp_path, results.gpu)
    assert baseline is not None
    assert means_table(rows(results), baseline).splitlines()[2].replace(" ", "").endswith("|1.80|")
    assert baseline.us(Point(256, 128, 1, "bf16", G128)) is None
    assert load_all(tmp_path) == [results], "the baseline is no result file"
    path.write_text("{}")
    with pytest.raises(FormatError, match="baseline"):
        baseline_for(tmp_path, results.gpu)


def test_sustained_times_have_their_own_table(tmp_path: Path) -> None:
    device = FakeDevice()
    one = campaign(device, tmp_path)
    one.settings = Settings(rounds=1, sustain=0.001)
    (results,), _ = one.run(device, FakeProbes(device), Budget(device, None))
    assert rows(results, sustained=True)[0].us["spearfish"] == 10.0
    assert "kept up for a second" in report(results)
    assert begin_run([results], device, one.settings, Ceilings()) != ""
    # Measured again without: they stay, with the run that they came from.
    results.runs[0]["id"] = "earlier"  # both were in the same second
    for entry in results.points:
        entry["run"] = "earlier"
    results.save(tmp_path)
    one.settings = Settings(rounds=1)
    (again,), _ = one.run(device, FakeProbes(device), Budget(device, None))
    assert {entry["sustained_run"] for entry in again.points} == {"earlier"} != {entry["run"] for entry in again.points}
    assert rows(again, sustained=True)[0].us["spearfish"] == 10.0
    assert {"earlier"} < {run["id"] for run in again.runs}
