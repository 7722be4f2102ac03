"""The suite's own rule: a GPU test is skipped without a GPU, and with --require-gpu no skip passes for green."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GPU_TESTS = """
import pytest

def test_needs_a_gpu():
    assert True

def test_skips_itself():
    pytest.skip("some reason")
"""


@pytest.fixture
def suite(tmp_path: Path, repository: Path) -> Path:
    """A copy of the suite's rules with two GPU tests, one of which always skips itself."""
    shutil.copy(repository / "tests" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\naddopts = --strict-markers\n")
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "test_sample.py").write_text(GPU_TESTS)
    return tmp_path


def run(suite: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # No GPU to be seen, on a GPU machine too; and no plugins of the outer run.
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True)


def test_gpu_tests_skip_without_a_gpu(suite: Path) -> None:
    result = run(suite)
    assert result.returncode == 0
    assert "2 skipped" in result.stdout


def test_a_skip_fails_where_a_gpu_is_required(suite: Path) -> None:
    result = run(suite, "--require-gpu")
    assert result.returncode == 1
    assert "1 failed, 1 passed" in result.stdout
    assert "was skipped, and --require-gpu allows no skip" in result.stdout
