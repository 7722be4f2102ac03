"""The wheel, built from the sdist, holds every file of the package: a kernel's header left out breaks users only."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path


def test_the_wheel_from_the_sdist_is_whole(tmp_path: Path, repository: Path) -> None:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=repository, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):  # a clean copy: setuptools would leave build folders in the checkout
        if (repository / name).is_file() and (name.startswith("src/") or "/" not in name):
            (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "copy" / name).write_bytes((repository / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", tmp_path / "copy"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    wanted = {str(path.relative_to(tmp_path / "copy" / "src")) for path in (tmp_path / "copy" / "src").rglob("*.*")}
    wanted = {name for name in wanted if (tmp_path / "copy" / "src" / name).is_file() and ".egg-info" not in name}
    assert inside == wanted
    assert wheel.stat().st_size < 1 << 20
