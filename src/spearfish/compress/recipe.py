"""What to do to a model, as one frozen object that is echoed in the report and kept with the checkpoint."""

from __future__ import annotations

import fnmatch
import json
import math
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from spearfish.errors import SpearfishError
from spearfish.scheme import QuantScheme


@dataclass(frozen=True)
class Recipe:
    """bits: 4, 8, or 16 (2:4 only). group_size: k per scale, None for one scale per output row.

    method: a name of `methods.METHODS`. ignore: modules left as they are; dense_layers: modules quantised but not
    pruned; both are shell patterns (`*.mlp.down_proj`) or `re:` and a regular expression, matched against the module's
    full name. calibration: a file, a folder, `hub:NAME`, text that comes along ("articles", "addresses", "builtin" for
    both), or "self": the model writes it. num_samples windows of seq_len tokens each; layers are solved on the first
    262144 tokens of them at most, reconstruction learns on all.

    recover: seconds of distillation from the dense model afterwards, 0 for none; recover_steps counts its steps
    instead, so that two runs give the same. recover_text: what it learns on, as for calibration, or "auto": on a GPU
    what the model writes itself, elsewhere "articles". "self+notes.txt" mixes the prose of another source into that,
    three windows of ten.

    reconstruct: steps of training for each block, on its codes and scales, before the next is begun; 0 for none.
    together: that many neighbouring blocks are trained at once, each step on all of them.
    catch_up: what share of all that was lost before a layer it is asked to make good: its target is then not what the
    dense weights make of its inputs, but what the dense model has at its place. 0 for none of it, 1 for all; None is 1
    for admm and joint and 0 for the published methods.
    budget: share of the linears' bytes, counted as if all were dense, that stays dense in `bits`, where pruning would
    add the most error per byte; 0 for none.

    damping is a share of the Hessian's mean diagonal. A tenth, ten times what GPTQ takes, loses a little on the
    calibration text and wins more on any other: with presidents' addresses as calibration text, SmolLM2's layers lose
    5.9 % instead of 6.2 % of their output on encyclopaedia prose.
    """

    bits: int = 4
    group_size: int | None = 128
    method: str = "admm"
    ignore: tuple[str, ...] = ()
    dense_layers: tuple[str, ...] = ()
    calibration: str = "articles"
    num_samples: int = 32
    seq_len: int = 512
    seed: int = 0
    equal_norm: bool = True
    damping: float = 0.1
    recover: float = 0.0
    recover_text: str = "auto"
    recover_steps: int | None = None
    reconstruct: int = 0
    together: int = 1
    budget: float = 0.0
    catch_up: float | None = None

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.seq_len < 2:
            raise SpearfishError(
                f"calibration needs at least one window of two tokens, got num_samples {self.num_samples} and seq_len"
                f" {self.seq_len}"
            )
        if self.recover < 0 or (self.recover_steps or 0) < 0 or self.damping <= 0:
            raise SpearfishError(
                f"recover and recover_steps must not be negative, and damping must be positive; got {self.recover},"
                f" {self.recover_steps} and {self.damping}"
            )
        if self.catch_up is not None and not 0 <= self.catch_up <= 1:
            raise SpearfishError(f"catch_up is a share from 0 to 1, got {self.catch_up}")
        if self.reconstruct < 0 or not 0 <= self.budget < 1:
            raise SpearfishError(
                f"reconstruct counts steps and budget is a share from 0 up to 1, got {self.reconstruct} and"
                f" {self.budget}"
            )
        if self.together < 1:
            raise SpearfishError(f"together counts blocks that are trained at once, at least one, got {self.together}")
        self.scheme(sparse=True)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """Raises SpearfishError on an unknown key, naming the nearest valid one."""
        import difflib

        if not isinstance(values, dict):
            raise SpearfishError(f"a recipe is names with values, got {type(values).__name__}")
        kinds = {f.name: str(f.type) for f in fields(cls)}
        known = list(kinds)
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                raise SpearfishError(f"recipe has no key {key!r}" + (f", did you mean {near[0]!r}?" if near else ""))
            if not _fits(values[key], kinds[key]):
                raise SpearfishError(f"recipe: {key} is {values[key]!r}, wanted {kinds[key]}")
        tuples: dict[str, Any] = {key: tuple(values[key]) for key in ("ignore", "dense_layers") if key in values}
        return cls(**(values | tuples))

    def scheme(self, sparse: bool) -> QuantScheme:
        """The scheme of a pruned layer, or of one under `dense_layers`."""
        group = None if self.bits == 16 else self.group_size
        return QuantScheme(self.bits, group, sparsity="2:4" if sparse or self.bits == 16 else "dense")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and YAML."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


def _fits(value: Any, kind: str) -> bool:
    """Whether a value of a JSON or YAML file is of a field's kind, such as "int | None"."""
    if kind.startswith("tuple"):
        return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    if value is None:
        return kind.endswith("None")
    wanted = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}[kind.partition(" ")[0]]
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, wanted) and (isinstance(value, bool) == (kind == "bool"))


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a module's full name fits one of the patterns (shell style, or `re:...` anywhere in the name)."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                if re.search(pattern[3:], name):
                    return True
            except re.error as error:
                raise SpearfishError(f"pattern {pattern!r} is no regular expression: {error}") from error
        elif fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}"):
            return True
    return False


def seconds(text: str) -> float:
    """Seconds of "90", "90s", "5m" or "1.5h". Raises SpearfishError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not found:
        raise SpearfishError(f"{text!r} is no length of time; write 90s, 5m or 1.5h, and for recovery also 50steps")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def time_or_steps(text: str) -> tuple[float, int | None]:
    """Seconds of a length of time and None, or 0 and the number of "50steps". Raises SpearfishError."""
    found = re.fullmatch(r"\s*(\d+)\s*steps?\s*", text)
    return (0.0, int(found[1])) if found else (seconds(text), None)
