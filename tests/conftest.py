"""Rules of the whole suite: one GPU marker, one way to skip, the same conditions on every machine.

A test that needs a GPU lies in tests/gpu or carries `@pytest.mark.gpu`; without a GPU it is skipped, and nothing else
may skip it. With --require-gpu every skip, whatever its reason, is a failure: a GPU run that tests nothing is not
green.
"""

from __future__ import annotations

import os
from pathlib import Path

# Two pytest workers on two cores: more threads in each only get in one another's way. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A test that reaches for a hub is a mistake, and must fail here as it would on a machine without a network.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # GPU machines bring their own python, often without it; no GPU test needs it
    pass
else:
    # No deadline: the first call into torch is slow. The same examples in every run: red means a change, not luck.
    settings.register_profile(
        "suite", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("suite")

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="a skipped test is a failed test (for GPU machines)")


def pytest_report_header(config: pytest.Config) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    usable = torch.cuda.is_available()
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not usable and not config.getoption("--require-gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.skipped and item.config.getoption("--require-gpu") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and --require-gpu allows no skip: {call.excinfo}"
    return report


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def kernels_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel cache, empty when the run begins, which all its workers share: no kernel needs compiling twice."""
    place = tmp_path_factory.getbasetemp()
    return (place.parent if "PYTEST_XDIST_WORKER" in os.environ else place) / "kernels-of-this-run"
