"""One rank's rows and columns of a layer, taken from the packed tensors of its file.

A file's tensors can only be cut at the borders of its tiles, words and groups. So each tensor is cut at the nearest
such borders outside the window that a rank wants, the piece is decoded like a whole layer, and what is too much is
dropped from the weight:

    file     |-----|-----|-----|-----|-----|
    window             [-----------]
    cut            |-----|-----|-----|

That holds for every format and every size. Only a border inside a quad of 2:4, or between the columns of an act-order
layer, has no answer, and `why_not` says so before anything is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd, lcm

import torch

from spearfish.errors import ShapeError, UnsupportedError
from spearfish.formats.base import Declared, Format, TensorSpec
from spearfish.scheme import QuantScheme, QuantWeight

# No format packs more than 32 fields into a word, nor has finer borders that matter.
_WORD = 32


@dataclass(frozen=True)
class Stored:
    """What is known of a layer before its values are read.

    n, k: as stored, padding included. bits: the width in the file, which differs from the scheme's for 2- and 3-bit
    codes. declared: what the config says.
    """

    name: str
    form: Format
    n: int
    k: int
    scheme: QuantScheme
    bits: int
    declared: Declared

    def tensor_names(self) -> list[str]:
        """Local names of the tensors, optional ones included."""
        return [spec.name for spec in self.form.tensors(self.n, self.k, self.scheme)]


@dataclass(frozen=True)
class Window:
    """Rows n_start..n_stop and columns k_start..k_stop of a layer [n, k]."""

    n_start: int
    n_stop: int
    k_start: int
    k_stop: int

    def is_whole(self, n: int, k: int) -> bool:
        return (self.n_start, self.n_stop, self.k_start, self.k_stop) == (0, n, 0, k)


def why_not(stored: Stored, window: Window) -> str | None:
    """Why this window of the layer cannot be had, or None if it can."""
    if not (0 <= window.n_start < window.n_stop <= stored.n and 0 <= window.k_start < window.k_stop <= stored.k):
        return (
            f"rows {window.n_start}..{window.n_stop} and columns {window.k_start}..{window.k_stop} are not all inside"
            f" the stored [{stored.n}, {stored.k}]"
        )
    if stored.scheme.is_sparse and (window.k_start % 4 or window.k_stop % 4):
        return f"columns {window.k_start}..{window.k_stop} cut a quad of 2:4 (their borders must be multiples of 4)"
    cuts_columns = (window.k_start, window.k_stop) != (0, stored.k)
    if cuts_columns and stored.declared.act_order and stored.scheme.group_size is not None:
        return "its groups are out of order along k (act-order), so a part of the columns has no groups of its own"
    if stored.bits not in (4, 8, 16) and not window.is_whole(stored.n, stored.k):
        return f"codes of {stored.bits} bits are only read as a whole"
    return None


def cut(stored: Stored, window: Window, local: str, tensor: torch.Tensor) -> torch.Tensor:
    """The piece of a whole stored tensor that `window` needs, as a view. Raises ShapeError if the tensor's shape is not
    that of the layer."""
    cover = _cover(stored, window)
    if cover is None or tensor.numel() == 1:
        return tensor
    specs = {spec.name: spec for spec in stored.form.tensors(stored.n, stored.k, stored.scheme)}
    spec = specs.get(local)
    if spec is None or _stores_size(spec):
        return tensor
    for dim, along_n in ((spec.n_dim, True), (spec.k_dim, False)):
        if dim is not None:
            start, stop = (cover.n_start, cover.n_stop) if along_n else (cover.k_start, cover.k_stop)
            first, last = (_entries(stored, spec, tensor, dim, along_n, place) for place in (start, stop))
            tensor = tensor.narrow(dim, first, last - first)
    return tensor


def decode(stored: Stored, window: Window, tensors: Mapping[str, torch.Tensor]) -> QuantWeight:
    """The weight of `window` from the pieces that `cut` made. Raises what the format's `decode` raises, and
    UnsupportedError with the reason of `why_not`."""
    reason = why_not(stored, window)
    if reason:
        raise UnsupportedError(f"{stored.name}: {reason}")
    cover = _cover(stored, window)
    pieces = dict(tensors)
    if cover is not None:
        size = torch.tensor([cover.n_stop - cover.n_start, cover.k_stop - cover.k_start])
        for spec in stored.form.tensors(stored.n, stored.k, stored.scheme):
            if spec.name not in pieces:
                continue
            if _stores_size(spec):
                pieces[spec.name] = size.reshape(spec.shape).to(pieces[spec.name].dtype)
            elif _numbers_groups(spec):
                first = cover.k_start // (stored.scheme.group_size or stored.k)
                pieces[spec.name] = _count_from(pieces[spec.name], first, f"{stored.name}: {spec.name}")
    # The order of the scales and the size of the groups are those of the whole layer: a piece of one group looks like
    # a layer with one scale per column, and would be read as such.
    declared = replace(stored.declared, k=stored.k)
    if stored.scheme.bits < 16:
        declared = replace(declared, group_size=stored.scheme.group_size or -1)
    weight = stored.form.decode(pieces, declared, stored.name)
    if cover is None:
        return crop(weight, window, stored.name)
    inside = Window(
        window.n_start - cover.n_start,
        window.n_stop - cover.n_start,
        window.k_start - cover.k_start,
        window.k_stop - cover.k_start,
    )
    return crop(weight, inside, stored.name)


def crop(weight: QuantWeight, window: Window, name: str = "weight") -> QuantWeight:
    """Rows and columns of a weight. Where the window begins inside a group, groups become smaller, so that each again
    begins at a multiple of their size."""
    if window.is_whole(weight.n, weight.k):
        return weight
    rows, start, stop = slice(window.n_start, window.n_stop), window.k_start, window.k_stop
    scheme, sparse = weight.scheme, weight.scheme.is_sparse
    if sparse and (start % 4 or stop % 4):
        raise UnsupportedError(f"{name}: columns {start}..{stop} cut a quad of 2:4")
    if weight.group_index is not None and (start, stop) != (0, weight.k):
        raise UnsupportedError(f"{name}: an act-order layer cannot be cut along k")
    stored = slice(start // 2, stop // 2) if sparse else slice(start, stop)
    size, groups = scheme.group_size, slice(None)
    if size is not None and weight.group_index is None and weight.scales is not None:
        step = gcd(size, start)
        begins = torch.arange(start, stop, step, device=weight.device)
        scheme, groups = replace(scheme, group_size=step), begins // size  # type: ignore[assignment]  # an index
    return QuantWeight(
        scheme,
        weight.codes[rows, stored].contiguous(),
        None if weight.scales is None else weight.scales[rows][:, groups].contiguous(),
        None if weight.positions is None else weight.positions[rows, start // 4 : stop // 4].contiguous(),
        None if weight.zeros is None else weight.zeros[rows][:, groups].contiguous(),
        weight.group_index,
    )


def _cover(stored: Stored, window: Window) -> Window | None:
    """The smallest window around `window` whose borders the file can be cut at; None if it can only be read whole."""
    if window.is_whole(stored.n, stored.k):
        return None
    specs = stored.form.tensors(stored.n, stored.k, stored.scheme)
    if any(spec.n_dim is None and spec.k_dim is None and not _stores_size(spec) for spec in specs):
        return None
    n_block = lcm(stored.form.n_multiple, _WORD)
    k_block = lcm(stored.form.k_multiple, _WORD, stored.scheme.group_size or 1)
    return Window(
        window.n_start // n_block * n_block,
        min(-(-window.n_stop // n_block) * n_block, stored.n),
        window.k_start // k_block * k_block,
        min(-(-window.k_stop // k_block) * k_block, stored.k),
    )


def _stores_size(spec: TensorSpec) -> bool:
    """Whether the tensor holds n and k themselves, so that a piece needs its own."""
    return spec.n_dim is None and spec.k_dim is None and torch.Size(spec.shape).numel() == 2


def _numbers_groups(spec: TensorSpec) -> bool:
    """Whether the tensor holds the group of every column, counted from the layer's first."""
    return spec.n_dim is None and spec.k_dim == 0 and len(spec.shape) == 1


def _count_from(index: torch.Tensor, first: int, name: str) -> torch.Tensor:
    """The group numbers of a piece whose first group is `first`. -1 everywhere means that a file has none."""
    if bool((index == -1).all()):
        return index
    if bool((index < first).any()):
        raise UnsupportedError(f"{name}: the groups are out of order along k (act-order), so columns cannot be cut")
    return index - first


def _entries(stored: Stored, spec: TensorSpec, tensor: torch.Tensor, dim: int, along_n: bool, place: int) -> int:
    """How many entries along `dim` lie before row or column `place`: as many as a layer of that size would have."""

    def of(count: int) -> int:
        n, k = (count, stored.k) if along_n else (stored.n, count)
        table = {each.name: each for each in stored.form.tensors(n, k, stored.scheme)}
        return table[spec.name].shape[dim]

    total = stored.n if along_n else stored.k
    found = tensor.shape[dim] if dim < tensor.dim() else 0
    if found == of(total):
        return of(place)
    if found == total:  # a variant of the tensor that is not packed along this dimension
        return place
    raise ShapeError(
        f"{stored.name}: {spec.name} has shape {list(tensor.shape)}, a layer [{stored.n}, {stored.k}] wants {spec}"
    )
