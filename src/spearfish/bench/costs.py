"""What a kernel costs beside its own time: compiling, preparing, an eager call on the CPU, a node of a CUDA graph; and
a chain of layers as a decode step has it, where the end of one kernel and the start of the next overlap or do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from spearfish.bench.ceilings import Ceilings, first_line
from spearfish.bench.device import Call, Device
from spearfish.bench.explain import problem_for
from spearfish.bench.implementations import Implementation, Prepared, dtype_of
from spearfish.bench.problems import SHAPE_SETS, Point, Weights
from spearfish.bench.report import microseconds, number, percent, ratio, table
from spearfish.kernels import jit
from spearfish.kernels import matmul as kernels
from spearfish.kernels.choose import choose
from spearfish.kernels.config import Chip
from spearfish.scheme import QuantScheme

CHAIN_LAYERS = 32


def compile_table(points: Sequence[Point], chip: Chip) -> str:
    """Seconds to compile, and to take from the cache, each variant of the families that the chooser picks for `points`.

    Needs no GPU. Every variant is compiled anew; the cache is then filled by it and read.
    """
    families = set()
    wanted: dict[jit.Variant, None] = {}
    for point in points:
        problem = problem_for(point)
        family, _ = choose(problem, chip, kernels.kernel_choice())
        families.add(family.name)
        for arch in (chip.arch, f"{chip.arch}a"):
            for variant in family.variants(arch):
                if set(problem.weight_macros) <= set(variant.macros):
                    wanted[variant] = None
    body, totals = [], [0.0, 0.0]
    for variant in wanted:
        cold = jit.compile_variant(variant, use_cache=False).seconds
        jit.compile_variant(variant)
        began = time.perf_counter()
        jit.compile_variant(variant)
        cached = time.perf_counter() - began
        body.append((str(variant), f"{cold:.2f}", f"{1e3 * cached:.1f}"))
        totals = [totals[0] + cold, totals[1] + cached]
    body.append((f"all {len(wanted)} of {', '.join(sorted(families))}", f"{totals[0]:.1f}", f"{1e3 * totals[1]:.0f}"))
    return table(("variant", "compiled, s", "from the cache, ms"), body)


def prepare_seconds(weights: Weights, device: Device) -> tuple[float, int]:
    """Seconds that `prepare` takes for a weight that is on the device, and the bytes that the result holds."""
    weight, held = weights.own, 0
    times = []
    for _ in range(4):
        device.synchronize()
        began = time.perf_counter()
        held = kernels.prepare(weight, weights.device, weights.dtype).nbytes
        device.synchronize()
        times.append(time.perf_counter() - began)
    return min(times), held


def call_microseconds(call: Call, synchronize: Callable[[], None], calls: int = 200, turns: int = 9) -> float:
    """µs of CPU that an eager call takes: the median over turns of a few hundred, which the launch queue holds."""
    call()
    times = []
    for _ in range(turns):
        synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls * 1e6)
        synchronize()
    return median(times)


def node_microseconds(call: Call, device: Device, nodes: int = 200) -> float:
    """µs that one more node of this kind costs a graph."""
    call()
    few, many = device.record([call] * nodes), device.record([call] * 2 * nodes)
    few(), many()
    return median((many() - few()) / nodes for _ in range(9))


def eager_table(implementations: Sequence[Implementation], scheme: QuantScheme, dtype: str, device: Device) -> str:
    """For each implementation: CPU time of an eager call (m = 1, 4096 × 4096) and GPU time of a graph node of a layer
    too small to count (512 × 128); then what `prepare` takes."""
    body: list[tuple[str, str, str]] = []
    for one in implementations:
        cells = []
        for k, n in ((4096, 4096), (512, 128)):
            point = Point(k, n, 1, dtype, scheme)
            reason = one.why_not(point)
            if reason is None:
                try:
                    x = torch.randn((1, k), device=device.torch_device).to(dtype_of(point))
                    prepared = one.prepare(_weights(point, device))
                    call = partial(prepared.call, x)
                    if n == 4096:
                        cells.append(number(call_microseconds(call, device.synchronize), 1))
                    else:
                        cells.append(number(node_microseconds(call, device)))
                    continue
                except Exception as error:  # noqa: BLE001  # whatever a rival raises is a result
                    reason = first_line(error, 60)
            cells.append(reason)
        body.append((one.name, *cells))  # type: ignore[arg-type]  # two cells, one for each layer
    first = table(("implementation", "eager call, µs of CPU", "graph node, µs"), body)
    seconds, held = prepare_seconds(_weights(Point(4096, 4096, 1, dtype, scheme), device), device)
    return f"{first}\n\nprepare of 4096 × 4096: {1e3 * seconds:.2f} ms, {held / 1e6:.2f} MB held afterwards"


def _weights(point: Point, device: Device) -> Weights:
    return Weights(point.k, point.n, point.scheme, dtype_of(point), device.torch_device)


@dataclass(frozen=True)
class Chain:
    """A decode step of one implementation: µs for all layers of the chain, or why there is none."""

    name: str
    m: int
    us: float | None
    reason: str = ""


def chains(
    implementations: Sequence[Implementation],
    tokens: Sequence[int],
    scheme: QuantScheme,
    dtype: str,
    device: Device,
    layers: int = CHAIN_LAYERS,
    shapes: Sequence[tuple[int, int]] = SHAPE_SETS["8b"],
    turns: int = 9,
) -> list[Chain]:
    """`layers` times the linear layers of an 8B model in one graph, each with a weight of its own (3.4 GB of int4, far
    beyond the L2) and its own x; the order of the stream is what ties them."""
    found = []
    points = [Point(k, n, 1, dtype, scheme) for k, n in shapes]
    for one in implementations:
        reason = next((why for point in points if (why := one.why_not(point))), None)
        prepared: list[list[Prepared]] = []
        if reason is None:
            try:
                for point in points:
                    weights = _weights(point, device)
                    prepared.append([one.prepare(weights) for _ in range(layers)])
            except Exception as error:  # noqa: BLE001  # whatever a rival raises is a result
                reason = first_line(error)
        for m in tokens:
            if reason is not None:
                found.append(Chain(one.name, m, None, reason))
                continue
            try:
                found.append(Chain(one.name, m, _chain(prepared, points, m, device, turns)))
            except Exception as error:  # noqa: BLE001  # as above
                found.append(Chain(one.name, m, None, first_line(error)))
        prepared = []
        device.release()
    return found


def _chain(
    prepared: Sequence[Sequence[Prepared]], points: Sequence[Point], m: int, device: Device, turns: int
) -> float:
    xs = [torch.randn((m, point.k), device=device.torch_device).to(dtype_of(point)) for point in points]
    calls = [partial(copy.call, x) for step in zip(*prepared, strict=True) for copy, x in zip(step, xs, strict=True)]
    for call in calls:
        call()
    replay = device.record(calls)
    replay()
    return median(replay() for _ in range(turns))


def chain_table(
    found: Sequence[Chain],
    scheme: QuantScheme,
    dtype: str,
    ceilings: Ceilings,
    layers: int = CHAIN_LAYERS,
    shapes: Sequence[tuple[int, int]] = SHAPE_SETS["8b"],
) -> str:
    """Chains beside each other; "of bandwidth": bytes of our scheme over the best read bandwidth of this card."""
    best = max((size / us for size, us in ceilings.read), default=None)
    body = []
    for one in found:
        size = layers * sum(Point(k, n, one.m, dtype, scheme).bytes for k, n in shapes)
        ours = next((other.us for other in found if other.m == one.m and other.name == "spearfish"), None)
        share = ratio(size / best, one.us) if best and one.name.startswith("spearfish") else None
        body.append(
            (one.name, str(one.m), microseconds(one.us), number(ratio(one.us, ours)), percent(share), one.reason)
        )
    body.sort(key=lambda line: int(line[1]))
    return table(("implementation", "m", f"{layers} layers, µs", "ours faster by", "of bandwidth", ""), body)
