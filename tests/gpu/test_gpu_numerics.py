"""The worst inputs of tests/emulation.py on the real kernels: errors stay under the bound derived in docs/numerics.md.

`python -m pytest tests/gpu/test_gpu_numerics.py --require-gpu -s` prints the worst by kind and dtype.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from emulation import KINDS, PATTERNS, UNIT, Kind, attack, error_of
from spearfish.kernels.choose import families
from spearfish.kernels.config import Problem, chip_of
from spearfish.kernels.matmul import matmul, prepare


@pytest.mark.parametrize("dtype", tuple(UNIT), ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_input_is_found_beyond_the_bound(kind: Kind, dtype: torch.dtype) -> None:
    worst, by = 0.0, ""
    for k in (128, 1024, 4096, 14336):
        for pattern in PATTERNS:
            for seed in range(8):
                x, weight = attack(kind, dtype, 64, k, pattern, seed)
                prepared = prepare(weight, "cuda", dtype=dtype)
                assert prepared.stream is not None, prepared.path
                for m in (4, 64):  # another tile, another way to split k
                    tokens = x.repeat(m // 4, 1)
                    y = torch.full((m, 64), float("nan"), dtype=dtype, device="cuda")
                    matmul(tokens.cuda(), prepared, out=y)
                    error = error_of(y.cpu(), tokens, weight)
                    assert error <= kind.bound(dtype, k), (k, pattern, seed, m)
                    worst, by = max((worst, by), (error / kind.bound(dtype, k), f"{pattern}, k = {k}"))
    print(f"{kind}, {dtype}: {worst:.0%} of the bound ({by})")
    assert worst > 0.1, "a search that finds nothing has not searched"


@pytest.mark.parametrize("dtype", tuple(UNIT), ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_configuration_on_the_worst_inputs(kind: Kind, dtype: torch.dtype) -> None:
    k, device = 1024, torch.cuda.current_device()
    chip = chip_of(device)
    for pattern in ("aligned", "cancel"):
        x, weight = attack(kind, dtype, 128, k, pattern, 1)
        prepared, tokens = prepare(weight, "cuda", dtype=dtype), x.repeat(5, 1)
        problem = Problem(
            prepared.kind, dtype == torch.bfloat16, len(tokens), 128, k, prepared.granules, prepared.has_zeros
        )
        for family in families():
            for config in family.candidates(problem, chip):
                if family.why_not(config, problem, chip) is None:
                    y = torch.full((len(tokens), 128), float("nan"), dtype=dtype, device="cuda")
                    bound = family.bind(config, problem, device)
                    bound(tokens.cuda(), prepared.stream, prepared.column_scale, None, y)
                    assert error_of(y.cpu(), tokens, weight) <= kind.bound(dtype, k), (str(config), pattern)
