"""docs/performance.md, written from result files and from nothing else."""

from __future__ import annotations

from pathlib import Path

from spearfish.bench.costs import load_costs
from spearfish.bench.problems import SHAPE_SETS
from spearfish.bench.report import baseline_for, report
from spearfish.bench.results import Results, load_all, slug

PLOTS = "performance"

_HEAD = """# Performance

Written by `python benchmarks/kernels.py page` from the files below `benchmarks/results/kernels`; edit those by
measuring again, and the words here in `src/spearfish/bench/page.py`.

## How it is measured

* **Layers:** {shapes} (k × n). m counts tokens.
* **Checked first.** Every result is compared with float64 before it is timed: eight rows in full, and all rows through
  a random sum that any wrong tile moves. What is wrong is listed and not timed.
* **Cold weights, hot x.** Copies of a weight that together hold 2.5 times the L2 take turns, so that each is read from
  memory, as in a model; x and y stay where the layer before would have left them.
* **Graphs, turns, medians.** Calls are replayed from a CUDA graph of at least 1.5 ms; all implementations take turns,
  each turn begun by another one; the time is the median over the turns, and the files keep the quartiles. A kernel that
  starts to load its weight before the one ahead of it has ended gains by that here, as it does in a model.
* **Same work.** Dense rivals multiply a dense weight of the same k, n, bits and groups. cuBLAS multiplies a dense
  16-bit weight, stored either way round; the better one counts. Random data, since zeros run faster.
* **The roof** of a product is the larger of two times measured on the same card in the same run: that in which one
  graph node reads weight, x and y once, and that of its operations at the rate which sparse tensor cores hold for a
  second. "TFLOP/s" counts the operations of the dense product, "TB/s" the bytes of the compressed weight, x and y.
* **× best rival** compares with the fastest of all others at each layer and m, cuBLAS among them. Not every rival was
  measured everywhere: where humming was not, the factor may be too large.
* **Rivals:** Marlin and Machete of vLLM and humming are dense 4- and 8-bit kernels, tinygemm is torch's, cuSPARSELt is
  NVIDIA's library for 16-bit 2:4. **× 2024 kernel** compares with vLLM 0.14.1's marlin_24 kernel, measured once, not in
  these runs; with groups and 128 tokens or more it was sometimes wrong (a data race).
* **≥ 45 MB:** layers whose compressed weight is at least so large. **Kept up:** each runs for a second or more, so that
  power sets the clock. `*`: a mean over fewer layers than the others; `–`: not measured.

On your own GPU: `spearfish bench`, or `spearfish bench CHECKPOINT --m 1,16,256` for the layers of a model. Every point:
`spearfish bench --report --results benchmarks/results/kernels`.
"""

_NOTHING = """
## Results

None yet: no result file has been committed. What the kernels took while they were developed, without rivals beside them
in the same run, is in [facts.md](facts.md).
"""


def render(folder: Path, plots: Path | None = None) -> str:
    """The page for the result files in `folder`; plots that lie in `plots`/<gpu>/ are shown."""
    shapes = ", ".join(f"{k} × {n}" for k, n in sorted(SHAPE_SETS["nine"]))
    found = load_all(folder)
    parts = [_HEAD.format(shapes=shapes)]
    for results in found:
        shown = [f"![{path.stem}]({PLOTS}/{slug(results.gpu)}/{path.name})" for path in _plots(results, plots)]
        text = report(results, baseline_for(folder, results.gpu), details=False)
        parts.append("\n".join(["", text, *([*shown, ""] if shown else [])]))
    costs = [load_costs(path) for path in sorted(folder.glob("*/costs-*.json"))]
    parts += [f"\n{one.report()}" for one in costs]
    if not found and not costs:
        parts.append(_NOTHING)
    return "".join(parts)


def _plots(results: Results, plots: Path | None) -> list[Path]:
    if plots is None:
        return []
    return sorted((plots / slug(results.gpu)).glob(f"{Path(results.file_name).stem}-*.png"))
