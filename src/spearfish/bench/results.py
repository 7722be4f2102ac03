"""Result files: one JSON for each GPU, scheme and dtype, one line for each point.

    benchmarks/results/kernels/<gpu>/<scheme>-<dtype>.json
    {"format", "gpu", "scheme", "dtype",
     "runs":   [{"id", "date", "commit", "sources", versions, "state" before and after, "settings", "ceilings"}],
     "points": [{"k", "n", "m", "run", "us": {name: [median, lower, upper quartile]}, "sustained", "how", "missing"}]}

One file for all implementations of a (GPU, scheme, dtype), not one for each implementation and point: the times are
comparable only within a run, a reviewer sees them side by side, and 126 points are one diff of 60 kB instead of a
thousand files. A later run replaces the points that it measured again; the head of a run whose last point was replaced
goes with it. So a table can be filled in several short runs, and every point says which one it came from; and as
"sustained_run" which its kept-up times came from, if that was another.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from spearfish import __version__
from spearfish.bench.ceilings import Ceilings
from spearfish.bench.device import Device
from spearfish.bench.problems import Point, parse_scheme, scheme_name
from spearfish.bench.runner import Measured, Settings
from spearfish.errors import FormatError
from spearfish.scheme import QuantScheme

FORMAT = "spearfish bench 1"
_PACKAGE = Path(__file__).parents[1]
_PEERS = ("vllm", "humming-kernels", "gemlite", "triton", "nvidia-cublas", "nvidia-cusparselt-cu13", "cuda-core")


@dataclass
class Results:
    """One file."""

    gpu: str
    scheme: QuantScheme
    dtype: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)

    @property
    def file_name(self) -> str:
        return f"{scheme_name(self.scheme)}-{self.dtype}.json"

    def point(self, entry: dict[str, Any]) -> Point:
        """The point of one entry of `points`."""
        return Point(entry["k"], entry["n"], entry["m"], self.dtype, self.scheme)

    def ceilings(self, entry: dict[str, Any]) -> Ceilings:
        """The ceilings of the run that one entry of `points` came from."""
        found = next(run for run in self.runs if run["id"] == entry["run"])["ceilings"]
        return Ceilings([(int(size), us) for size, us in found["read"]], found["rates"], found.get("notes", {}))

    def measured_now(self) -> set[Point]:
        """The points that were measured with the kernels as they are now, and with a result of ours."""
        current = {run["id"] for run in self.runs if run["sources"] == _sources_digest()}
        return {self.point(entry) for entry in self.points if entry["run"] in current and "spearfish" in entry["us"]}

    def add(self, measured: Measured, run: str) -> None:
        """Put a point in, in place of an earlier one of the same k, n and m; times kept up stay until there are new
        ones, with the run that they came from."""
        point = measured.point
        key = (point.k, point.n, point.m)
        earlier = next((entry for entry in self.points if (entry["k"], entry["n"], entry["m"]) == key), {})
        self.points = [entry for entry in self.points if entry is not earlier]
        entry: dict[str, Any] = {"k": point.k, "n": point.n, "m": point.m, "run": run}
        entry["us"] = {name: [_short(value) for value in values] for name, values in measured.us.items()}
        if measured.sustained:
            entry["sustained"] = {name: _short(value) for name, value in measured.sustained.items()}
        elif "sustained" in earlier:
            entry["sustained"] = earlier["sustained"]
            entry["sustained_run"] = earlier.get("sustained_run", earlier["run"])
        # What ran, of ours: the way that was chosen, and those that were faster.
        ours = {name: values[0] for name, values in measured.us.items() if name in measured.how}
        slowest = ours.get("spearfish", math.inf)
        entry["how"] = {name: how for name, how in measured.how.items() if ours.get(name, math.inf) <= slowest}
        # Why an implementation takes no part at all stands in the head of the run, once.
        faults = {name: why for name, why in measured.missing.items() if why.startswith(("wrong", "failed"))}
        if faults:
            entry["missing"] = faults
        self.points.append(entry)
        self.points.sort(key=lambda entry: (entry["n"] * entry["k"], entry["n"], entry["m"]))
        head = next(head for head in self.runs if head["id"] == run)
        for name, error in measured.errors.items():
            head["errors"][name] = max(_short(error, 2), head["errors"].get(name, 0.0))
        for name in measured.missing.keys() - faults.keys():
            head["absent"].setdefault(name, measured.missing[name])

    def save(self, folder: Path) -> Path:
        """Write into `folder`/<gpu>/; the file appears whole or not at all. Returns its path."""
        path = folder / slug(self.gpu) / self.file_name
        write_whole(path, self.text())
        return path

    def text(self) -> str:
        """The file: readable heads, one line for each point."""
        used = {entry[name] for entry in self.points for name in ("run", "sustained_run") if name in entry}
        head = {
            "format": FORMAT,
            "gpu": self.gpu,
            "scheme": scheme_name(self.scheme),
            "dtype": self.dtype,
            "runs": [run for run in self.runs if run["id"] in used],
        }
        lines = compact_json(head).removesuffix("\n}")
        points = ",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in self.points)
        return f'{lines},\n "points": [\n{points}\n ]\n}}\n'


_BREAK = re.compile(r",\n\s*")
_SHORT_LINE = 150


def compact_json(content: dict[str, Any]) -> str:
    """Indented, but on one line what lists hold, times and curves, and what is short."""
    text = json.dumps(content, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\n\s*([^][{}]+?)\n\s*\]", lambda found: f"[{_BREAK.sub(', ', found[1])}]", text)

    def short(found: re.Match[str]) -> str:
        line = "{" + _BREAK.sub(", ", found[1]) + "}"
        return line if len(line) <= _SHORT_LINE else found[0]

    return re.sub(r"(?<=\s)\{\n\s*([^{}]+?)\n\s*\}", short, text)


def write_whole(path: Path, text: str) -> None:
    """Write a file, with its folders, that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def load(path: Path) -> Results:
    """Read a result file. Raises FormatError if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise FormatError(f"{path} has format {content['format']!r}, wanted {FORMAT!r}")
        scheme = parse_scheme(content["scheme"])
        return Results(content["gpu"], scheme, content["dtype"], content["runs"], content["points"])
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} is no result file of spearfish bench: {error!r}") from error


def load_all(folder: Path) -> list[Results]:
    """All result files below `folder`, by GPU and name."""
    others = ("baseline_", "costs-")
    return [load(path) for path in sorted(folder.glob("*/*.json")) if not path.name.startswith(others)]


def open_for(folder: Path | None, gpu: str, scheme: QuantScheme, dtype: str) -> Results:
    """The results of a (GPU, scheme, dtype) as they are in `folder`, or empty ones."""
    fresh = Results(gpu, scheme, dtype)
    path = None if folder is None else folder / slug(gpu) / fresh.file_name
    return load(path) if path is not None and path.exists() else fresh


def begin_run(
    results: Iterable[Results],
    device: Device,
    settings: Settings,
    ceilings: Ceilings,
    commit: str | None = None,
    libraries: Mapping[str, str] | None = None,
) -> str:
    """Add the head of a new run to `results`; returns its id. libraries: given peers' files with their digests."""
    head = run_head(device, settings, ceilings, commit, libraries)
    for one in results:
        one.runs.append(json.loads(json.dumps(head)))  # a copy for each, which differ in what is added later
    return str(head["id"])


def run_head(
    device: Device,
    settings: Settings,
    ceilings: Ceilings,
    commit: str | None = None,
    libraries: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """When, where and with what something is measured: all plain values."""
    now = datetime.now(UTC)
    return {
        "id": f"{now:%Y%m%dT%H%M%S}",
        "date": f"{now:%Y-%m-%d %H:%M} UTC",
        "commit": commit or _commit(),
        "sources": _sources_digest(),
        "versions": _versions() | dict(libraries or {}),
        "state": {"before": device.state()},
        "settings": asdict(settings),
        "ceilings": {
            "read": [list(pair) for pair in ceilings.read],
            "rates": ceilings.rates,
            "notes": ceilings.notes,
        },
        "errors": {},
        "absent": {},
    }


def end_run(results: Iterable[Results], identity: str, device: Device, outcome: str) -> None:
    """Note in the head of a run how it ended and the state of the card at its end."""
    state = device.state()
    for one in results:
        for head in one.runs:
            if head["id"] == identity:
                head["state"]["after"], head["outcome"] = state, outcome


def slug(gpu: str) -> str:
    """ "NVIDIA H200" -> "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")


def _short(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def _commit() -> str:
    """The commit of the checkout that this runs from, with a + if kernels or measuring were changed since."""
    try:
        command = ["git", "-C", str(_PACKAGE)]
        shown = subprocess.run(
            [*command, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, timeout=10
        )
        if shown.returncode:
            return "unknown"
        changed = subprocess.run(
            [*command, "status", "--porcelain", "--", "kernels", "bench"], capture_output=True, text=True, timeout=10
        )
        return shown.stdout.strip() + ("+" if changed.stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _sources_digest() -> str:
    """Of the kernels and their Python, since a copied tree knows no commit."""
    digest = hashlib.sha256()
    for path in sorted((_PACKAGE / "kernels").rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _versions() -> dict[str, str]:
    found = {"spearfish": __version__, "python": platform.python_version(), "torch": torch.__version__}
    found["cuda"] = str(torch.version.cuda)
    return found | {name: metadata.version(name) for name in _PEERS if _installed(name)}


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
