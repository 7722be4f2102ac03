"""The folder beside the output where finished blocks wait, so that a killed run goes on where it stopped."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from spearfish.checkpoint.lock import Lock
from spearfish.compress.report import LayerReport
from spearfish.errors import FormatError, ShapeError, SpearfishError
from spearfish.scheme import QuantScheme, QuantWeight

QUICK = 256 << 20  # bytes of hidden states that are written after every block


def save_atomically(tensors: dict[str, torch.Tensor], file: Path, facts: dict[str, Any]) -> None:
    """safetensors with JSON facts in its header; the file appears whole or not at all, also after a power cut."""
    half = file.with_name(f".{file.name}.half")
    try:
        save_file({k: v.contiguous() for k, v in tensors.items()}, half, {"facts": json.dumps(facts)})
    except SafetensorError as error:
        half.unlink(missing_ok=True)
        raise OSError(
            f"{file} cannot be written: {error}. Make room; the same command then goes on from here"
        ) from error
    descriptor = os.open(half, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    half.replace(file)


def load_with_facts(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Inverse of `save_atomically`. Raises FormatError on a damaged file."""
    try:
        with safe_open(file, framework="pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
            return tensors, json.loads(handle.metadata()["facts"])
    except (SafetensorError, OSError, RecursionError, *_DAMAGE) as error:
        raise _damaged(file, error) from error


# What a file can raise that is whole safetensors but does not hold what was put into it.
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, OverflowError, ShapeError)


def _damaged(file: Path, error: Exception) -> FormatError:
    return FormatError(f"{file} is damaged ({type(error).__name__}: {error}); delete its folder to start anew")


class WorkFolder:
    """plan.json says which run this is; `block-00007.safetensors` holds a finished block; `hidden.safetensors` the
    hidden states that the next block will receive, and which block that is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._saved = time.monotonic()
        self._lock = Lock(path / "lock", f"{path} is in use by another process, which writes the same output folder")
        path.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()

    def __enter__(self) -> WorkFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        with contextlib.suppress(OSError):  # it holds something, or is gone
            self.path.rmdir()

    def check(self, facts: dict[str, Any]) -> None:
        """Raises SpearfishError if an unfinished run lies here that was begun with other facts."""
        plan = self.path / "plan.json"
        if not plan.exists():
            return
        try:
            stored = json.loads(plan.read_text())
            same = {name: stored[name] for name in facts} == json.loads(json.dumps(facts))
        except (RecursionError, *_DAMAGE):
            same = False
        if not same:
            raise SpearfishError(
                f"{self.path} holds an unfinished run with another model or recipe; delete it, or give another output"
                " folder"
            )

    def begin(self, plan: dict[str, Any]) -> None:
        """Says which run this is, or raises as `check` does."""
        self.check(plan)
        half = self.path / ".plan.half"
        half.write_text(json.dumps(plan, sort_keys=True, indent=1))
        half.replace(self.path / "plan.json")

    def _block(self, index: int) -> Path:
        return self.path / f"block-{index:05d}.safetensors"

    def save_block(
        self,
        index: int,
        weights: dict[str, QuantWeight],
        reports: list[LayerReport],
        outcome: dict[str, Any] | None = None,
    ) -> None:
        """Keeps the weights of one block, by full module name, and what its reconstruction came to."""
        tensors = {f"{name}.{part}": t for name, w in weights.items() for part, t in w.to("cpu").tensors().items()}
        schemes = {name: asdict(weight.scheme) for name, weight in weights.items()}
        facts = {"schemes": schemes, "reports": [asdict(report) for report in reports], "outcome": outcome}
        save_atomically(tensors, self._block(index), facts)

    def load_block(self, index: int) -> tuple[dict[str, QuantWeight], list[LayerReport], dict[str, Any] | None]:
        """Inverse of `save_block`. Raises FormatError on a damaged file."""
        file = self._block(index)
        tensors, facts = load_with_facts(file)
        try:
            reports = [LayerReport(**report) for report in facts["reports"]]
            return self._weights(tensors, facts["schemes"]), reports, facts["outcome"]
        except _DAMAGE as error:
            raise _damaged(file, error) from error

    @staticmethod
    def _weights(tensors: dict[str, torch.Tensor], schemes: dict[str, Any]) -> dict[str, QuantWeight]:
        return {
            name: QuantWeight(
                QuantScheme(**scheme),
                **{
                    part: tensors[f"{name}.{part}"]
                    for part in ("codes", "scales", "positions")
                    if f"{name}.{part}" in tensors
                },
            )
            for name, scheme in schemes.items()
        }

    def is_time_for(self, hidden: torch.Tensor, last: bool) -> bool:
        """Whether to call `save_hidden` now: each time if that is quick, else once a minute and after the last block.
        Blocks done since then are done again by the run that goes on."""
        now = time.monotonic()
        due = last or hidden.nbytes <= QUICK or now - self._saved >= 60
        if due:
            self._saved = now
        return due

    def save_hidden(self, next_block: int, hidden: torch.Tensor, goal: torch.Tensor | None = None) -> None:
        """Called after the block before `next_block` is safe. goal: what the dense model has at this place, if it is
        wanted."""
        tensors = {"hidden": hidden} | ({} if goal is None else {"goal": goal})
        save_atomically(tensors, self.path / "hidden.safetensors", {"next": next_block})

    def load_hidden(self) -> tuple[int, torch.Tensor | None, torch.Tensor | None]:
        """The next block to do, what it receives, and what the dense model has there: 0 and None at the start."""
        file = self.path / "hidden.safetensors"
        if not file.exists():
            return 0, None, None
        tensors, facts = load_with_facts(file)
        try:
            return int(facts["next"]), tensors["hidden"], tensors.get("goal")
        except _DAMAGE as error:
            raise _damaged(file, error) from error

    def save_facts(self, name: str, facts: Any) -> None:
        """Keeps what JSON can hold under a name of its own."""
        save_atomically({"empty": torch.empty(0)}, self.path / f"{name}.safetensors", {"kept": facts})

    def load_facts(self, name: str) -> Any:
        """Inverse of `save_facts`; None if there is nothing yet. Raises FormatError on a damaged file."""
        file = self.path / f"{name}.safetensors"
        if not file.exists():
            return None
        try:
            return load_with_facts(file)[1]["kept"]
        except _DAMAGE as error:
            raise _damaged(file, error) from error

    def delete(self) -> None:
        """Called when the output is complete."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()
