"""What compression did: per layer and in all, as a dataclass, as JSON and as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

# Relative output error of a layer above which it is named, and the mean over all layers above which the whole model is
# called bad. Round to nearest on magnitude masks lies near 0.1 and ruins small models; good solvers stay below 0.05.
BAD_LAYER = 0.30
BAD_MEAN = 0.08


@dataclass(frozen=True)
class LayerReport:
    """One linear. errors are ‖(W − Ŵ) X‖² / ‖W X‖² on its compressed inputs: `naive` for the largest magnitudes and
    round to nearest, `error` for what was kept. sparsity: share of exact zeros."""

    name: str
    n: int
    k: int
    scheme: str
    naive: float
    error: float
    sparsity: float
    seconds: float
    remark: str | None = None


@dataclass
class Report:
    """The whole run. seconds exclude what an interrupted run had done before."""

    model: str
    out: str
    recipe: dict[str, Any]
    calibration: dict[str, Any]
    layers: list[LayerReport] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    reconstruct: list[dict[str, Any]] = field(default_factory=list)
    budget: dict[str, Any] | None = None
    recover: dict[str, Any] | None = None
    bytes_before: int = 0
    bytes_after: int = 0
    seconds: float = 0.0
    memory_estimate: int = 0
    memory_peak: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def mean_error(self) -> float:
        """Mean relative error over the layers, weighted by their size."""
        size = sum(layer.n * layer.k for layer in self.layers)
        return sum(layer.error * layer.n * layer.k for layer in self.layers) / max(size, 1)

    @property
    def reconstruction(self) -> dict[str, Any] | None:
        """Mean distance behind blocks trained together before and after it, how many blocks were trained and how many
        kept what they learnt; None if none was trained."""
        if not self.reconstruct:
            return None
        mean = {key: sum(o[key] for o in self.reconstruct) / len(self.reconstruct) for key in ("before", "after")}
        blocks = sum(len(o["blocks"]) for o in self.reconstruct)
        kept = sum(len(o["blocks"]) for o in self.reconstruct if o["kept"])
        return mean | {"blocks": blocks, "kept": kept}

    @property
    def fell_back(self) -> list[str]:
        """Layers that needed something unusual."""
        return [layer.name for layer in self.layers if layer.remark]

    def judge(self) -> None:
        """Adds the warnings that the layers' errors call for."""
        bad = [layer for layer in self.layers if not layer.error < BAD_LAYER]
        if bad:
            worst = max(bad, key=lambda layer: layer.error)
            self.warnings.append(
                f"quality: {len(bad)} layers lose more than {BAD_LAYER:.0%} of their output ({worst.name}:"
                f" {worst.error:.0%}); keep them dense with --dense-layers, or use smaller groups"
            )
        if self.layers and not self.mean_error < BAD_MEAN:
            self.warnings.append(
                f"quality: the layers lose {self.mean_error:.1%} of their output on average; above {BAD_MEAN:.0%} a"
                " model is usually unusable. Try --method admm, --recover or --dense-layers"
            )
        if self.fell_back:
            self.warnings.append(
                f"{len(self.fell_back)} layers needed special treatment, see the remarks in the report"
            )

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"mean_error": self.mean_error}, indent=1) + "\n"


def table(report: Report) -> Any:
    """A rich table with one line per layer."""
    from rich.table import Table

    lines = Table(title=f"{report.model}: relative error of each layer's output")
    for column, justify in (("layer", "left"), ("n x k", "right"), ("scheme", "left"), ("naive", "right")):
        lines.add_column(column, justify=justify)  # type: ignore[arg-type]
    for column in ("error", "zeros", "seconds"):
        lines.add_column(column, justify="right")
    lines.add_column("remark")
    for layer in report.layers:
        lines.add_row(
            layer.name,
            f"{layer.n} x {layer.k}",
            layer.scheme,
            f"{layer.naive:.4f}",
            f"{layer.error:.4f}",
            f"{layer.sparsity:.1%}",
            f"{layer.seconds:.1f}",
            layer.remark or "",
        )
    return lines
