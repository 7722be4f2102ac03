"""What the compressed-tensors formats share: the config block and the tensors that belong to activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spearfish.formats.base import LayerFacts, Tensors

# Scales of activations and caches that such files carry beside a weight; a weight-only runtime leaves them aside.
COMPANIONS = frozenset(
    {"bias", "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"}
    | {"q_scale", "k_scale", "v_scale", "weight_global_scale"}
)


def row_scales(tensors: Tensors, n: int) -> Tensors:
    """The tensors with a per-tensor `weight_scale` (one value, strategy "tensor") given to each of the n rows."""
    scale = tensors.get("weight_scale")
    if scale is None or scale.numel() != 1 or tuple(scale.shape) == (n, 1):
        return tensors
    return {**tensors, "weight_scale": scale.reshape(1, 1).expand(n, 1).contiguous()}


def ct_config(
    layers: Mapping[str, LayerFacts], ignore: Sequence[str], form: str, sparsity: Mapping[str, Any]
) -> dict[str, Any]:
    """A compressed-tensors `quantization_config`: one group per scheme; a single group targets all of Linear."""
    schemes: dict[tuple[Any, ...], list[str]] = {}
    for name, facts in layers.items():
        key = (facts.scheme.bits, facts.scheme.group_size, facts.scheme.symmetric, facts.act_order)
        schemes.setdefault(key, []).append(name)
    groups = {}
    for i, ((bits, group, symmetric, act_order), names) in enumerate(schemes.items()):
        if bits == 16:
            continue
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": symmetric,
            "strategy": "channel" if group is None else "group",
            "group_size": group,
            "dynamic": False,
            "actorder": "group" if act_order else None,
            "block_structure": None,
            "observer": "minmax",
            "observer_kwargs": {},
        }
        targets = ["Linear"] if len(schemes) == 1 else names
        groups[f"group_{i}"] = {
            "targets": targets,
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": dict(sparsity),
    }
