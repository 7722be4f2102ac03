"""The benchmark on a GPU: its clock, its ceilings, and one small run through everything."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from spearfish.bench import costs
from spearfish.bench.campaign import Campaign
from spearfish.bench.ceilings import DENSE_RATE, Ceilings, CudaProbes, measure
from spearfish.bench.device import CudaDevice, per_call
from spearfish.bench.implementations import ours_and_cublas
from spearfish.bench.peers import TinyGemm, all_peers
from spearfish.bench.problems import Point, parse_scheme
from spearfish.bench.report import report, rows
from spearfish.bench.results import load_all
from spearfish.bench.runner import Budget, Settings

G128 = parse_scheme("int4-g128")


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice()


@pytest.fixture(scope="module")
def ceilings(device: CudaDevice) -> Ceilings:
    return measure(device, CudaProbes(device), seconds=0.2)


def test_the_clock_agrees_with_a_long_known_work(device: CudaDevice) -> None:
    """A graph of copies takes as long as events around the same copies outside a graph say."""
    a = torch.randn(1 << 26, device="cuda")
    b = torch.empty_like(a)
    copy = partial(b.copy_, a)
    copy()
    us = per_call(device, [copy])()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        copy()
    end.record()
    end.synchronize()
    assert us == pytest.approx(begin.elapsed_time(end) * 1e3 / 20, rel=0.15)


def test_the_ceilings_are_those_of_a_gpu(ceilings: Ceilings) -> None:
    assert ceilings.notes == {}
    sizes, times = zip(*ceilings.read, strict=True)
    assert list(sizes) == sorted(sizes)
    # Twice the bytes never take less than 0.9 of the time, and large reads run at some plausible speed, in TB/s.
    assert all(after > 0.9 * before for before, after in zip(times, times[1:], strict=False))
    assert 0.1 < sizes[-1] / times[-1] / 1e6 < 20
    # Copying reads and writes: no copy is faster than half of what reading reaches, within a tenth.
    source = torch.empty(sizes[-1] // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    copied = per_call(CudaDevice(), [partial(target.copy_, source)])()
    assert copied > 1.8 * times[-1]
    sparse, dense = ceilings.rate(sparse=True), ceilings.rate(sparse=False)
    assert sparse is not None
    assert dense is not None
    assert dense < sparse < 4 * dense
    assert ceilings.rates.keys() >= {DENSE_RATE, "mma.sp"}
    if torch.cuda.get_device_capability()[0] == 9:
        assert ceilings.rates["wgmma.sp"] > 1.2 * ceilings.rates["mma.sp"]


def test_a_small_run_through_everything(device: CudaDevice, ceilings: Ceilings, tmp_path: Path) -> None:
    layers = [(1024, 2048, G128), (1152, 960, parse_scheme("f16"))]
    ones = ours_and_cublas(top=2, every_family=True) + all_peers()
    campaign = Campaign(layers, (1, 16, 100), ["fp16", "bf16"], ones, Settings(rounds=3, sustain=0.01), tmp_path)
    found, outcome = campaign.run(device, CudaProbes(device), Budget(device, 120))
    assert (outcome.measured, outcome.stopped) == (12, None)
    assert load_all(tmp_path) == sorted(found, key=lambda results: results.file_name)
    for results in found:
        for entry in results.points:
            # Families on request are other tests' business; here they only must not end the run.
            always = {"spearfish", "spearfish portable", "cublas", "cublas kn"}
            assert always <= entry["us"].keys(), entry
        for row in rows(results):
            # Nothing beats what the card allows by more than the ramp of one kernel that the next one hides.
            assert row.of_roof is not None
            assert 0.01 < row.of_roof < 2, row
        assert "Where we lose" in report(results)


def test_tinygemm_gets_what_it_wants(device: CudaDevice, tmp_path: Path) -> None:
    campaign = Campaign([(1024, 2048, G128)], (1, 16), ["bf16"], [TinyGemm()], Settings(rounds=2), tmp_path)
    (results,), _ = campaign.run(device, CudaProbes(device), Budget(device, 60))
    assert all(entry["us"].keys() == {"tinygemm"} for entry in results.points), results.points


def test_costs(device: CudaDevice, ceilings: Ceilings) -> None:
    ones = ours_and_cublas()
    for one in costs.eager(ones, G128, "fp16", device):
        assert one.reason == ""
        assert one.call_us is not None
        assert one.node_us is not None
        assert 1 < one.call_us < 1000
        assert 0.1 < one.node_us < 100
    assert costs.prepare_cost(G128, "fp16", device).nbytes <= 6_800_000
    shapes = ((1024, 2048), (2048, 1024))
    found = costs.chains(ones, (1, 16), G128, "fp16", device, layers=3, shapes=shapes)
    times = {(one.name, one.m): one.us for one in found}
    assert all(times.values()), found
    roof = 3 * sum(Point(k, n, 1, "fp16", G128).weight_bytes for k, n in shapes) / 20e6
    assert all(us is not None and us > roof for us in times.values())
    assert "spearfish" in costs.chain_table(found, G128, "fp16", ceilings, layers=3, shapes=shapes)
