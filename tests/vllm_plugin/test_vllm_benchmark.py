"""benchmarks/engine.py inside a real vLLM, on a CPU: what it makes up and what it writes down."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from spearfish.integrations.vllm import FileLinearMethod


@pytest.fixture(scope="module")
def engine() -> ModuleType:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import engine

    return engine


def task(engine: ModuleType, weights: str, folder: Path, **options: Any) -> Any:
    head = {"id": "one", "machine": {"gpu": "CPU"}, "commit": "", "versions": {}, "engine": {}, "environment": {}}
    return engine.Task(
        "tiny", weights, (1, 3), (engine.Prefill(2, 48),), (), (engine.Queue(3, 16, 4),), 0, options, head, folder
    )


@pytest.mark.parametrize("weights", ["int4", "sparse24-int4", "sparse24-fp16"])
def test_every_kind_is_filled_and_says_something(engine: ModuleType, tmp_path: Path, weights: str) -> None:
    """Every number is finite, every layer is what it should be, and different prompts get different answers."""
    from vllm import SamplingParams

    if weights == "int4" and not engine.runs_dense_int4():
        with pytest.raises(SystemExit, match="no 4-bit kernel: it wants AVX-512"):
            engine.serve(task(engine, weights, tmp_path), tmp_path)
        return
    served = engine.serve(task(engine, weights, tmp_path), tmp_path)
    seen: dict[str, Any] = {"sparse": 0, "others": 0}

    def look(model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            for local, parameter in module.named_parameters(recurse=False):
                value = parameter.data
                assert not value.is_floating_point() or bool(value.isfinite().all()), (name, local)
                if "norm" in name:
                    assert bool((value == 1).all()), name
                elif isinstance(method, FileLinearMethod):
                    # On a CPU they run dense: two of every four are there.
                    kept = (value.reshape(-1, 4) != 0).sum(1)
                    assert int(kept.max()) == 2
                    assert 1.5 < float(kept.float().mean()) <= 2
                    assert len(torch.unique((value.reshape(-1, 4) != 0)[kept == 2], dim=0)) == 6
                    seen["sparse"] += 1
                elif value.dim() == 2:
                    assert len(torch.unique(value.reshape(-1)[:64])) > 32, (name, local)
                    seen["others"] += 1

    served.apply_model(look)
    assert seen["sparse"] == (8 if weights.startswith("sparse24") else 0)
    assert seen["others"] >= 2
    prompts = [{"prompt_token_ids": [5 + i, 17, 3 * i + 1]} for i in range(3)]
    answers = served.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) > 1
    del served
    gc.collect()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_point_is_written(
    engine: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """With two ranks in processes of their own, which know the load format too, and in a file of its own."""
    one = task(engine, "sparse24-int8", tmp_path, tensor_parallel_size=ranks)
    if ranks == 1:
        engine.measure(one)
    else:
        cores = sorted(os.sched_getaffinity(0))
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert engine.in_fresh_process(engine.measure, "spawn", one)
    content = json.loads((tmp_path / "cpu" / ("tiny.json" if ranks == 1 else "tiny-tp2.json")).read_text())
    entry = content["weights"]["sparse24-int8"]
    assert all(entry["decode"][batch]["ms"] > 0 for batch in ("1", "3"))
    assert len(entry["decode"]["1"]["windows"]) == engine.WINDOWS
    assert len(entry["prefill"]["2x48"]["times"]) == engine.PREFILLS
    assert entry["queue"]["3x16x4"]["tokens_per_second"] > 0
    sizes = engine.GEOMETRIES["tiny"]
    head = sizes.hidden // sizes.heads
    qkv = (sizes.heads + 2 * sizes.kv_heads) * head * sizes.hidden
    linears = sizes.layers * (qkv + sizes.heads * head * sizes.hidden + 3 * sizes.inner * sizes.hidden)
    norms = (2 * sizes.layers + 1) * sizes.hidden
    # On a CPU they run dense in bfloat16. Each rank has its part of all but the norms.
    cut = 2 * (linears + 2 * sizes.words * sizes.hidden) // ranks
    assert entry["bytes"] == {"linears": 2 * linears // ranks, "model": cut + 2 * norms}
    assert content["ranks"] == ranks
    assert engine.missing(one, engine.entry_of(one, content)) == ([], [], [], [])
