"""Every configuration of a kernel family, timed: what the family's cost model is fitted to and tested against.

    python benchmarks/launches.py --m 1,16,64,256 --out launches.csv
    python benchmarks/launches.py 8192x8192 --m 128 --scheme int8-g128 --dtype bf16

Each launch is checked against float64 before it is timed; weights rotate beyond the L2; the time is the median of five
replays of a CUDA graph, one of every configuration in turn, since a GPU slows down as it gets hot. One line for each
configuration, the fastest of a point first, written after every point.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch

from spearfish.bench import check
from spearfish.bench.device import CudaDevice, Device, per_call
from spearfish.bench.implementations import dtype_of, problem_of
from spearfish.bench.problems import DTYPES, Point, Weights, parse_scheme, parse_shapes, parse_tokens
from spearfish.errors import SpearfishError
from spearfish.kernels.choose import families
from spearfish.kernels.config import Chip, Family, chip_of
from spearfish.kernels.prepare import to_stream

_ROTATE = 2.5  # times the L2 that the copies of a weight hold together


def measure(
    points: Iterable[Point], family: Family, chip: Chip, device: Device, keep: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Time every legal configuration of `family` at each point; hand the lines of a point to `keep`, fastest first."""
    index = device.torch_device.index or 0
    weights = prepared = None
    for point in points:
        if weights is None or (weights.k, weights.n) != (point.k, point.n):
            weights = prepared = None
            device.release()
            weights = Weights(point.k, point.n, point.scheme, dtype_of(point), device.torch_device)
            prepared = to_stream(weights.own, weights.device, weights.dtype)
            copies = max(2, ceil(_ROTATE * device.l2_bytes / prepared.stream.nbytes))
            streams = [prepared.stream, *(prepared.stream.clone() for _ in range(copies - 1))]
            device.synchronize()  # a launch may ask for weights before what stands in front of it has ended
        make = torch.Generator(device=device.torch_device).manual_seed(point.m)
        x = torch.randn((point.m, point.k), generator=make, device=device.torch_device).to(weights.dtype)
        known = check.truth(x, weights, "own")
        problem = problem_of(prepared, point.m)
        lines: list[dict[str, Any]] = []
        replays: list[Callable[[], float]] = []
        for way in family.candidates(problem, chip):
            if family.why_not(way, problem, chip) is not None:
                continue
            y = x.new_full((point.m, point.n), float("nan"))
            launch = family.bind(way, problem, index)
            launch(x, streams[0], prepared.column_scale, None, y)
            error = check.error(y, known)
            if not error <= check.TOLERANCE[x.dtype]:
                raise SystemExit(f"error: {point}: {way} is wrong, relative error {error:.1e}")
            calls = [partial(launch, x, stream, prepared.column_scale, None, y) for stream in streams]
            found = {field.name: getattr(way, field.name) for field in fields(way) if field.name != "shape"}
            shape = {field.name: getattr(way.shape, field.name) for field in fields(way.shape)}
            lines.append({"k": point.k, "n": point.n, "m": point.m, **(shape | found), "us": 0.0, "error": error})
            replays.append(per_call(device, calls))
        times = [[replay() for replay in replays] for _ in range(5)]
        for line, taken in zip(lines, zip(*times, strict=True), strict=True):
            line["us"] = median(taken)
        keep(sorted(lines, key=lambda line: float(line["us"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="?", default="nine", help="a set of shapes, or k x n")
    parser.add_argument("--m", default="1,16,64,256", help="token counts")
    parser.add_argument("--scheme", default="int4-g128")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp16")
    parser.add_argument("--family", choices=[family.name for family in families()], default="hopper")
    parser.add_argument("--out", type=Path, help="file that the lines are added to")
    options = parser.parse_args()

    def keep(lines: list[dict[str, Any]]) -> None:
        text = ""
        for line in lines:
            rounded = line | {"us": f"{line['us']:.2f}", "error": f"{line['error']:.1e}"}
            text += ",".join(map(str, rounded.values())) + "\n"
        if lines and options.out and not options.out.exists():
            options.out.write_text(",".join(lines[0]) + "\n", encoding="utf-8")
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(text)
        print(text, end="", flush=True)

    try:
        family = next(family for family in families() if family.name == options.family)
        scheme, tokens = parse_scheme(options.scheme), parse_tokens(options.m)
        points = [Point(k, n, m, options.dtype, scheme) for k, n in parse_shapes(options.shapes) for m in tokens]
        device = CudaDevice()
        measure(points, family, chip_of(device.index), device, keep)
    except SpearfishError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
