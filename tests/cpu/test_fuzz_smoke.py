"""The fuzz campaign of tests/fuzz for a few seconds, and what it cannot reach: bombs, links, devices, long patterns."""

from __future__ import annotations

import json
import lzma
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spearfish import sparse24, text
from spearfish.checkpoint import CheckpointWriter, open_checkpoint, verify
from spearfish.checkpoint.config import interpret
from spearfish.checkpoint.patterns import Budget, Pattern
from spearfish.compress import Recipe
from spearfish.errors import FormatError, SpearfishError
from spearfish.formats import transforms
from spearfish.models import load_dense

FUZZ = Path(__file__).parents[1] / "fuzz"


def campaign(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FUZZ / "campaign.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_a_short_campaign_finds_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = campaign("--seconds", "10", "--runs", "6000", "--seed", "1", "--log", str(log))
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads(log.read_text())
    assert summary["executions"] > 500
    for name, counts in summary["targets"].items():
        assert not counts.get("bad seeds"), f"{name}: its own seeds are refused"
    assert sum(counts.get("accepted", 0) for counts in summary["targets"].values()) > 50


def test_inputs_that_once_failed(tmp_path: Path) -> None:
    inputs = sorted((FUZZ / "corpus").iterdir())
    assert sum(file.stat().st_size for file in inputs) < 100_000
    result = campaign("--replay", *map(str, inputs))
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(result.stdout.splitlines()) == len(inputs) > 20


PLANTED = """
import sys, os, time, subprocess
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import campaign
campaign.CORPUS, campaign.SECONDS = Path(sys.argv[2]), 0.5
runner = campaign.Runner("cache")
(target,) = runner.targets
def spin():
    while True:
        pass
def swallow():
    try:
        spin()
    except Exception:
        pass
faults = [
    lambda: 1 // 0,
    lambda: open(runner.box.root / "forbidden" / "secret.safetensors", "rb"),
    lambda: open(os.path.expanduser("~/.netrc")),
    lambda: (runner.box.root / "m" / "up").symlink_to(runner.box.root / "forbidden")
    or open(runner.box.root / "m" / "up" / "secret.safetensors"),
    lambda: os.system("true"),
    lambda: subprocess.run(["true"]),
    swallow,
]
for fault in faults:
    target.run = lambda data: fault()
    print(runner.execute(target, b"x"))
"""


def test_the_campaign_sees_planted_faults(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PLANTED, str(FUZZ), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    outcomes = [line for line in result.stdout.splitlines() if not line.startswith("FINDING")]
    assert outcomes == ["finding"] * 7, result.stdout + result.stderr


# ------------------------------------------------------------------------------------------------ bombs

MEASURE = """
import sys, time, torch
from pathlib import Path
from spearfish.checkpoint import convert, open_checkpoint
from spearfish.errors import SpearfishError
from spearfish.text import read_text
torch.set_num_threads(1)
(torch.ones(4, 4) @ torch.ones(4, 4)).half()
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
place, what = Path(sys.argv[1]), sys.argv[2]
Path("/proc/self/clear_refs").write_text("5")
before, start = peak(), time.perf_counter()
try:
    if what == "text":
        read_text(str(place))
    elif what == "convert":
        convert(place, place.with_name("out"), "dense")
    else:
        checkpoint = open_checkpoint(place)
        for name, info in checkpoint.linears.items():
            (checkpoint.values if info.format == "ct-sparse-bitmask" else checkpoint.weight)(name)
    print("accepted")
except SpearfishError as error:
    print("refused", error)
print(peak() - before, time.perf_counter() - start)
"""


def measure(place: Path, what: str) -> tuple[str, float, float]:
    """(what came out, bytes that the process grew by, seconds)."""
    command = [sys.executable, "-c", MEASURE, str(place), what]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    grown, seconds = lines[-1].split()
    return "\n".join(lines[:-1]), float(grown), float(seconds)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def hostile_folder(folder: Path, kind: str) -> Path:
    folder.mkdir()
    config: str = "{}"
    if kind == "empty bitmask":  # one bit for each weight, and no values: the most weights for the least file
        config = json.dumps({"sparsity_config": {"format": "sparse-bitmask"}})
        tensors = {
            "a.q_proj.shape": torch.tensor([1024, 8192]),
            "a.q_proj.compressed": torch.empty(0, dtype=torch.float16),
            "a.q_proj.bitmask": torch.zeros(1024, 1024, dtype=torch.uint8),
            "a.q_proj.row_offsets": torch.zeros(1024, dtype=torch.int64),
        }
        save_file(tensors, folder / "model.safetensors")
    elif kind == "many names":
        header = {str(i): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(30_000)}
        content = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content)
    elif kind == "many objects":
        config = '{"a": [' + '{"":0},' * 300_000 + "0]}"
        save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    else:
        dense = torch.randn(1024, 4096, generator=torch.manual_seed(0))
        weight = transforms.round_to_nearest(transforms.reproject_values(dense), 4, 128)
        folder.rmdir()
        with CheckpointWriter(folder, config={}, format=kind) as writer:
            writer.add_weight("a.q_proj", weight)
        return folder
    (folder / "config.json").write_text(config)
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured through /proc")
@pytest.mark.parametrize("kind", ["empty bitmask", "many names", "many objects", "marlin_24"])
def test_memory_and_time_follow_the_file(tmp_path: Path, kind: str) -> None:
    """The bounds that SECURITY.md states."""
    folder = hostile_folder(tmp_path / "m", kind)
    size = size_of(folder)
    bounds = {"empty bitmask": {"open": 100, "convert": 400}, "marlin_24": {"convert": 100}}
    for what, multiple in bounds.get(kind, {"open": 100}).items():
        outcome, grown, seconds = measure(folder, what)
        assert outcome == "accepted"
        assert grown < multiple * size + (64 << 20), f"{what}: {grown / size:.0f} times the file's {size} bytes"
        assert seconds < 10 + 10 * size / 2**20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured through /proc")
def test_a_compressed_bomb_is_refused(tmp_path: Path) -> None:
    packer = lzma.LZMACompressor(preset=0)
    with (tmp_path / "bomb.xz").open("wb") as file:
        for _ in range(300):
            file.write(packer.compress(bytes(1 << 20)))
        file.write(packer.flush())
    outcome, grown, _ = measure(tmp_path / "bomb.xz", "text")
    assert outcome.startswith("refused") and "holds more than 256 MiB" in outcome
    assert grown < 3 * text.MAX_UNPACKED


def test_compressed_text_in_several_pieces(tmp_path: Path) -> None:
    file = tmp_path / "a.xz"
    file.write_bytes(lzma.compress(b"One.\n\nTwo.") + b"\0" * 4 + lzma.compress(b"\n\nThree."))
    assert text.read_text(str(file)) == ["One.", "Two.", "Three."]
    file.write_bytes(lzma.compress(b"One.")[:-9])
    with pytest.raises(FormatError, match="cut off"):
        text.read_text(str(file))


# ------------------------------------------------------------------------------------------------ links and devices


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hostile_folder_small(tmp_path / "m")


def hostile_folder_small(out: Path) -> Path:
    dense = torch.randn(64, 64, generator=torch.manual_seed(0))
    dense = dense * sparse24.magnitude_mask(dense.abs())
    with CheckpointWriter(out, config={"model_type": "llama"}, format="dense") as writer:
        writer.add_weight("model.layers.0.q_proj", transforms.sparse_values(dense.half()))
    return out


def test_links_that_lead_out_are_not_followed(folder: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        outside = tmp_path / name
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)
        for read in (open_checkpoint, load_dense):
            with pytest.raises(FormatError, match=rf"{name}: this link leads out of its folder"):
                read(folder)
        (folder / name).unlink()
        outside.rename(folder / name)
    assert open_checkpoint(folder).linears
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert open_checkpoint(link).linears, "the folder itself may be a link"


def test_the_hubs_cache_is_read_through_its_links(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "blobs").mkdir()
    for i, file in enumerate(folder.iterdir()):
        (tmp_path / "hub" / "blobs" / str(i)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    assert open_checkpoint(snapshot).linears
    assert load_dense(snapshot).reader.names()


def test_private_files_are_not_carried_along(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "id_rsa"
    secret.write_text("private")
    for name in ("notes.txt", "LICENSE", "tokenizer.json"):
        (folder / name).symlink_to(secret)
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").symlink_to("vocab.json")
    with CheckpointWriter(tmp_path / "out", source=folder, config={}) as writer:
        writer.add_tensor("a", torch.ones(1))
    carried = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"vocab.json", "merges.txt"} <= carried
    assert not carried & {"notes.txt", "LICENSE", "tokenizer.json"}


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_pipes_and_devices_are_not_opened(folder: Path, name: str) -> None:
    """A pipe would wait for ever, and a device such as /dev/zero has no end."""
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(FormatError, match="not a plain file|no config.json"):
        open_checkpoint(folder)
    assert not verify(folder).ok
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(FormatError, match="leads out of its folder|no config.json"):
        open_checkpoint(folder)


# ------------------------------------------------------------------------------------------------ patterns

ATOMS = ("a", "b", r"\.", ".", "[ab]", "[^a]", r"\d", r"\w", "(a|b)", "(?:ab|b)", "(?=a)", "(?!b)", "^", "$", r"\b",
         "(a*b)", "[a-c1]", r"\s", "(?:)", r"\B", r"\Z", r"\D", "[^b-d_]")  # fmt: skip
REPEATS = ("", "", "", "*", "+", "?", "{2}", "{1,3}", "*?", "+?", "{0,2}")


def test_patterns_mean_what_they_mean_to_python() -> None:
    rng, compared = random.Random(0), 0
    for _ in range(6000):
        pattern = "".join(rng.choice(ATOMS) + rng.choice(REPEATS) for _ in range(rng.randint(1, 6)))
        if rng.random() < 0.2:
            pattern = f"({pattern}){rng.choice(('*', '+', '?', '{2}'))}"
        if rng.random() < 0.1:
            pattern = f"(?i){pattern}"
        try:
            wanted = re.compile(pattern)
        except re.error:
            with pytest.raises(FormatError, match="not a regular expression"):
                Pattern(pattern)
            continue
        found = Pattern(pattern)
        for _ in range(4):
            name = "".join(rng.choice("aab.1_Bc \n") for _ in range(rng.randint(0, 9)))
            assert found.search(name, Budget(name)) == bool(wanted.search(name)), (pattern, name)
            compared += 1
    assert compared > 12_000


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*$", "(.*)*x", "(a|aa)+$", "(.*a){20}x", "((a*)*)*b", ".*.*.*.*.*=x"]
)
def test_a_pattern_cannot_take_for_ever(pattern: str) -> None:
    config = {"quant_method": "gptq", "bits": 4, "dynamic": {f"+:{pattern}": {"bits": 8}}}
    start = time.perf_counter()
    interpret(config, "config.json").of("a" * 60 + "!")
    assert time.perf_counter() - start < 1


def test_patterns_that_are_refused() -> None:
    for pattern, why in (
        (r"(a)\1", "groupref"),
        ("(?<=a)b", "assert"),
        ("(?s)a", "flags other"),
        ("(" * 60 + ")" * 60, "50 deep"),
        ("a" * 20_000, "20000 letters"),
    ):
        with pytest.raises(FormatError, match=why):
            Pattern(pattern)
    pattern, name = Pattern("((((a?){30}){30}){30}){30}b"), "a" * 60
    with pytest.raises(FormatError, match="take too long"):
        pattern.search(name, Budget(name))


def test_many_layers_with_many_targets_are_quick() -> None:
    """Every layer of a large model named one by one, as our own writer does where schemes differ."""
    names = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(40) for j in range(25)]
    groups = {
        f"group_{bits}": {"targets": names[bits == 8 :: 2], "weights": {"num_bits": bits, "strategy": "channel"}}
        for bits in (4, 8)
    }
    quant = interpret({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": groups}, "c")
    start = time.perf_counter()
    assert [quant.of(name).bits for name in names] == [4, 8] * 500
    assert time.perf_counter() - start < 5


# ------------------------------------------------------------------------------------------------ recipes


@pytest.mark.parametrize(
    "values",
    [{"bits": "4"}, {"bits": True}, {"seed": 1.5}, {"ignore": "lm_head"}, {"ignore": [1]}, {"damping": float("nan")},
     {"group_size": "128"}, {"calibration": None}, {"equal_norm": 1}, [], 3],
    ids=str,
)  # fmt: skip
def test_recipes_of_the_wrong_kind(values: object) -> None:
    with pytest.raises(SpearfishError, match="recipe"):
        Recipe.from_dict(values)  # type: ignore[arg-type]


def test_recipes_survive_a_round_trip() -> None:
    recipe = Recipe(group_size=None, ignore=("lm_head",), recover=3, damping=1)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


# ------------------------------------------------------------------------------------------------ code in a folder


@pytest.mark.parametrize("model_type", ["llama", "strange"])
def test_code_in_a_folder_is_never_run(folder: Path, tmp_path: Path, model_type: str) -> None:
    """Nor is anybody asked whether it shall be: a question is answered too easily."""
    marker = tmp_path / "executed"
    for name in ("configuration_evil", "modeling_evil", "tokenization_evil"):
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    auto = {
        "AutoConfig": "configuration_evil.Config",
        "AutoModelForCausalLM": "modeling_evil.Model",
        "AutoTokenizer": ["tokenization_evil.Tokenizer", None],
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type, "auto_map": auto}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": auto["AutoTokenizer"]}})
    )
    program = (
        "import sys\n"
        "from spearfish import models\n"
        "from spearfish.errors import SpearfishError\n"
        "from spearfish.integrations.transformers import load\n"
        "def attempt(what):\n"
        "    try:\n"
        "        what()\n"
        "    except SpearfishError as error:\n"
        "        print('refused', error)\n"
        "attempt(lambda: models.load_dense(sys.argv[1], force_generic=True).skeleton())\n"
        "attempt(lambda: models.load_tokenizer(sys.argv[1]))\n"
        "attempt(lambda: load(sys.argv[1]))\n"
    )
    command = [sys.executable, "-c", program, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, input="y\ny\ny\ny\n", timeout=200)
    assert not marker.exists(), "code from the folder was run"
    assert "Do you wish to run" not in result.stdout + result.stderr
    assert result.returncode == 0, result.stdout + result.stderr
    assert "refused" in result.stdout
