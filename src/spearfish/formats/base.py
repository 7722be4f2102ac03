"""What a checkpoint format is: a table of tensors, and two pure functions between those tensors and a `QuantWeight`.

A format names its tensors locally ("B_24"); the checkpoint adds the layer's name in front. `describe` reads only
shapes, dtypes and the config, so that a folder can be listed without reading its weights. `decode` and `encode` never
change their input, and every error names the layer that was passed as `name`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from spearfish import sparse24
from spearfish.errors import FormatError, ShapeError, UnsupportedError
from spearfish.scheme import QuantScheme, QuantWeight

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TensorSpec:
    """One row of a format's table.

    dtypes: what may be read; the first is what is written.
    n_dim, k_dim: the dimension along which n or k runs, in equal steps, or None. A tensor-parallel shard of columns
        a..b is the slice shape[n_dim] * a / n .. shape[n_dim] * b / n; likewise along k. Borders must be multiples of
        the format's tile.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    n_dim: int | None = None
    k_dim: int | None = None
    optional: bool = False

    def __str__(self) -> str:
        return f"{'/'.join(_short(dtype) for dtype in self.dtypes)} {list(self.shape)}"


@dataclass(frozen=True)
class Declared:
    """What the config of a checkpoint says about a layer. None everywhere means that it does not say.

    group_size: -1 is one group over all of k, as in the files.
    ours: the file carries the `spearfish` key, so known faults of other writers need not be allowed for.
    k: in_features of the whole layer, when the tensors are only one rank's rows of it.
    """

    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    act_order: bool | None = None
    ours: bool = False
    k: int | None = None

    def as_ours(self) -> Declared:
        """The same said by a file of our own writing."""
        return replace(self, ours=True)


@dataclass(frozen=True)
class LayerFacts:
    """What a writer knows of a layer when it makes the config: its scheme, and whether it has an act-order index."""

    scheme: QuantScheme
    act_order: bool = False


@dataclass(frozen=True)
class Description:
    """What a format can say of a layer without reading its values. `bits` is the width in the file."""

    n: int
    k: int
    scheme: QuantScheme
    bits: int


class Format(ABC):
    """One checkpoint format. Subclasses are stateless; `spearfish.formats.FORMATS` holds one object of each."""

    name: ClassVar[str]
    title: ClassVar[str]
    # The local names that tell this format from the others: a module that has one of them is stored in it.
    markers: ClassVar[frozenset[str]]
    # n and k of a file must be multiples of these.
    n_multiple: ClassVar[int] = 1
    k_multiple: ClassVar[int] = 1
    # Other local names that real files carry beside the weight and that do not belong to it.
    companions: ClassVar[frozenset[str]] = frozenset({"bias"})

    @abstractmethod
    def tensors(self, n: int, k: int, scheme: QuantScheme) -> tuple[TensorSpec, ...]:
        """The table: every tensor of a layer of this size."""

    @abstractmethod
    def describe(self, tensors: Tensors, declared: Declared | None = None, name: str = "weight") -> Description:
        """Size and scheme, from shapes and dtypes. Raises ShapeError or FormatError where they contradict each other
        or the config."""

    @abstractmethod
    def decode(self, tensors: Tensors, declared: Declared | None = None, name: str = "weight") -> QuantWeight:
        """The weight that the tensors mean, every value checked."""

    @abstractmethod
    def refusals(self, weight: QuantWeight) -> list[str]:
        """Why this format cannot hold the weight: every reason, an empty list if it can."""

    @abstractmethod
    def encode(self, weight: QuantWeight, name: str = "weight") -> dict[str, torch.Tensor]:
        """The tensors of the file. Raises UnsupportedError with every reason of `refusals`."""

    @abstractmethod
    def config(self, layers: Mapping[str, LayerFacts], ignore: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config` of a folder with these layers, `ignore` being the linear modules left alone."""

    def extensions(self, n: int, k: int, scheme: QuantScheme) -> list[str]:
        """Why the programs that this format was made for cannot run a layer that we can write: every reason."""
        return []

    def require(self, weight: QuantWeight, name: str) -> None:
        """Raise UnsupportedError with every reason why the weight cannot be held."""
        reasons = self.refusals(weight)
        if reasons:
            raise UnsupportedError(f"{name}: {self.name} cannot hold this {weight.scheme} weight: {'; '.join(reasons)}")

    def validate(self, tensors: Tensors, specs: tuple[TensorSpec, ...], name: str) -> None:
        """Compare the tensors with the table: none missing, none extra, every shape and dtype as declared."""
        known = {spec.name for spec in specs}
        missing = [spec.name for spec in specs if not spec.optional and spec.name not in tensors]
        extra = sorted(set(tensors) - known - self.companions)
        if missing or extra:
            parts = [f"missing {', '.join(missing)}"] if missing else []
            parts += [f"unexpected {', '.join(extra)}"] if extra else []
            raise FormatError(
                f"{name}: tensors of a {self.name} layer: {'; '.join(parts)} (wanted {', '.join(sorted(known))})"
            )
        for spec in specs:
            tensor = tensors.get(spec.name)
            if tensor is not None and (tuple(tensor.shape) != spec.shape or tensor.dtype not in spec.dtypes):
                raise ShapeError(f"{name}: {spec.name} is {_short(tensor.dtype)} {list(tensor.shape)}, wanted {spec}")


def need(tensors: Tensors, tensor: str, dims: int, name: str) -> torch.Tensor:
    """The tensor of that local name with that many dimensions, none of them zero. Raises FormatError or ShapeError."""
    found = tensors.get(tensor)
    if found is None:
        raise FormatError(f"{name}: tensor {tensor} is missing; the layer has {', '.join(sorted(tensors)) or 'none'}")
    if found.dim() != dims or found.numel() == 0:
        raise ShapeError(f"{name}: {tensor} has shape {list(found.shape)}, wanted {dims} non-empty dimensions")
    return found


def group_size(groups: int, k: int, declared: Declared, name: str, tensor: str) -> int | None:
    """The group size (None: one group) behind `groups` scale rows over k, checked against the config."""
    said = declared.group_size
    if said is not None:
        size = None if said == -1 else said
        wanted = 1 if size is None else -(-k // size)
        if groups != wanted:
            raise FormatError(
                f"{name}: the config says group_size {said}, which is {wanted} group(s) over k = {k},"
                f" but {tensor} holds {groups}"
            )
        return size
    if groups == 1:
        return None
    if k % groups:
        raise FormatError(
            f"{name}: {tensor} holds {groups} groups for k = {k}, which no single group size gives,"
            f" and the config does not say group_size"
        )
    return k // groups


def check_bits(bits: int, declared: Declared, name: str, tensor: str) -> None:
    """Raise FormatError if the config contradicts the width that a tensor's shape shows."""
    if declared.bits is not None and declared.bits != bits:
        raise FormatError(
            f"{name}: the config says {declared.bits} bits, but {tensor} has the shape of {bits}-bit codes"
        )


def marlin_refusals(weight: QuantWeight, k_multiple: int, n_multiple: int) -> list[str]:
    """What neither a dense nor a sparse Marlin file can hold of `weight`."""
    reasons = []
    if weight.scheme.bits == 16:
        reasons.append("its values are 16 bit: quantise them (--bits), or use ct-sparse-24-bitmask or dense")
    if weight.zeros is not None:
        reasons.append("it has zero points (gptq, gptq_v2 and ct-pack-quantized hold them)")
    if weight.group_index is not None:
        reasons.append("it has an act-order group index (gptq, gptq_v2 and ct-pack-quantized hold it)")
    for letter, size, multiple in (("k", weight.k, k_multiple), ("n", weight.n, n_multiple)):
        if size % multiple:
            reasons.append(f"{letter} = {size} is not a multiple of {multiple} (--pad adds zeros)")
    return reasons + scale_refusals(weight)


def scale_refusals(weight: QuantWeight) -> list[str]:
    """Why the scales cannot be written as fp16: every scale that multiplies a non-zero value must survive."""
    scales = weight.scales
    if scales is None or scales.dtype == torch.float16:
        return []
    half, wide = scales.to(torch.float16).double(), scales.double()
    # Rounding to the 11 bits of a normal fp16 is allowed (bf16 has fewer); losing more than that is not.
    lost = (half - wide).abs() > wide.abs() * 2**-11
    lost &= _used_groups(weight)
    if not lost.any():
        return []
    row, group = (int(i) for i in lost.nonzero()[0])
    return [
        f"scales are {_short(scales.dtype)} and the file holds float16: scale [{row}, {group}] ="
        f" {float(scales[row, group]):.4g} lies outside float16's range ({int(lost.sum())} such scales)"
    ]


def half_scales(weight: QuantWeight) -> torch.Tensor:
    """The scales as fp16 [n, groups]; a scale that no value uses is clamped into range."""
    if weight.scales is None:
        raise UnsupportedError("16-bit weights have no scales")
    if weight.scales.dtype == torch.float16:
        return weight.scales
    return weight.scales.float().clamp(max=torch.finfo(torch.float16).max).to(torch.float16)


def _used_groups(weight: QuantWeight) -> torch.Tensor:
    """bool [n, groups]: groups with at least one code away from its zero point."""
    index = weight.group_of_k().expand(weight.n, -1)
    if weight.positions is not None:
        index = index.gather(1, sparse24.kept_columns(weight.positions))
    zero: Any = weight.scheme.zero_point if weight.zeros is None else weight.zeros.gather(1, index)
    used = torch.zeros(weight.n, weight.groups, dtype=torch.int32, device=weight.device)
    return used.scatter_add_(1, index, (weight.codes != zero).int()) > 0


def main_scheme(layers: Mapping[str, LayerFacts]) -> QuantScheme:
    """The scheme of most layers, sparsity aside: what a config with room for one scheme says."""
    counts = Counter(replace(facts.scheme, sparsity="2:4") for facts in layers.values())
    return counts.most_common(1)[0][0] if counts else QuantScheme(4, 128)


def gptq_config(layers: Mapping[str, LayerFacts], ignore: Sequence[str], checkpoint_format: str) -> dict[str, Any]:
    """The block of the GPTQ family, with the keys that AutoGPTQ 0.7 wrote and its readers ask for.

    `ignore` lists the linear modules that stay plain. `dynamic` says the same, and which layers differ from the
    rest, in the words of GPTQModel and vLLM.
    """
    scheme = main_scheme(layers)
    block: dict[str, Any] = {
        "quant_method": "gptq",
        "checkpoint_format": checkpoint_format,
        "bits": scheme.bits,
        "group_size": scheme.group_size or -1,
        "sym": all(facts.scheme.symmetric for facts in layers.values()),
        "desc_act": any(facts.act_order for facts in layers.values()),
        "static_groups": False,
        "true_sequential": True,
        "damp_percent": 0.01,
        "ignore": sorted(ignore),
    }
    dynamic: dict[str, dict[str, Any]] = {f"-:^{re.escape(name)}$": {} for name in sorted(ignore)}
    for name, facts in layers.items():
        if (facts.scheme.bits, facts.scheme.group_size) != (scheme.bits, scheme.group_size):
            dynamic[f"+:^{re.escape(name)}$"] = {
                "bits": facts.scheme.bits,
                "group_size": facts.scheme.group_size or -1,
            }
    if dynamic:
        block["dynamic"] = dynamic
    return block


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
