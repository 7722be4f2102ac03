"""A reduced set of products for compute-sanitizer: every kind of weight, both dtypes, split and unsplit, ragged edges.

    compute-sanitizer --tool memcheck --report-api-errors no python tests/gpu/sanitizer_set.py
    compute-sanitizer --tool initcheck python tests/gpu/sanitizer_set.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitizer_set.py few

(`few` leaves out the kinds that differ only in how a register is unpacked: racecheck is slow. API errors are off
because CUDA's Python bindings probe for functions that an older driver lacks.) Torch's caching allocator is off, so
that each tensor is an allocation of its own and one byte too far is seen. Every result is compared with the reference.
"""

from __future__ import annotations

import os
import sys

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from gpu_reference import check, random_weight

from spearfish.kernels.choose import families
from spearfish.kernels.config import Problem, chip_of
from spearfish.kernels.matmul import prepare
from spearfish.scheme import QuantScheme

FEW = (QuantScheme(4, 128), QuantScheme(8, 128, symmetric=False, sparsity="dense"))
SCHEMES = (
    *FEW,
    QuantScheme(4, 32, symmetric=False),
    QuantScheme(8),
    QuantScheme(16),
    QuantScheme(4, 64, sparsity="dense"),
)


def main(few: bool) -> None:
    chip, launches = chip_of(0), 0
    n, k = (136, 776) if few else (200, 1064)
    for scheme in FEW if few else SCHEMES:
        for dtype in (torch.float16,) if few else (torch.float16, torch.bfloat16):
            weight = random_weight(scheme, n, k, dtype)
            prepared = prepare(weight, dtype=dtype)
            for m in (1, 70):
                x = torch.randn((m, k), device="cuda").to(dtype)
                bias = torch.randn(n, device="cuda").to(dtype)
                problem = Problem(
                    prepared.kind, dtype == torch.bfloat16, m, n, k, prepared.granules, prepared.has_zeros
                )
                for family in families():
                    # The first and the last way to cut each shape: k whole, and in the most parts.
                    ways = [c for c in family.candidates(problem, chip) if family.why_not(c, problem, chip) is None]
                    by_shape: dict[object, list[object]] = {}
                    for way in ways:
                        by_shape.setdefault(getattr(way, "shape", way), []).append(way)
                    for same in by_shape.values():
                        for way in dict.fromkeys((same[0], same[-1])):
                            y = torch.full((m, n), float("nan"), dtype=dtype, device="cuda")
                            bound = family.bind(way, problem, 0)
                            bound(x, prepared.stream, prepared.column_scale, bias, y)
                            check(y, x, weight, bias)
                            launches += 1
    print(f"{launches} launches agree with the reference")


if __name__ == "__main__":
    main(few=sys.argv[1:] == ["few"])
