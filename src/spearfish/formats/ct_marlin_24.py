"""compressed-tensors "marlin-24" (0.4 to 0.14): the bytes of marlin_24 under other names.

    weight_packed = B_24    meta = B_meta    scale_packed = s

One difference: every public writer compared the group size with the halved k when it chose the order of the scales,
so files of k = 2 * group (k = 256, group 128) hold them in natural order although the kernel reads the permuted one.
Such files are read as they were meant. Ours are right, and marked by the `spearfish` key of the config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spearfish.formats.base import Declared, Description, LayerFacts
from spearfish.formats.compressed_tensors import COMPANIONS, ct_config
from spearfish.formats.marlin_24 import Marlin24
from spearfish.scheme import QuantScheme


class CtMarlin24(Marlin24):
    name = "ct-marlin-24"
    title = "compressed-tensors marlin-24: marlin_24 under other names"
    markers = frozenset({"meta", "scale_packed"})
    # vLLM's loader registered a weight_shape that no writer wrote; one that is there is left aside.
    companions = COMPANIONS | {"weight_shape"}
    codes_name, meta_name, scales_name = "weight_packed", "meta", "scale_packed"

    def scales_are_permuted(self, about: Description, declared: Declared) -> bool:
        k, group = declared.k or about.k, about.scheme.group_size
        if declared.ours or group is None:
            return about.scheme.groups(k) > 1
        return group < k // 2

    def extensions(self, n: int, k: int, scheme: QuantScheme) -> list[str]:
        reasons = super().extensions(n, k, scheme)
        return [*reasons, "vLLM took 4 bit only"] if scheme.bits != 4 else reasons

    def config(self, layers: Mapping[str, LayerFacts], ignore: Sequence[str]) -> dict[str, Any]:
        sparsity = {
            "format": "dense",
            "global_sparsity": 0.5,
            "registry_requires_subclass": False,
            "sparsity_structure": "2:4",
        }
        return ct_config(layers, ignore, "marlin-24", sparsity)
