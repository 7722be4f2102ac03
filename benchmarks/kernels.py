"""The large tables: nine layers, fourteen m, every scheme and dtype, every rival; and the page made of them.

    python benchmarks/kernels.py run --budget 240s --peer-lib vllm/_C_stable_libtorch.abi3.so
    python benchmarks/kernels.py run --jobs int8-g128-fp16 --resume
    python benchmarks/kernels.py costs --peer-lib vllm/_C_stable_libtorch.abi3.so
    python benchmarks/kernels.py page

`run` works through the jobs below in their order, the most telling points first, saves after every point and stops
cleanly when the budget is spent. With --resume it goes on where an earlier run of the same sources stopped, so that a
table can be filled in several short runs. `costs` measures what a call, a graph node and `prepare` cost, and a chain of
32 layers. `page` writes docs/performance.md and its plots from the result files.

Needs torch, cuda-core and, for the rivals, what `spearfish bench --help` names; PYTHONPATH=src will do for spearfish.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from spearfish.bench.campaign import Campaign
from spearfish.bench.ceilings import CudaProbes, measure
from spearfish.bench.costs import measure_costs
from spearfish.bench.device import CudaDevice
from spearfish.bench.implementations import Implementation, ours_and_cublas, select
from spearfish.bench.page import PLOTS, render
from spearfish.bench.peers import all_peers, load_libraries
from spearfish.bench.plot import KINDS, draw_all, well_measured
from spearfish.bench.problems import SHAPE_SETS, TOKENS, parse_scheme, parse_seconds, parse_tokens
from spearfish.bench.report import means_table, rows
from spearfish.bench.results import load_all, run_head
from spearfish.bench.runner import Budget, Settings
from spearfish.errors import SpearfishError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "kernels"


@dataclass(frozen=True)
class Job:
    """One result file: the nine layers in one scheme and dtype."""

    scheme: str
    dtype: str
    tokens: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.scheme}-{self.dtype}"


# In the order of what they tell.
JOBS = (
    Job("int4-g128", "fp16", TOKENS),
    Job("int4-g128", "bf16", TOKENS),
    Job("int8-g128", "fp16", (1, 16, 64, 1024, 4096, 256)),
    Job("f16", "fp16", (16, 64, 256, 1024, 4096, 1)),
    Job("int4-channel", "fp16", (1, 16, 64, 1024)),
    Job("dense-int4-g128", "fp16", (1, 16, 64, 1024)),
)


def run(options: argparse.Namespace) -> None:
    wanted = options.jobs.split(",") if options.jobs else [job.name for job in JOBS]
    unknown = set(wanted) - {job.name for job in JOBS}
    if unknown:
        raise SystemExit(f"error: no job {', '.join(sorted(unknown))}; there are {', '.join(job.name for job in JOBS)}")
    libraries = load_libraries(options.peer_lib)
    device = CudaDevice()
    budget = Budget(device, parse_seconds(options.budget))
    ones = ours_and_cublas(every_family=options.families) + all_peers()
    if options.only:
        ones = select(ones, options.only.split(","))
    if options.what == "costs":
        if options.jobs or options.budget or options.resume or options.sustained:
            raise SystemExit("error: costs takes --m, --only, --results, --commit and --peer-lib alone")
        costs(options, device, ones, libraries)
        return
    for job in (job for job in JOBS if job.name in wanted):
        if not budget.left():
            break
        scheme = parse_scheme(job.scheme)
        campaign = Campaign(
            [(k, n, scheme) for k, n in SHAPE_SETS["nine"]],
            parse_tokens(options.m) if options.m else job.tokens,
            [job.dtype],
            ones,
            Settings(options.rounds, options.sustained),
            options.results,
            options.commit,
            options.resume,
            libraries,
        )
        print(f"== {job.name}", flush=True)
        found, outcome = campaign.run(device, CudaProbes(device), budget, lambda text: print(text, flush=True))
        print(f"{outcome.measured} of {outcome.asked} points{f'; {outcome.stopped}' if outcome.stopped else ''}")
        for results in found:
            print(means_table(rows(results)), flush=True)


def costs(
    options: argparse.Namespace, device: CudaDevice, ones: list[Implementation], libraries: dict[str, str]
) -> None:
    ceilings = measure(device, CudaProbes(device), seconds=0.2)
    tokens = parse_tokens(options.m or "1,16")
    for dtype in ("fp16", "bf16"):
        head = run_head(device, Settings(), ceilings, options.commit, libraries)
        found = measure_costs(ones, tokens, parse_scheme("int4-g128"), dtype, device, head)
        found.save(options.results)
        print(found.report(), flush=True)


def page(options: argparse.Namespace) -> None:
    plots = ROOT / "docs" / PLOTS
    for results in load_all(options.results):
        # Where few token counts were measured one plot says it all.
        kinds = KINDS if len(well_measured(rows(results))) >= 10 else KINDS[:1]
        for path in draw_all([results], plots, kinds=kinds):
            print(f"wrote {path.relative_to(ROOT)}")
    (ROOT / "docs" / "performance.md").write_text(render(options.results, plots), encoding="utf-8")
    print("wrote docs/performance.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "costs", "page"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    parser.add_argument("--jobs", help=f"of {', '.join(job.name for job in JOBS)}; all by default")
    parser.add_argument("--m", help="token counts instead of the jobs' own")
    parser.add_argument("--only", help="implementations, with commas")
    parser.add_argument("--families", action="store_true", help="also the best configuration of every kernel family")
    parser.add_argument("--budget", help="such as 240s; for all jobs together")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sustained", type=float, default=0.0, help="seconds that each is kept up besides")
    parser.add_argument("--peer-lib", type=Path, action="append", default=[], help="library of torch operators")
    parser.add_argument("--commit", help="of the sources, where they are no checkout")
    parser.add_argument("--resume", action="store_true", help="leave out points that these sources have measured")
    options = parser.parse_args()
    try:
        (page if options.what == "page" else run)(options)
    except SpearfishError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
