"""For the GPU tests that use many kernels."""

from __future__ import annotations

import pytest
from gpu_reference import compile_all


@pytest.fixture(scope="session")
def compiled() -> None:
    """Every kernel of this GPU is in the cache."""
    print(compile_all())
