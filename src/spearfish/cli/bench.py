"""`spearfish bench`: time the kernels on this GPU beside cuBLAS, rivals and the card's ceilings; explain the choice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spearfish.errors import UnsupportedError

if TYPE_CHECKING:
    from spearfish.bench.device import Device
    from spearfish.bench.implementations import Implementation
    from spearfish.bench.problems import Point
    from spearfish.bench.results import Results
    from spearfish.kernels.config import Chip
    from spearfish.scheme import QuantScheme

    Layer = tuple[int, int, QuantScheme]

What = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WHAT",
        help="k x n of a layer (4096x28672), a set (nine, 8b), or the folder of a checkpoint, whose layers are taken."
        "  [default: nine]",
        show_default=False,
    ),
]
Tokens = Annotated[str, typer.Option("--m", help="Token counts, the most important first; or all.")]
Dtypes = Annotated[str, typer.Option("--dtype", help="fp16, bf16 or both: fp16,bf16.")]
Schemes = Annotated[
    str,
    typer.Option(
        "--scheme", help="Such as int4-g128, int8-channel, f16 (2:4 alone), dense-int4-g128; several with commas."
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", help="Measure this implementation (spearfish, cublas, marlin, ...) alone; may be repeated."),
]
PeerLib = Annotated[
    list[Path] | None,
    typer.Option("--peer-lib", help="A library of torch operators, for vLLM's Marlin and Machete; may be repeated."),
]
Top = Annotated[int, typer.Option("--top", min=0, help="Also time the N configurations of the lowest estimates.")]
Families = Annotated[bool, typer.Option("--families", help="Also time the best configuration of every kernel family.")]
BudgetText = Annotated[str | None, typer.Option("--budget", help="Stop cleanly after so long: 240s, 5m.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Turns in which each is timed once.")]
Sustained = Annotated[float, typer.Option("--sustained", min=0, help="Also keep each up for so many seconds.")]
ResultsFolder = Annotated[Path | None, typer.Option("--results", help="Folder of result files: write there, or read.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Leave out the points in --results that these same kernels were measured at.")
]
Plots = Annotated[Path | None, typer.Option("--plots", help="Folder to draw plots into (needs matplotlib).")]
Arch = Annotated[str | None, typer.Option("--arch", help="For --explain and --compile-time without that GPU: sm_90.")]


def bench(
    what: What = None,
    tokens: Tokens = "1,16,64,256",
    dtype: Dtypes = "fp16",
    scheme: Schemes = "int4-g128",
    only: Only = None,
    peer_lib: PeerLib = None,
    top: Top = 0,
    families: Families = False,
    budget: BudgetText = None,
    rounds: Rounds = 9,
    sustained: Sustained = 0.0,
    results: ResultsFolder = None,
    resume: Resume = False,
    plots: Plots = None,
    arch: Arch = None,
    explain: Annotated[bool, typer.Option("--explain", help="Only say what is chosen, and why.")] = False,
    compile_time: Annotated[bool, typer.Option("--compile-time", help="Only time the compiler.")] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Only cost of a call, of a graph node, of prepare.")] = False,
    chain: Annotated[bool, typer.Option("--chain", help="Only 32 layers of an 8B model in one graph.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Only print the tables of --results.")] = False,
) -> None:
    """Time the kernels on this GPU, beside cuBLAS, rivals that are there, and what the card allows.

    Every result is checked before it is timed. Weights rotate beyond the L2, calls are replayed from CUDA graphs, and
    all implementations take turns. The roof is the larger of two times: reading the bytes, and doing the operations at
    the rate that the card holds for a second; both are measured first.
    """
    from spearfish.bench.problems import parse_tokens

    if report:
        _print_reports(results, plots)
        return
    layers, counts = _layers(what or ["nine"], scheme)
    dtypes = _dtypes(dtype)
    ms = parse_tokens(tokens)
    if explain or compile_time:
        from spearfish.bench.problems import Point

        _without_gpu([Point(k, n, m, d, s) for k, n, s in layers for m in ms for d in dtypes], arch, explain)
        return
    from spearfish.bench.device import CudaDevice

    device = CudaDevice()
    implementations, libraries = _implementations(only, peer_lib or [], top, families)
    if eager or chain:
        _costs(device, implementations, layers[0][2], dtypes, ms, eager)
        return
    from spearfish.bench.campaign import Campaign
    from spearfish.bench.ceilings import CudaProbes
    from spearfish.bench.problems import parse_seconds
    from spearfish.bench.runner import Budget, Settings

    limit = Budget(device, parse_seconds(budget))
    settings = Settings(rounds, sustained)
    campaign = Campaign(layers, ms, dtypes, implementations, settings, results, resume=resume, libraries=libraries)
    found, outcome = campaign.run(device, CudaProbes(device), limit, typer.echo)
    _print(found, results, plots, counts)
    typer.echo(f"{outcome.measured} of {outcome.asked} points measured")
    if outcome.stopped:
        typer.echo(f"stopped early: {outcome.stopped}")


def _layers(what: list[str], schemes: str) -> tuple[list[Layer], dict[Layer, int]]:
    """The layers to measure, and how often each occurs in the checkpoints among them."""
    from spearfish.bench.problems import parse_scheme, parse_shapes

    layers: list[Layer] = []
    counts: dict[Layer, int] = {}
    for word in what:
        if Path(word).is_dir():
            from spearfish.checkpoint import open_checkpoint

            for info in open_checkpoint(Path(word)).linears.values():
                layer = (info.k, info.n, info.scheme)
                layers.append(layer)
                counts[layer] = counts.get(layer, 0) + 1
        else:
            wanted = [parse_scheme(text.strip()) for text in schemes.split(",")]
            layers += [(k, n, one) for one in wanted for k, n in parse_shapes(word)]
    return list(dict.fromkeys(layers)), counts


def _dtypes(text: str) -> list[str]:
    from spearfish.bench.problems import DTYPES

    words = [word.strip() for word in text.split(",")]
    if not set(words) <= set(DTYPES):
        raise UnsupportedError(f"--dtype is {text!r}, wanted {' or '.join(DTYPES)} or both with a comma")
    return words


def _implementations(
    only: list[str] | None, paths: list[Path], top: int, families: bool
) -> tuple[list[Implementation], dict[str, str]]:
    """Who takes part, and the libraries that were loaded with their digests."""
    from spearfish.bench.implementations import ours_and_cublas, select
    from spearfish.bench.peers import all_peers, load_libraries

    libraries = load_libraries(paths)
    found = ours_and_cublas(top, families) + all_peers()
    if not only:
        return found, libraries
    return select(found, only), libraries


def _without_gpu(points: list[Point], arch: str | None, explain: bool) -> None:
    from spearfish.bench.costs import compile_table
    from spearfish.bench.explain import explain as explained

    chip = _chip(arch)
    if explain:
        typer.echo("\n\n".join(explained(point, chip) for point in points))
    else:
        typer.echo(compile_table(points, chip))


def _chip(arch: str | None) -> Chip:
    import torch

    from spearfish.bench.explain import chip_named
    from spearfish.kernels.config import chip_of

    if arch:
        return chip_named(arch)
    if not torch.cuda.is_available():
        raise UnsupportedError("no GPU here to choose for: name an architecture, --arch sm_90")
    return chip_of(torch.cuda.current_device())


def _costs(
    device: Device,
    implementations: list[Implementation],
    scheme: QuantScheme,
    dtypes: list[str],
    tokens: tuple[int, ...],
    eager: bool,
) -> None:
    from spearfish.bench import costs
    from spearfish.bench.ceilings import CudaProbes, measure

    for dtype in dtypes:
        if eager:
            typer.echo(costs.eager_table(costs.eager(implementations, scheme, dtype, device)))
            typer.echo(costs.prepare_cost(scheme, dtype, device))
            continue
        ceilings = measure(device, CudaProbes(device), seconds=0.1)
        found = costs.chains(implementations, tokens, scheme, dtype, device)
        typer.echo(costs.chain_table(found, scheme, dtype, ceilings))


def _print_reports(folder: Path | None, plots: Path | None) -> None:
    from spearfish.bench.results import load_all

    if folder is None:
        raise UnsupportedError("--report prints what is in a folder of results: --results DIR")
    found = load_all(folder)
    if not found:
        raise UnsupportedError(f"no result file below {folder}; spearfish bench --results {folder} writes some")
    _print(found, folder, plots, {})


def _print(found: list[Results], folder: Path | None, plots: Path | None, counts: dict[Layer, int]) -> None:
    from spearfish.bench.report import baseline_for, layers_table, report, rows

    for results in found:
        if results.points:
            baseline = baseline_for(folder, results.gpu) if folder else None
            typer.echo(report(results, baseline, heading="#"))
            if counts:
                typer.echo(layers_table(rows(results), counts) + "\n")
    if plots is not None:
        from spearfish.bench.plot import draw_all

        for path in draw_all([results for results in found if results.points], plots):
            typer.echo(f"wrote {path}")
