"""Plots from result files, for a README or a talk: speed-up over m, roofline, and one for each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from math import log2
from pathlib import Path
from typing import Any

from spearfish.bench.problems import scheme_name
from spearfish.bench.report import OURS, Row, by_tokens, geometric_mean, ratio, rows
from spearfish.bench.results import Results, slug
from spearfish.errors import UnsupportedError

# One colour and marker for each implementation in every plot, chosen to be told apart in print and by the colour-blind.
_STYLES = {
    OURS: ("#d1495b", "o", "spearfish"),
    "marlin": ("#2e7d9a", "s", "Marlin (vLLM), dense"),
    "machete": ("#7a5ea8", "D", "Machete (vLLM), dense"),
    "humming": ("#d98f2b", "^", "Humming, dense"),
    "tinygemm": ("#6b8f3c", "v", "torch tinygemm, dense"),
    "gemlite": ("#8c6d5a", "P", "GemLite, dense"),
    "cusparselt": ("#3f6b57", "X", "cuSPARSELt, 2:4"),
    "marlin_24 (2024)": ("#9a9a9a", "h", "marlin_24 kernel of 2024"),
}
_GREY = "#555555"
_DPI = {"speedup": 110, "roofline": 110, "layers": 100}  # the last has nine panels
KINDS = ("speedup", "roofline", "layers")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError("plots need matplotlib: pip install 'spearfish[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_all(found: Sequence[Results], folder: Path, kinds: Sequence[str] = KINDS) -> list[Path]:
    """Draw the plots of every file into `folder`/<gpu>/. Returns the paths."""
    paths = []
    for results in found:
        here = [row for row in rows(results) if row.cublas is not None]
        if not here:
            continue
        base = folder / slug(results.gpu)
        base.mkdir(parents=True, exist_ok=True)
        stem = f"{scheme_name(results.scheme)}-{results.dtype}"
        for name in kinds:
            figure = _DRAW[name](here, results)
            path = base / f"{stem}-{name}.png"
            _save(figure, path, _DPI[name])
            paths.append(path)
    return paths


def _save(figure: Any, path: Path, dpi: int) -> None:
    """Lines and text in a few colours: 64 of them look the same and take a third of the bytes."""
    from PIL import Image

    drawn = BytesIO()
    figure.savefig(drawn, dpi=dpi)
    _pyplot().close(figure)
    image = Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    image.save(path, optimize=True)


def well_measured(here: Sequence[Row]) -> set[int]:
    """Token counts at which two thirds of the layers or more were measured: means over few beside means over all would
    draw dips that are none."""
    layers = Counter(row.point.m for row in here)
    return {m for m, count in layers.items() if 3 * count >= 2 * max(layers.values())}


def _title(results: Results) -> str:
    return f"{scheme_name(results.scheme)}, {results.dtype}, {results.gpu}"


def _names(here: Sequence[Row]) -> list[str]:
    present = {name for row in here for name in row.us}
    return [name for name in _STYLES if name in present]


def _axes_over_tokens(axes: Any, tokens: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    # Labels of powers of two, and of others only where they have room.
    powers = [m for m in tokens if m & (m - 1) == 0]
    shown = [m for m in tokens if m in powers or all(abs(log2(m / power)) > 0.7 for power in powers)]
    axes.set_xticks(shown, [str(m) for m in shown])
    axes.minorticks_off()
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _lines(axes: Any, here: Sequence[Row]) -> None:
    """For each implementation its speed as a multiple of cuBLAS, geometric mean of `here` at each m; and the roof."""
    groups = by_tokens(here)
    _axes_over_tokens(axes, list(groups))
    roof = [(m, geometric_mean(ratio(row.cublas, row.roof_us) for row in group)) for m, group in groups.items()]
    roof = [(m, value) for m, value in roof if value is not None]
    if roof:
        axes.plot(
            *zip(*roof, strict=True), color=_GREY, linestyle=(0, (4, 3)), linewidth=1.4, label="what the card allows"
        )
    axes.axhline(1.0, color=_GREY, linewidth=1.4, label=f"cuBLAS {here[0].point.dtype}, dense")
    for name in reversed(_names(here)):
        colour, marker, label = _STYLES[name]
        # Only where all layers were measured, else the mean is of other layers.
        means = [
            (m, geometric_mean(ratio(row.cublas, row.us[name]) for row in group))
            for m, group in groups.items()
            if all(name in row.us for row in group)
        ]
        if means:
            ours = name == OURS
            axes.plot(
                *zip(*means, strict=True),
                color=colour,
                marker=marker,
                markersize=7 if ours else 5,
                linewidth=2.8 if ours else 1.6,
                zorder=4 if ours else 3,
                label=label,
            )
    axes.set_ylim(bottom=0)


def _speedup(here: Sequence[Row], results: Results) -> Any:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(9.6, 5.4), layout="constrained")
    wide = well_measured(here)
    here = [row for row in here if row.point.m in wide]
    _lines(axes, here)
    counts = Counter(row.point.m for row in here).values()
    layers = f"{max(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    axes.set_title(f"Times as fast as cuBLAS · {_title(results)}", loc="left", fontsize=13)
    axes.set_xlabel(f"tokens m (geometric mean over {layers} layers)")
    axes.set_ylabel("speed-up")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=9.5)
    return figure


def _roofline(here: Sequence[Row], results: Results) -> Any:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(9.6, 5.4), layout="constrained")
    ceilings = results.ceilings(results.points[0])
    # Of the dense product's operations, over the bytes that the compressed weight, x and y take.
    intensity = [row.point.flops / row.point.bytes for row in here]
    rate = ceilings.rate(results.scheme.is_sparse)
    if ceilings.read and rate:
        bandwidth = max(size / us for size, us in ceilings.read) / 1e6  # TB/s
        corner = rate / bandwidth
        low, high = min(intensity) * 0.7, max(max(intensity) * 1.4, corner * 3)
        axes.plot([low, corner, high], [low * bandwidth, rate, rate], color=_GREY, linewidth=1.6)
        middle = (low * corner) ** 0.5
        axes.annotate(
            f"{bandwidth:.2f} TB/s read", (middle * 0.85, middle * bandwidth), color=_GREY, fontsize=9.5, ha="right"
        )
        axes.annotate(f"{rate:.0f} TFLOP/s sustained", (high, rate * 1.12), color=_GREY, fontsize=9.5, ha="right")
    for name in reversed([*_names(here), "cublas"]):
        colour, marker, label = _STYLES.get(name, (_GREY, ".", f"cuBLAS {results.dtype}"))
        pairs = [
            (row.point.flops / row.point.bytes, row.point.flops / us / 1e6)
            for row in here
            if (us := row.cublas if name == "cublas" else row.us.get(name))
        ]
        if pairs:
            size, order = (34, 4) if name == OURS else (16, 3)
            axes.scatter(*zip(*pairs, strict=True), s=size, color=colour, marker=marker, zorder=order, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(True, which="major", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title(f"Roofline · {_title(results)}", loc="left", fontsize=13)
    axes.set_xlabel("operations of the dense product for each byte of compressed weight, x and y")
    axes.set_ylabel("TFLOP/s, counted as dense")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=9.5, loc="lower right")
    return figure


def _layers(here: Sequence[Row], results: Results) -> Any:
    pyplot = _pyplot()
    shapes = list(dict.fromkeys((row.point.k, row.point.n) for row in here))
    columns = min(3, len(shapes))
    lines = -(-len(shapes) // columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(max(6.4, 4.2 * columns), 0.9 + 2.7 * lines), squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(shapes) :]:
        axes.set_visible(False)
    for axes, (k, n) in zip(grid.flat, shapes, strict=False):
        _lines(axes, [row for row in here if (row.point.k, row.point.n) == (k, n)])
        axes.set_title(f"{k} × {n}", loc="left", fontsize=10.5)
        axes.tick_params(labelsize=8)
        ticks = axes.get_xticks()
        if len(ticks) > 7:  # fourteen labels do not fit under a small plot
            axes.set_xticks(ticks[::2], [f"{tick:.0f}" for tick in ticks[::2]])
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], frameon=False, fontsize=9, loc="outside lower center", ncols=4)
    figure.suptitle(f"Times as fast as cuBLAS, by layer (k × n) over m · {_title(results)}", fontsize=13)
    return figure


_DRAW = {"speedup": _speedup, "roofline": _roofline, "layers": _layers}
