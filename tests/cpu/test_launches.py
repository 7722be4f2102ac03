"""benchmarks/launches.py as far as it goes without a GPU: what is timed, checked and written."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spearfish import reference
from spearfish.bench.problems import Point, Weights, parse_scheme
from spearfish.kernels.config import CHIPS

LAUNCHES = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "launches.py"))
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    tokens: int
    blocks: int = 1


@dataclass(frozen=True)
class Way:
    shape: Shape
    split: int
    blocks: int


class Slower:
    """A family whose launches take as many microseconds as their split, and one of which is not legal."""

    name = "slower"

    def __init__(self, device: Device, wrong: bool = False) -> None:
        self.device, self.wrong = device, wrong

    def candidates(self, problem: Any, chip: Any) -> list[Way]:
        return [Way(Shape(8), split, 2) for split in (4, 1, 3, 2)]

    def why_not(self, way: Way, problem: Any, chip: Any) -> str | None:
        return "odd" if way.split == 3 else None

    def bind(self, way: Way, problem: Any, device: int) -> Any:
        weights = Weights(problem.k, problem.n, parse_scheme("int4-g128"), torch.float16, CPU)
        dense = reference.dequantize(weights.own, torch.float32)

        def run(x: torch.Tensor, stream: torch.Tensor, column_scale: Any, bias: Any, out: torch.Tensor) -> None:
            self.device.now += way.split
            out.copy_(x.float() @ dense.T * (2 if self.wrong else 1))

        return run


class Device:
    torch_device, name, l2_bytes = CPU, "none", 1 << 20

    def __init__(self) -> None:
        self.now = 0.0

    def record(self, calls: Any) -> Any:
        def replay() -> float:
            begin = self.now
            for call in calls:
                call()
            return self.now - begin

        return replay

    def release(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


POINTS = [Point(256, 128, m, "fp16", parse_scheme("int4-g128")) for m in (1, 5)]


def test_the_fastest_is_first_and_only_what_is_legal_is_timed() -> None:
    device, kept = Device(), []
    LAUNCHES["measure"](POINTS, Slower(device), CHIPS["sm_90"], device, kept.append)
    assert [[line["split"] for line in lines] for lines in kept] == [[1, 2, 4], [1, 2, 4]]
    assert list(kept[0][0]) == ["k", "n", "m", "tokens", "blocks", "split", "us", "error"]
    assert [line["us"] for line in kept[1]] == pytest.approx([1, 2, 4])
    assert kept[0][0]["blocks"] == 2  # the configuration's own, not the shape's
    assert 0 <= kept[1][0]["error"] < 1e-3


def test_what_is_wrong_is_not_timed() -> None:
    device = Device()
    with pytest.raises(SystemExit, match="is wrong, relative error"):
        LAUNCHES["measure"](POINTS, Slower(device, wrong=True), CHIPS["sm_90"], device, print)
