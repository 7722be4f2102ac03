"""What a kernel costs beside its own time: compiling, preparing, an eager call on the CPU, a node of a CUDA graph; and
a chain of layers as a decode step has it, where the end of one kernel and the start of the next overlap or do not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from spearfish.bench.ceilings import Ceilings, first_line
from spearfish.bench.device import Call, Device
from spearfish.bench.explain import problem_for
from spearfish.bench.implementations import Implementation, Prepared, dtype_of
from spearfish.bench.problems import SHAPE_SETS, Point, Weights, parse_scheme, scheme_name
from spearfish.bench.report import microseconds, number, percent, ratio, table
from spearfish.bench.results import compact_json, slug, write_whole
from spearfish.errors import FormatError
from spearfish.kernels import jit
from spearfish.kernels import matmul as kernels
from spearfish.kernels.choose import choose
from spearfish.kernels.config import Chip
from spearfish.kernels.parts import families_of
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
        for family in families_of(*choose(problem, chip, kernels.kernel_choice())):
            families.add(family.name)
            for arch in (chip.arch, f"{chip.arch}a"):
                fitting = (v for v in family.variants(arch) if set(problem.weight_macros) <= set(v.macros))
                wanted |= dict.fromkeys(fitting)
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


@dataclass(frozen=True)
class Eager:
    """What a call costs: µs of CPU (m = 1, 4096 × 4096), and µs of GPU of a graph node of a layer too small to count
    (512 × 128); or why one of them is not known."""

    name: str
    call_us: float | None = None
    node_us: float | None = None
    reason: str = ""


def eager(implementations: Sequence[Implementation], scheme: QuantScheme, dtype: str, device: Device) -> list[Eager]:
    """The costs of a call of each implementation."""
    found = []
    for one in implementations:
        values: list[float | None] = []
        reasons: dict[str, None] = {}
        for point in (Point(4096, 4096, 1, dtype, scheme), Point(512, 128, 1, dtype, scheme)):
            reason, value = one.why_not(point), None
            if reason is None:
                try:
                    x = torch.randn((1, point.k), device=device.torch_device).to(dtype_of(point))
                    call = partial(one.prepare(_weights(point, device)).call, x)
                    large = point.n == 4096
                    value = call_microseconds(call, device.synchronize) if large else node_microseconds(call, device)
                except Exception as error:  # noqa: BLE001  # whatever a rival raises is a result
                    reason = first_line(error)
            values.append(None if value is None else round(value, 3))
            if reason:
                reasons[reason] = None
        found.append(Eager(one.name, values[0], values[1], "; ".join(reasons)))
    return found


def eager_table(found: Sequence[Eager]) -> str:
    """Calls beside each other."""
    body = [(one.name, number(one.call_us, 1), number(one.node_us), one.reason) for one in found]
    return table(("implementation", "eager call, µs of CPU", "graph node, µs of GPU", ""), body)


@dataclass(frozen=True)
class Prepare:
    """What `prepare` takes for 4096 × 4096, in seconds, and holds afterwards, in bytes."""

    seconds: float
    nbytes: int

    def __str__(self) -> str:
        return f"prepare of 4096 × 4096: {1e3 * self.seconds:.2f} ms, {self.nbytes / 1e6:.2f} MB held afterwards"


def prepare_cost(scheme: QuantScheme, dtype: str, device: Device) -> Prepare:
    """The best of four, of a weight that is on the device already."""
    weights = _weights(Point(4096, 4096, 1, dtype, scheme), device)
    weight, held = weights.own, 0
    times = []
    for _ in range(4):
        device.synchronize()
        began = time.perf_counter()
        held = kernels.prepare(weight, weights.device, weights.dtype).nbytes
        device.synchronize()
        times.append(time.perf_counter() - began)
    return Prepare(round(min(times), 6), held)


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
    """`layers` times the linear layers of an 8B model in one graph, each with a weight of its own (2.7 GB of int4, far
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


# ------------------------------------------------------------------------------------------------------------- the file


@dataclass(frozen=True)
class Costs:
    """Everything of one GPU, scheme and dtype: the file costs-<scheme>-<dtype>.json beside the result files. `run` is
    the head of a run as `results` has it."""

    gpu: str
    scheme: QuantScheme
    dtype: str
    run: dict[str, Any]
    prepare: Prepare
    calls: list[Eager]
    chain: list[Chain]

    def save(self, folder: Path) -> Path:
        """Write into `folder`/<gpu>/; the file appears whole or not at all. Returns its path."""
        content = {"format": FORMAT, **asdict(self), "scheme": scheme_name(self.scheme)}
        path = folder / slug(self.gpu) / f"costs-{scheme_name(self.scheme)}-{self.dtype}.json"
        write_whole(path, compact_json(content) + "\n")
        return path

    def report(self, heading: str = "##") -> str:
        """All tables as Markdown."""
        read = [(int(size), us) for size, us in self.run["ceilings"]["read"]]
        parts = [
            f"{heading} Calls and chains, {scheme_name(self.scheme)}, {self.dtype}, {self.gpu}",
            f"{self.run['date']}, commit {self.run['commit']}, torch {self.run['versions']['torch']}",
            f"{self.prepare}.",
            eager_table(self.calls),
            f"{CHAIN_LAYERS} times the four linear layers of an 8B model, each with its own weight, in one graph:",
            chain_table(self.chain, self.scheme, self.dtype, Ceilings(read)),
        ]
        return "\n\n".join(parts) + "\n"


FORMAT = "spearfish bench costs 1"


def measure_costs(
    implementations: Sequence[Implementation],
    tokens: Sequence[int],
    scheme: QuantScheme,
    dtype: str,
    device: Device,
    run: dict[str, Any],
) -> Costs:
    """Measure calls and the chain."""
    prepare = prepare_cost(scheme, dtype, device)
    calls = eager(implementations, scheme, dtype, device)
    chain = chains(implementations, tokens, scheme, dtype, device)
    return Costs(device.name, scheme, dtype, run, prepare, calls, chain)


def load_costs(path: Path) -> Costs:
    """Read a file of costs. Raises FormatError if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise FormatError(f"{path} has format {content['format']!r}, wanted {FORMAT!r}")
        return Costs(
            content["gpu"],
            parse_scheme(content["scheme"]),
            content["dtype"],
            content["run"],
            Prepare(**content["prepare"]),
            [Eager(**one) for one in content["calls"]],
            [Chain(**one) for one in content["chain"]],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} is no file of costs: {error!r}") from error
