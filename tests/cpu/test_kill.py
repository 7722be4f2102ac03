"""Killed or without room at random points: a folder is absent, the old one or whole, and the next run ends the same.

A few points of each kind; `make kill` runs many (tests/fuzz/killing.py, counts in docs/reliability.md).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).parents[1] / "fuzz"

# In a process of its own: it forks, which is safe only before anything has started threads.
FEW = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import killing
killing.torch.set_num_threads(1)
place = Path(sys.argv[2])
for part in "cvk":
    (place / part).mkdir()
for job, points in (
    (killing.compress_job(place / "c", True), 6),
    (killing.convert_job(place / "v"), 9),
    (killing.cache_job(place / "k"), 6),
):
    print(job.name, dict(killing.attack(job, points, seed=3)), flush=True)
"""


def run(program: str, place: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, str(FUZZ), str(place)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_nothing_is_lost(tmp_path: Path) -> None:
    result = run(FEW, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("killed") >= 3 and "error" in result.stdout


# What a writer without care would do: the folder grows in place.
CARELESS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import killing
def run(place):
    (place / "out").mkdir(exist_ok=True)
    for i in range(20):
        (place / "out" / str(i)).write_text("x" * 1000)
job = killing.Job("careless", Path(sys.argv[2]), run, lambda place: killing.digest(place / "out"))
killing.attack(job, 6, seed=1, kinds=("event",))
"""


def test_a_careless_writer_is_caught(tmp_path: Path) -> None:
    result = run(CARELESS, tmp_path)
    assert result.returncode == 1 and "AssertionError: careless event point" in result.stderr
