"""docs/serving.md and its charts, written from the result files of engine.py and from nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from spearfish.bench.report import number, table

CHARTS = "serving"
RIVAL = "int4"
# Names in tables and charts, and colours that can be told apart in print and by the colour-blind.
NAMES = {
    "fp16": ("fp16", "#9a9a9a"),
    "int4-exllama": ("int4, plain GPTQ kernel", "#c9b26b"),
    "int4-marlin": ("int4, Marlin", "#8fb8c7"),
    "int4": ("int4, dense", "#2e7d9a"),
    "sparse24-fp16": ("2:4 fp16", "#e3a7ad"),
    "sparse24-int8": ("2:4 int8", "#d98f2b"),
    "sparse24-int4": ("2:4 int4", "#d1495b"),
}
GEOMETRIES = {"yi-34b": "Yi-34B", "llama-3-8b": "Llama-3-8B"}
OUR_KERNELS = ("hopper", "hopper_decode", "hopper_wide", "portable", "portable_wide", "unpack_tiles")
# What 2:4 int4 must reach on this one, and what would be better still.
AIMED_AT = "yi-34b"
DECODE, DECODE_BEST = 1.45, {1: 1.75, 8: 1.75, 16: 1.75, 32: 1.7, 64: 1.7, 128: 1.7}
PREFILL, PREFILL_BEST = 1.25, 1.5
LINEARS, MODEL = {"int4": 0.77, "fp16": 0.21}, {"int4": 0.79, "fp16": 0.22}

_HEAD = """# Serving: end to end in vLLM

Written by `python benchmarks/engine.py page` from the files below `benchmarks/results/engine`; edit those by measuring
again, and the words here in `benchmarks/engine_page.py`.

## How it is measured

* **A whole model in a whole engine.** The geometry of a known model, every linear of it in one kind of weights,
  embeddings and head in fp16, served by vLLM with our plugin: scheduler, attention, sampler, all that a user gets.
* **Random weights, well formed.** A load format of the benchmark's own fills every layer on the GPU: random codes,
  random legal 2:4 patterns, scales that keep the activations' size. Speed does not depend on what a model says.
* **The rival** is dense int4 in groups of 128 in the same engine (compressed-tensors pack-quantized, symmetric), on the
  kernel that vLLM picks by itself. "Marlin" and "plain GPTQ kernel" are the same weights with the kernels before these
  forbidden; where requests are few, Marlin is the faster rival.
* **Decode:** that many requests with 32 tokens each; 8 steps to warm up, then 64 steps in 4 windows. The time of a step
  is the median over the windows, steps captured as CUDA graphs. Everything counts that a step takes, host work too.
* **Prefill:** from handing over the prompts to the last of their first tokens, median of five.
* **Requests:** all of them wait at the start; tokens of answers per second until the last is done, prompts and decode
  steps mixed as the scheduler likes, after a queue of short answers to warm up. The more is the better, in this one
  line.
* **One process each**, fresh. Kinds of one date ran one after another on the same GPU, those of another on another of
  its kind (the result files say which), and such cards differ by a few percent. Compilation mode 0: no Inductor, which
  fuses what lies between the linears and takes minutes.
* **On several GPUs** (a heading then says how many): the model is cut over them, tensor parallel, a process for each,
  the rivals too. Which of vLLM's classes add up the parts is listed there; none with NVLink multicast. Not measured
  yet.
* **Wanted** and **best hoped for** are what was aimed at for Yi-34B before it was measured; for bytes, in brackets.
* **Bytes** are those of the parameters as they run, whatever the file held; with several GPUs, those of one.

On your own GPU: `python benchmarks/engine.py run --geometry yi-34b --results FOLDER`; it needs vLLM and 80 GB for fp16.
"""

_NOTHING = """
## Results

None yet: no result file has been committed.
"""


@dataclass(frozen=True)
class Measured:
    """One result file: one geometry on one GPU, or over so many."""

    path: Path
    content: Mapping[str, Any]

    @property
    def ranks(self) -> int:
        """GPUs that the model was cut over."""
        return int(self.content.get("ranks", 1))

    @property
    def key(self) -> str:
        """Of the geometry."""
        return self.path.stem.removesuffix(f"-tp{self.ranks}")

    @property
    def geometry(self) -> str:
        return GEOMETRIES.get(self.key, self.key)

    @property
    def where(self) -> str:
        gpu = str(self.head(self.kinds[0])["machine"]["gpu"])
        return gpu if self.ranks == 1 else f"{self.ranks} × {gpu}"

    @property
    def has_aims(self) -> bool:
        """Whether the targets are set for this."""
        return self.key == AIMED_AT and self.ranks == 1

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in NAMES if kind in self.content["weights"]]

    @property
    def batches(self) -> list[int]:
        return sorted({int(batch) for kind in self.kinds for batch in self.entry(kind)["decode"]})

    @property
    def prefills(self) -> list[str]:
        return list(dict.fromkeys(each for kind in self.kinds for each in self.entry(kind)["prefill"]))

    def entry(self, kind: str) -> Mapping[str, Any]:
        return dict(self.content["weights"].get(kind, {"decode": {}, "prefill": {}}))

    def head(self, kind: str) -> Mapping[str, Any]:
        return next(head for head in self.content["runs"] if head["id"] == self.entry(kind)["run"])

    def decode(self, kind: str, batch: int) -> float | None:
        """Milliseconds."""
        found = self.entry(kind)["decode"].get(str(batch))
        return None if found is None else float(found["ms"])

    def prefill(self, kind: str, which: str) -> float | None:
        """Milliseconds."""
        found = self.entry(kind)["prefill"].get(which)
        return None if found is None else float(found["ms"])

    @property
    def queues(self) -> list[str]:
        return list(dict.fromkeys(each for kind in self.kinds for each in self.entry(kind).get("queue", {})))

    def queue(self, kind: str, which: str) -> float | None:
        """Tokens per second."""
        found = self.entry(kind).get("queue", {}).get(which)
        return None if found is None else float(found["tokens_per_second"])

    def size(self, kind: str, part: str) -> int | None:
        """Bytes of "linears" or of the "model"."""
        found = self.entry(kind).get("bytes")
        return None if found is None else int(found[part])


def load(folder: Path) -> tuple[list[Measured], list[Measured]]:
    """The geometries, largest first, one GPU before several, and the comparisons of real models."""
    files = [Measured(path, json.loads(path.read_text())) for path in sorted(folder.glob("*/*.json"))]
    geometries = [one for one in files if "weights" in one.content]
    order = list(GEOMETRIES)
    geometries.sort(
        key=lambda one: (one.path.parent.name, one.ranks, order.index(one.key) if one.key in order else len(order))
    )
    return geometries, [one for one in files if "answers" in one.content]


def times(above: float | None, below: float | None) -> str:
    """ "1.62×", or a dash."""
    return "–" if above is None or not below else f"{above / below:.2f}×"


# ------------------------------------------------------------------------------------------------------------ the page


def render(folder: Path) -> str:
    geometries, comparisons = load(folder)
    parts = [_HEAD]
    if geometries and not any(one.has_aims for one in geometries):
        parts.append(f"\n{GEOMETRIES[AIMED_AT]}, which the targets are set for, has not been measured yet.\n")
    parts += ["\n" + "\n".join(section(one)) for one in geometries]
    parts += ["\n" + "\n".join(compared(one)) for one in comparisons]
    if not geometries and not comparisons:
        parts.append(_NOTHING)
    return re.sub(r"\n{3,}", "\n\n", "".join(parts))


def section(one: Measured) -> Iterator[str]:
    kinds = one.kinds
    yield f"## {one.geometry} on {one.where}\n"
    yield f"![{one.geometry}]({CHARTS}/{chart_name(one)})\n"
    yield from provenance(one)
    names = [NAMES[kind][0] for kind in kinds]
    ours = "sparse24-int4"
    head = ["ms", *names, "2:4 int4 × int4", "× fp16", "wanted", "best hoped for"]

    def row(
        label: str,
        find: Callable[[str, Any], float | None],
        which: Any,
        digits: int,
        *aims: str,
        more_is_better: bool = False,
    ) -> list[str]:
        def gain(other: str) -> str:
            pair = find(other, which), find(ours, which)
            return times(*reversed(pair)) if more_is_better else times(*pair)

        return [label, *(number(find(kind, which), digits) for kind in kinds), gain(RIVAL), gain("fp16"), *aims]

    body = [
        row(f"decode {batch}", one.decode, batch, 2, f"≥ {DECODE}×", f"{DECODE_BEST.get(batch, 1.7)}×")
        for batch in one.batches
    ]
    for which in one.prefills:
        label = f"prefill {which.replace('x', ' × ')}"
        body.append(row(label, one.prefill, which, 1, f"≥ {PREFILL}× both", f"{PREFILL_BEST}×"))
    for which in one.queues:
        count, tokens, answer = which.split("x")
        label = f"{count} requests, {tokens} in, {answer} out: tokens/s"
        body.append(row(label, one.queue, which, 0, "–", "–", more_is_better=True))
    if not one.has_aims:
        head, body = head[:-2], [row[:-2] for row in body]
    yield table(head, body) + "\n"
    yield from sizes(one)
    yield from profiles(one)
    yield from kernels(one)


def families(one: Measured, kind: str) -> str:
    """Which families of our kernels ran at which numbers of tokens; empty for what is not ours."""
    ran: dict[str, set[int]] = {}
    for how in one.entry(kind).get("kernels", {}).values():
        for tokens, config in how.items() if isinstance(how, dict) else ():
            ran.setdefault(config.split(":")[0], set()).add(int(tokens))
    return "; ".join(f"{name} at {', '.join(map(str, sorted(tokens)))} tokens" for name, tokens in sorted(ran.items()))


def provenance(one: Measured) -> Iterator[str]:
    """When, with what and from which sources; one line for each run, then which kernels ran."""
    for run in one.content["runs"]:
        kinds = [NAMES[kind][0] for kind in one.kinds if one.entry(kind)["run"] == run["id"]]
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if name != "python")
        engine = ", ".join(f"{name} {value}" for name, value in run["engine"].items())
        environment = "".join(f", {name}={value}" for name, value in run["environment"].items())
        yield (
            f"* {run['date']}, commit {run['commit']}: {'; '.join(kinds)}. {versions}, driver"
            f" {run['machine'].get('driver', '–')}; {engine}{environment}"
        )
    for kind in one.kinds:
        if ran := families(one, kind):
            yield f"* {NAMES[kind][0]} ran on our kernels {ran}"
            if re.search(r"\bH[12]00\b", one.head(kind)["machine"]["gpu"]) and "hopper at" not in ran:
                yield "  (not on the Hopper kernels, which became the default of such GPUs later)"
        if added := one.entry(kind).get("adders"):
            yield f"* {NAMES[kind][0]}: {', '.join(added)} add up the parts of the GPUs"
    lacking = [name for kind, (name, _) in NAMES.items() if kind not in one.kinds]
    if lacking:
        yield f"* not measured: {'; '.join(lacking)}"
    yield ""


def sizes(one: Measured) -> Iterator[str]:
    body = []
    for part, label, limits in (("linears", "linears", LINEARS), ("model", "whole model", MODEL)):
        for kind in one.kinds:
            mine = one.size(kind, part)
            row = [f"{label}, {NAMES[kind][0]}", "–" if mine is None else f"{mine / 1e9:.2f}"]
            for other in (RIVAL, "fp16"):
                theirs = one.size(other, part)
                wanted = f" (≤ {limits[other]})" if kind == "sparse24-int4" and one.has_aims else ""
                row.append("–" if mine is None or not theirs else f"{mine / theirs:.3f}{wanted}")
            body.append(row)
    where = "weights in GPU memory" if one.ranks == 1 else "weights in the memory of each GPU"
    yield table([where, "GB", "of dense int4", "of fp16"], body) + "\n"


def profiles(one: Measured) -> Iterator[str]:
    """Where the GPU's time of a decode step goes, ours beside theirs."""
    batches = sorted({int(batch) for kind in one.kinds for batch in one.entry(kind).get("profile", {})})
    for batch in batches:
        yield f"### Where a decode step of batch {batch} goes\n"
        for kind in one.kinds:
            found = one.entry(kind).get("profile", {}).get(str(batch))
            if found is None:
                continue
            step = one.decode(kind, batch)
            whole = "" if step is None else f" of {1e3 * step:.0f} µs"
            yield f"{NAMES[kind][0]}: the GPU works {found['busy_us']:.0f} µs{whole}, {found['kernels']:.0f} kernels.\n"
            if "our_start_after_us" in found:
                low, middle, high = found["our_start_after_us"]
                yield (
                    f"Our kernels start {middle:+.2f} µs after the end of the kernel before them in the median"
                    f" ({low:+.2f} to {high:+.2f}); less than 0 means that they start before it has ended."
                    " Dependent launch lets them, but only once the kernel in front says so, and those that stand"
                    " between the linears (norms, rotary embedding, activation, attention) say nothing till they end.\n"
                )
            own = sum(us for name, us, _ in found["largest"] if name in OUR_KERNELS)
            if own:
                yield (
                    f"Our kernels take {own:.0f} µs of that, all the rest {found['busy_us'] - own:.0f} µs: what a step"
                    " would still cost if the quantised linears cost nothing.\n"
                )
            rows = [[f"`{name}`", f"{us:.0f}", f"{count:g}"] for name, us, count in found["largest"]]
            yield table(["kernel", "µs a step", "launches"], rows) + "\n"


def kernels(one: Measured) -> Iterator[str]:
    """Where it stands what ran the linears."""
    if any(one.entry(kind).get("kernels") for kind in one.kinds):
        file = f"../benchmarks/results/engine/{one.path.parent.name}/{one.path.name}"
        yield f'Which kernel ran which layer: "kernels" in the [result file]({file}).\n'


def compared(one: Measured) -> Iterator[str]:
    """A real model in vLLM and in transformers."""
    found = one.content
    yield f"## A real checkpoint, {found['model']}: vLLM beside transformers, on {found['machine']['gpu']}\n"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if name != "python")
    yield f"* {found['date']}, {found['machine']['gpu']}, commit {found['commit']}: {versions}\n"
    if found["kernels"]:
        yield (
            f"Greedy decoding in both, in {found['dtype']}, with our kernels; vLLM in mode {found['mode']}. The two"
            " engines round attention and norms in different ways, so a token whose lead over the second best is"
            " small may fall either way, and the rest after it. Leads are differences of log-probabilities in vLLM.\n"
        )
    else:
        yield f"Greedy decoding in both, in {found['dtype']}, the weights dequantised: there is no GPU here.\n"
    rows = []
    for each in found["answers"]:
        lead = each["lead at the first difference"]
        rows.append([each["question"], f"{each['same']} of {each['tokens']}", "–" if lead is None else number(lead, 4)])
    yield table(["question", "tokens that are the same", "lead where they part"], rows) + "\n"


# ----------------------------------------------------------------------------------------------------------- the chart


def chart_name(one: Measured) -> str:
    return f"{one.path.parent.name}-{one.path.stem}.png"


def draw(one: Measured, path: Path) -> None:
    """How many times as fast as fp16 (as dense int4, if that is missing) each kind decodes and prefills, and what its
    weights take."""
    import matplotlib
    from PIL import Image

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: list[tuple[str, dict[str, float | None]]] = [
        (str(batch), {kind: one.decode(kind, batch) for kind in one.kinds}) for batch in one.batches
    ]
    groups += [
        (f"prefill\n{which.replace('x', ' × ')}", {kind: one.prefill(kind, which) for kind in one.kinds})
        for which in one.prefills
    ]
    figure, (speed, memory) = pyplot.subplots(
        1, 2, figsize=(12.8, 5.6), layout="constrained", gridspec_kw={"width_ratios": [3.4, 1]}
    )
    base = next((kind for kind in ("fp16", RIVAL) if kind in one.kinds), one.kinds[0])
    width = 0.84 / len(one.kinds)
    for place, kind in enumerate(one.kinds):
        name, colour = NAMES[kind]
        bars = []
        for at, (_, by_kind) in enumerate(groups):
            theirs, mine = by_kind[base], by_kind[kind]
            if theirs and mine:
                bars.append((at + (place + 0.5) * width - 0.42, theirs / mine))
        left, height = [x for x, _ in bars], [y for _, y in bars]
        speed.bar(left, height, width=width * 0.94, color=colour, label=name, zorder=3)
        labelled = ("sparse24-int4", RIVAL) if len(one.kinds) < 5 else ("sparse24-int4",)  # more bars leave no room
        for x, y in bars if kind in labelled else ():
            weight = "bold" if kind == "sparse24-int4" else "normal"
            speed.annotate(f"{y:.2f}", (x, y), (0, 2), "data", "offset points", ha="center", weight=weight)
    speed.axhline(1, color="#555555", linewidth=1, zorder=4)
    speed.set_xticks(range(len(groups)), [label for label, _ in groups])
    speed.set_xlabel("requests at once (decode)")
    speed.set_title(f"Times as fast as {NAMES[base][0]}", loc="left", fontsize=12)
    speed.grid(True, axis="y", color="#e4e4e4", linewidth=0.8)
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=10.5, loc="outside lower center", ncols=len(labels))
    listed = [(kind, size) for kind in reversed(one.kinds) if (size := one.size(kind, "model")) is not None]
    for at, (kind, size) in enumerate(listed):
        memory.barh(at, size / 1e9, color=NAMES[kind][1], zorder=3)
        memory.annotate(f" {size / 1e9:.1f}", (size / 1e9, at), va="center")
    memory.set_yticks(range(len(listed)), [NAMES[kind][0].replace(", ", ",\n") for kind, _ in listed])
    memory.set_xlim(right=1.2 * max((size for _, size in listed), default=1) / 1e9)
    memory.set_title("GB of weights" if one.ranks == 1 else "GB of weights of each GPU", loc="left", fontsize=12)
    memory.grid(True, axis="x", color="#e4e4e4", linewidth=0.8)
    for axes in (speed, memory):
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    version = one.head(one.kinds[0])["versions"].get("vllm", "")
    title = f"{one.geometry} in vLLM {version} on {one.where}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=15)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=110)
    pyplot.close(figure)
    # A few colours: 64 of them look the same and take a third of the bytes.
    Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def write(results: Path, docs: Path) -> None:
    """The page, and a chart for each geometry."""
    (docs / CHARTS).mkdir(exist_ok=True)
    for one in load(results)[0]:
        draw(one, docs / CHARTS / chart_name(one))
    (docs / "serving.md").write_text(render(results), encoding="utf-8")
