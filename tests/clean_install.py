"""sdist -> wheel -> a clean environment -> import and a tiny end-to-end: `make dist`, or with another --python.

Prints the wheel's size and fails at 1 MB. The environment gets the wheel's own requirements and nothing else: no
transformers, no cuda-core, no compiler.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

END_TO_END = """
import importlib.util, subprocess, sys, tempfile
from pathlib import Path
assert importlib.util.find_spec("transformers") is None, "transformers is here, so this is no clean environment"
try:
    import cuda.core
except ModuleNotFoundError:
    pass  # some builds of torch bring cuda.bindings, none brings cuda.core
else:
    raise AssertionError("cuda.core is here, so this is no clean environment")
import torch
import spearfish
from spearfish import reference, sparse24
from spearfish.checkpoint import CheckpointWriter, convert, open_checkpoint, verify
from spearfish.formats import transforms
from spearfish.nn import QuantLinear
place = Path(tempfile.mkdtemp())
assert "site-packages" in spearfish.__file__, spearfish.__file__
dense = torch.randn(128, 256, generator=torch.manual_seed(0))
with CheckpointWriter(place / "a", config={"model_type": "llama"}, format="dense") as writer:
    values = transforms.sparse_values((dense * sparse24.magnitude_mask(dense.abs())).half())
    writer.add_weight("model.layers.0.q_proj", values)
convert(place / "a", place / "b", "marlin_24", bits=4, group_size=128)
assert verify(place / "b").ok
weight = open_checkpoint(place / "b").weight("model.layers.0.q_proj")
x = torch.randn(3, 256)
y = QuantLinear(weight)(x)
assert torch.allclose(y.double(), reference.matmul(x, weight).double(), atol=1e-3)
command = Path(sys.executable).with_name("spearfish")
for verb in (["--version"], ["doctor"], ["inspect", str(place / "b")], ["verify", str(place / "b")]):
    done = subprocess.run([command, *verb], capture_output=True, text=True)
    assert done.returncode == 0, (verb, done.stdout, done.stderr)
    if verb == ["doctor"]:
        for words in ("cuda-core is not installed", "pip install 'spearfish[transformers]'"):
            assert words in " ".join(done.stdout.split()), done.stdout
help = subprocess.run([command, "compress", str(place / "a"), str(place / "c")], capture_output=True, text=True)
assert help.returncode != 0 and "pip install" in help.stderr and "Traceback" not in help.stderr, help
print("end to end: fine, python", sys.version.split()[0], "torch", torch.__version__)
"""


def run(*command: str | Path, cwd: Path) -> None:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command[:2]))} ... failed:\n{result.stdout[-3000:]}{result.stderr[-3000:]}")
    if result.stdout.strip():
        print(result.stdout.strip().splitlines()[-1], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the clean environment")
    parser.add_argument("--tests", nargs="*", help="then also install pytest and hypothesis and run these test files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        # The last commit, not the working tree: what is not committed would not be released.
        (place / "copy").mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x"], cwd=place / "copy", input=archive, check=True)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", place, place / "copy", cwd=place)
        (wheel,) = place.glob("*.whl")
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes")
        if wheel.stat().st_size >= 1_000_000:
            sys.exit("the wheel is larger than 1 MB")
        run(options.python, "-m", "venv", place / "venv", cwd=place)
        python = place / "venv" / "bin" / "python"
        install = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-compile"]
        run(*install, "-c", ROOT / "constraints.txt", wheel, cwd=place)
        run(python, "-m", "pip", "--disable-pip-version-check", "check", cwd=place)
        run(python, "-c", END_TO_END, cwd=place)
        if options.tests:
            run(*install, "-c", ROOT / "constraints.txt", "pytest", "pytest-timeout", "hypothesis", cwd=place)
            run(python, "-m", "pytest", "-q", *options.tests, cwd=place / "copy")


if __name__ == "__main__":
    main()
