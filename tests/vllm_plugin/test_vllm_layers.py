"""vLLM's own linear layers on every rank of 1, 2, 4 and 8, without starting an engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.model_executor.layers.linear as host
import vllm.model_executor.parameter
from safetensors.torch import load_file, save_file
from torch import nn

from conftest import Shop
from spearfish import sparse24
from spearfish.checkpoint import CheckpointWriter, open_checkpoint
from spearfish.errors import FormatError, UnsupportedError
from spearfish.formats import transforms
from spearfish.integrations import vllm as plugin
from spearfish.kernels.prepare import to_stream
from spearfish.reference import dequantize
from spearfish.scheme import QuantWeight
from tiny import round_to_nearest

HEAD, HEADS, KV_HEADS, HIDDEN, INTER = 24, 8, 2, 160, 608
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
LAYER = "model.layers.0"
# Per layer [n, k]. No rank of 8 holds a multiple of 64 rows, nor of the group of 64 along k; k and v are fewer than 8.
SHAPES = {
    f"{LAYER}.self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    f"{LAYER}.self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    f"{LAYER}.self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
    f"{LAYER}.self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    f"{LAYER}.mlp.gate_proj": (INTER, HIDDEN),
    f"{LAYER}.mlp.up_proj": (INTER, HIDDEN),
    f"{LAYER}.mlp.down_proj": (HIDDEN, INTER),
}
MODEL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}


def dense_of(name: str, n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(len(name) + n + k))


def folder_of(out: Path, form: str, weights: dict[str, QuantWeight]) -> Path:
    with CheckpointWriter(out, config=MODEL, format=form, pad=True) as writer:
        for name, weight in weights.items():
            writer.add_weight(name, weight)
        writer.add_tensor("model.norm.weight", torch.ones(HIDDEN))
        writer.add_tensor(f"{LAYER}.plain.weight", torch.ones(64, HIDDEN))
    return out


@pytest.fixture(scope="module")
def weights() -> dict[str, QuantWeight]:
    return {name: round_to_nearest(dense_of(name, n, k), 4, 64) for name, (n, k) in SHAPES.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, QuantWeight]) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("folders")
    half = {}
    for name, (n, k) in SHAPES.items():
        values = dense_of(name, n, k).half()
        half[name] = transforms.sparse_values(values * sparse24.magnitude_mask(values.abs()))
    found = {form: folder_of(base / form, form, weights) for form in ("marlin_24", "ct-pack-quantized", "gptq")}
    return found | {"ct-sparse-24-bitmask": folder_of(base / "half", "ct-sparse-24-bitmask", half)}


def config_of(folder: Path, method: str = "gptq_marlin_24") -> plugin.FileConfig:
    plugin.register()
    config = plugin.host_class(method).from_config(
        json.loads((folder / "config.json").read_text())["quantization_config"]
    )
    config.maybe_update_config(str(folder), hf_config=None, revision=None)
    config.packed_modules_mapping = FUSED
    return config


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, vllm_config: Any) -> Iterator[Any]:
    """Sets which rank of how many vLLM's layers think they are on."""

    def be(rank: int, size: int) -> None:
        for module in (host, vllm.model_executor.parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)

    be(0, 1)
    yield be


def load(layer: nn.Module, folder: Path, names: list[str], shards: list[Any]) -> None:
    """Give the layer its tensors as vLLM does: by layer.load_weights if they are fused, else by the parameter."""
    checkpoint = open_checkpoint(folder)
    for name, shard in zip(names, shards, strict=True):
        for full in [each for each in checkpoint.entries if each.startswith(f"{name}.")]:
            local, tensor = full.removeprefix(f"{name}."), checkpoint.tensor(full)
            if shard is None:
                parameter = getattr(layer, local)
                parameter.weight_loader(parameter, tensor)
            else:
                tensor.shard_id = shard  # type: ignore[attr-defined]
                list(layer.load_weights([(local, tensor)]))
    layer.quant_method.process_weights_after_loading(layer)


def rows(n: int, rank: int, size: int) -> slice:
    return slice(n // size * rank, n // size * (rank + 1))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("form", "method"),
    [
        ("marlin_24", "gptq_marlin_24"),
        ("ct-pack-quantized", "gptq_marlin_24"),
        ("gptq", "gptq_marlin_24"),
        ("ct-sparse-24-bitmask", "sparse24"),
    ],
)
def test_every_rank_of_every_layer(ranks: Any, folders: dict[str, Path], form: str, method: str, size: int) -> None:
    folder = folders[form]
    checkpoint = open_checkpoint(folder)
    truth = {name: dequantize(checkpoint.weight(name)) for name in SHAPES}
    config = config_of(folder, method)
    torch.manual_seed(0)
    x, wide, heads = torch.randn(3, HIDDEN), torch.randn(3, INTER), torch.randn(3, HEADS * HEAD)
    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    for rank in range(size):
        ranks(rank, size)
        common = {"quant_config": config, "bias": False, "params_dtype": torch.float32}
        qkv = host.QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, prefix=f"{attention}.qkv_proj", **common)
        load(qkv, folder, [f"{attention}.{each}" for each in FUSED["qkv_proj"]], ["q", "k", "v"])
        kv_rank, kv_size = (rank, size) if size <= KV_HEADS else (rank // (size // KV_HEADS), KV_HEADS)
        wanted = torch.cat(
            [
                truth[f"{attention}.q_proj"][rows(HEADS * HEAD, rank, size)],
                truth[f"{attention}.k_proj"][rows(KV_HEADS * HEAD, kv_rank, kv_size)],
                truth[f"{attention}.v_proj"][rows(KV_HEADS * HEAD, kv_rank, kv_size)],
            ]
        )
        torch.testing.assert_close(qkv.quant_method.apply(qkv, x), x @ wanted.T)

        gate_up = host.MergedColumnParallelLinear(HIDDEN, [INTER, INTER], prefix=f"{mlp}.gate_up_proj", **common)
        load(gate_up, folder, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [0, 1])
        part = rows(INTER, rank, size)
        wanted = torch.cat([truth[f"{mlp}.gate_proj"][part], truth[f"{mlp}.up_proj"][part]])
        torch.testing.assert_close(gate_up.quant_method.apply(gate_up, x), x @ wanted.T)

        for name, given in ((f"{attention}.o_proj", heads), (f"{mlp}.down_proj", wide)):
            k = given.shape[1]
            down = host.RowParallelLinear(k, HIDDEN, prefix=name, **common)
            load(down, folder, [name], [None])
            part = rows(k, rank, size)
            wanted = given[:, part] @ truth[name][:, part].T
            torch.testing.assert_close(down.quant_method.apply(down, given[:, part]), wanted)

        whole = host.ReplicatedLinear(HIDDEN, INTER, prefix=f"{mlp}.up_proj", **common)
        load(whole, folder, [f"{mlp}.up_proj"], [None])
        torch.testing.assert_close(whole.quant_method.apply(whole, x), x @ truth[f"{mlp}.up_proj"].T)


def test_what_was_loaded_is_let_go(ranks: Any, folders: dict[str, Path]) -> None:
    config = config_of(folders["marlin_24"])
    name = f"{LAYER}.mlp.up_proj"
    layer = host.ReplicatedLinear(HIDDEN, INTER, bias=False, quant_config=config, prefix=name)
    load(layer, folders["marlin_24"], [name], [None])
    assert [each for each, _ in layer.named_parameters()] == ["weight"]
    assert not any(part.tensors for part in layer.quant_method.parts)
    assert config.report.layers == 1
    assert config.report.loaded > 0
    assert config.report.prepared == layer.weight.nbytes
    layer.quant_method.process_weights_after_loading(layer)  # vLLM may call it again
    assert config.report.layers == 1


def test_a_bias_is_added_once(ranks: Any, folders: dict[str, Path]) -> None:
    name = f"{LAYER}.mlp.up_proj"
    config = config_of(folders["marlin_24"])
    layer = host.ReplicatedLinear(HIDDEN, INTER, quant_config=config, prefix=name, params_dtype=torch.float32)
    load(layer, folders["marlin_24"], [name], [None])
    layer.bias.data.normal_()
    x = torch.randn(2, HIDDEN)
    torch.testing.assert_close(layer(x)[0], x @ layer.weight.T + layer.bias)


@pytest.mark.parametrize("fused", ["alike", "unlike"])
def test_the_kernels_op_compiles_without_a_break(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: str
) -> None:
    """On a GPU the layers hold tile streams. Here the same stream runs through the op's slow implementation."""
    names = [f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"]
    bits = {names[0]: 4, names[1]: 4 if fused == "alike" else 8}
    weights = {name: round_to_nearest(dense_of(name, INTER, HIDDEN), bits[name], 32) for name in names}
    folder = folder_of(tmp_path / "both", "marlin_24", weights)
    monkeypatch.setattr(plugin, "prepare", lambda weight, device, dtype, _: to_stream(weight, device, dtype))
    layer = host.MergedColumnParallelLinear(
        *(HIDDEN, [INTER, INTER]),
        prefix=f"{LAYER}.mlp.gate_up_proj",
        quant_config=config_of(folder),
        params_dtype=torch.float16,
    )
    load(layer, folder, names, [0, 1])
    layer.bias.data.normal_()
    streams = ["weight_packed"] if fused == "alike" else ["weight_packed", "weight_packed_1"]
    assert [each for each, _ in layer.named_parameters() if "bias" not in each] == streams
    truth = torch.cat([dequantize(weights[name], torch.float16) for name in names])
    x = torch.randn(5, HIDDEN).half()
    eager = layer(x)[0]
    torch.testing.assert_close(eager, nn.functional.linear(x, truth, layer.bias), atol=2e-2, rtol=2e-3)
    compiled = torch.compile(lambda given: layer(given)[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), eager)


def test_kernels_run_once_before_graphs_are_captured(
    ranks: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, vllm_config: Any
) -> None:
    """One call for each captured size and kind of layer; layers of the same kind share it."""
    vllm_config.compilation_config.cudagraph_capture_sizes = [1, 4]
    monkeypatch.setattr(plugin, "prepare", lambda weight, device, dtype, _: to_stream(weight, device, dtype))
    config = config_of(folders["marlin_24"])
    calls = []
    real = plugin._product
    monkeypatch.setattr(plugin, "_product", lambda *given: (calls.append(tuple(given[1].shape)), real(*given))[1])
    for name in (f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"):
        layer = host.ReplicatedLinear(
            HIDDEN, INTER, bias=False, quant_config=config, prefix=name, params_dtype=torch.float16
        )
        load(layer, folders["marlin_24"], [name], [None])
        assert not calls or len(calls) == 2  # nothing on a CPU by itself
        layer.quant_method.warm_up(layer, layer.quant_method.pieces[0])
    assert calls == [(1, HIDDEN), (4, HIDDEN)]


def test_batch_invariance_is_passed_on(ranks: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own switch reaches the kernels."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert not plugin.batch_invariant(gpu)
    monkeypatch.setattr(plugin.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    assert plugin.batch_invariant(gpu)
    assert not plugin.batch_invariant(cpu)
    asked = []

    def spy(weight: QuantWeight, device: torch.device, dtype: torch.dtype, invariant: bool) -> Any:
        asked.append(invariant)
        return to_stream(weight, device, torch.float16, invariant)

    monkeypatch.setattr(plugin, "prepare", spy)
    monkeypatch.setattr(plugin, "batch_invariant", lambda device: True)
    name = f"{LAYER}.mlp.up_proj"
    layer = host.ReplicatedLinear(HIDDEN, INTER, bias=False, quant_config=config_of(folders["marlin_24"]), prefix=name)
    load(layer, folders["marlin_24"], [name], [None])
    assert asked == [True]
    assert layer.quant_method.pieces[0].facts[-1] is True


def test_scales_of_activations_are_left_aside(ranks: Any, tmp_path: Path) -> None:
    """W8A8 files carry them beside each weight; the runtime is weight-only."""
    names = [f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"]
    out, values = tmp_path / "activations", {}
    with CheckpointWriter(out, config=MODEL, format="ct-sparse-24-bitmask") as writer:
        for name in names:
            dense = dense_of(name, INTER, HIDDEN).half()
            values[name] = dense * sparse24.magnitude_mask(dense.abs())
            writer.add_weight(name, transforms.sparse_values(values[name]))
            writer.add_tensor(f"{name}.input_scale", torch.ones(1))
    layer = host.MergedColumnParallelLinear(
        *(HIDDEN, [INTER, INTER]),
        bias=False,
        quant_config=config_of(out, "sparse24"),
        prefix=f"{LAYER}.mlp.gate_up_proj",
        params_dtype=torch.float32,
    )
    load(layer, out, names, [0, 1])
    x = torch.randn(2, HIDDEN)
    wanted = x @ torch.cat([values[name].float() for name in names]).T
    torch.testing.assert_close(layer.quant_method.apply(layer, x), wanted)


def test_layers_fused_in_the_file(ranks: Any, tmp_path: Path) -> None:
    """Phi-like files: q, k and v are one matrix on disk, and every rank takes its rows of each."""
    n = (HEADS + 2 * KV_HEADS) * HEAD
    name = f"{LAYER}.self_attn.qkv_proj"
    weight = round_to_nearest(dense_of(name, n, HIDDEN), 4, 32)
    folder = folder_of(tmp_path / "fused", "marlin_24", {name: weight})
    truth = dequantize(weight)
    x = torch.randn(2, HIDDEN)
    for size in (1, 2, 4):
        for rank in range(size):
            ranks(rank, size)
            config = config_of(folder)
            layer = host.QKVParallelLinear(
                *(HIDDEN, HEAD, HEADS, KV_HEADS),
                bias=False,
                quant_config=config,
                prefix=name,
                params_dtype=torch.float32,
            )
            load(layer, folder, [name], [None])
            q, k, v = truth.split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD])
            kv_rank, kv_size = (rank, size) if size <= KV_HEADS else (rank // (size // KV_HEADS), KV_HEADS)
            part, kv = rows(HEADS * HEAD, rank, size), rows(KV_HEADS * HEAD, kv_rank, kv_size)
            wanted = x @ torch.cat([q[part], k[kv], v[kv]]).T
            torch.testing.assert_close(layer.quant_method.apply(layer, x), wanted)


def test_one_stored_layer_in_several_fused_ones(ranks: Any, tmp_path: Path) -> None:
    """vLLM may number three outputs where the file has one layer for the first two."""
    names = [f"{LAYER}.mix.ab", f"{LAYER}.mix.c"]
    weights = {
        name: round_to_nearest(dense_of(name, n, HIDDEN), 4, 32) for name, n in zip(names, (192, 64), strict=True)
    }
    folder = folder_of(tmp_path / "spans", "marlin_24", weights)
    config = config_of(folder)
    config.packed_modules_mapping = {"abc": ["ab", "c"]}
    ab, c = (dequantize(weights[name]) for name in names)
    x = torch.randn(2, HIDDEN)
    for rank in range(2):
        ranks(rank, 2)
        layer = host.MergedColumnParallelLinear(
            HIDDEN,
            [128, 64, 64],
            bias=False,
            quant_config=config,
            prefix=f"{LAYER}.mix.abc",
            params_dtype=torch.float32,
        )
        load(layer, folder, names, [(0, 1), 2])
        wanted = torch.cat([ab[:128][rows(128, rank, 2)], ab[128:][rows(64, rank, 2)], c[rows(64, rank, 2)]])
        torch.testing.assert_close(layer.quant_method.apply(layer, x), x @ wanted.T)


def test_a_size_that_cuts_quads_is_refused_before_anything_is_read(ranks: Any, tmp_path: Path) -> None:
    name = f"{LAYER}.mlp.down_proj"
    folder = folder_of(tmp_path / "quads", "marlin_24", {name: round_to_nearest(dense_of(name, 64, 208), 4, 32)})
    for rank in (0, 7):  # every rank must refuse, or the others would wait for it
        ranks(rank, 8)
        with pytest.raises(UnsupportedError) as error:
            host.RowParallelLinear(208, 64, bias=False, quant_config=config_of(folder), prefix=name)
        for word in (name, "tensor_parallel_size 8", "[64, 208]", "quad", "nearest size that works is 4"):
            assert word in str(error.value)
    ranks(0, 4)
    host.RowParallelLinear(208, 64, bias=False, quant_config=config_of(folder), prefix=name)


def test_act_order_is_not_cut_along_k(ranks: Any, tmp_path: Path) -> None:
    name = f"{LAYER}.mlp.down_proj"
    weight = round_to_nearest(dense_of(name, 64, 256), 4, 64, sparse=False)
    index = (torch.arange(256) % 4).to(torch.int32)
    weight = QuantWeight(weight.scheme, weight.codes, weight.scales, group_index=index)
    folder = folder_of(tmp_path / "order", "gptq", {name: weight})
    ranks(0, 2)
    with pytest.raises(UnsupportedError, match=r"act-order.*nearest size that works is 1"):
        host.RowParallelLinear(256, 64, bias=False, quant_config=config_of(folder), prefix=name)
    ranks(0, 1)
    layer = host.RowParallelLinear(
        256, 64, bias=False, quant_config=config_of(folder), prefix=name, params_dtype=torch.float32
    )
    load(layer, folder, [name], [None])
    x = torch.randn(2, 256)
    torch.testing.assert_close(layer.quant_method.apply(layer, x), x @ dequantize(weight).T)


def test_sizes_of_another_model_are_refused(ranks: Any, folders: dict[str, Path]) -> None:
    config = config_of(folders["marlin_24"])
    with pytest.raises(FormatError, match=r"down_proj is \[160, 512\] in the model and \[160, 608\] in the file"):
        host.RowParallelLinear(512, HIDDEN, bias=False, quant_config=config, prefix=f"{LAYER}.mlp.down_proj")
    with pytest.raises(UnsupportedError, match="do not fill"):
        host.MergedColumnParallelLinear(
            HIDDEN, [INTER] * 3, bias=False, quant_config=config, prefix=f"{LAYER}.mlp.gate_up_proj"
        )


def test_missing_tensors_are_named(ranks: Any, folders: dict[str, Path]) -> None:
    name = f"{LAYER}.mlp.up_proj"
    layer = host.ReplicatedLinear(HIDDEN, INTER, bias=False, quant_config=config_of(folders["marlin_24"]), prefix=name)
    with pytest.raises(FormatError, match=f"{name}: the checkpoint has none"):
        layer.quant_method.process_weights_after_loading(layer)


def test_unquantised_layers_stay_with_vllm(ranks: Any, folders: dict[str, Path]) -> None:
    config = config_of(folders["marlin_24"])
    layer = host.ReplicatedLinear(HIDDEN, 64, bias=False, quant_config=config, prefix=f"{LAYER}.plain")
    assert isinstance(layer.quant_method, host.UnquantizedLinearMethod)
    assert config.get_quant_method(nn.Embedding(4, 4), "model.embed_tokens") is None


def test_experts_and_heads_that_are_quantised_are_refused(tmp_path: Path) -> None:
    names = [f"{LAYER}.mlp.experts.{i}.down_proj" for i in range(2)]
    folder = folder_of(
        tmp_path / "moe", "marlin_24", {name: round_to_nearest(dense_of(name, 64, 64)) for name in names}
    )
    config = config_of(folder)
    with pytest.raises(UnsupportedError, match=r"experts is a Module .*experts\.0\.down_proj and 1 more.*ignored"):
        config.get_quant_method(nn.Module(), f"{LAYER}.mlp.experts")
    assert config.get_quant_method(nn.Module(), "model.layers.1.mlp.experts") is None


def test_a_config_travels_to_other_processes(mixed: Shop) -> None:
    """vLLM sends it to its workers, and copies it; the block has patterns for the layers that differ."""
    config = config_of(mixed.as_format("marlin_24"))
    assert any(key.startswith("+:") for key in config.block["dynamic"])
    for sent in (ForkingPickler.loads(bytes(ForkingPickler.dumps(config))), copy.deepcopy(config)):
        assert {name: (layer.n, layer.k, layer.stored.declared) for name, layer in sent.layers.items()} == {
            name: (layer.n, layer.k, layer.stored.declared) for name, layer in (config.layers or {}).items()
        }
        assert sent.quant.of(f"{LAYER}.self_attn.k_proj").bits == 8


def test_names_are_renamed_as_vllm_renames_modules(folders: dict[str, Path]) -> None:
    from vllm.model_executor.models.utils import WeightsMapper

    config = config_of(folders["marlin_24"])
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}))
    assert set(config.layers or ()) == {f"language_model.{name}" for name in SHAPES}


@pytest.mark.parametrize(
    ("block", "ignored"),
    [
        ({"ignore": [f"{LAYER}.self_attn.{each}" for each in FUSED["qkv_proj"]]}, True),
        ({"ignore": ["re:.*self_attn.*"]}, True),
        ({"dynamic": {rf"-:^model\.layers\.0\.self_attn\.{each}$": {} for each in FUSED["qkv_proj"]}}, True),
        ({"modules_to_not_convert": [f"{LAYER}.mlp.up_proj"]}, False),
        ({}, False),
    ],
)
def test_without_headers_the_config_says_what_is_ignored(
    ranks: Any, tmp_path: Path, block: dict[str, Any], ignored: bool
) -> None:
    """Names in the config are the file's own: q_proj, which vLLM has only as a third of qkv_proj."""
    plugin.register()
    said = {"quant_method": "gptq", "checkpoint_format": "marlin_24", "bits": 4, "group_size": 32, **block}
    config = plugin.host_class("gptq_marlin_24").from_config(said)
    config.maybe_update_config(str(tmp_path))
    config.packed_modules_mapping = FUSED
    layer = host.QKVParallelLinear(
        HIDDEN, HEAD, HEADS, KV_HEADS, bias=False, quant_config=config, prefix=f"{LAYER}.self_attn.qkv_proj"
    )
    assert isinstance(layer.quant_method, host.UnquantizedLinearMethod) is ignored


def test_without_headers_a_uniform_file_loads_all_the_same(
    ranks: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    name = f"{LAYER}.mlp.up_proj"
    config = config_of(folders["ct-pack-quantized"])
    config.layers = None
    layer = host.ReplicatedLinear(
        HIDDEN, INTER, bias=False, quant_config=config, prefix=name, params_dtype=torch.float32
    )
    load(layer, folders["ct-pack-quantized"], [name], [None])
    x = torch.randn(2, HIDDEN)
    truth = dequantize(open_checkpoint(folders["ct-pack-quantized"]).weight(name))
    torch.testing.assert_close(layer.quant_method.apply(layer, x), x @ truth.T)


@pytest.mark.parametrize("knows_mappers", [True, False])
def test_what_old_bitmask_files_compress_beyond_linears_is_refused(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows_mappers: bool
) -> None:
    """Embeddings or norms; and, where vLLM cannot rename tensors, the old names themselves."""
    new, old = folders["ct-sparse-24-bitmask"], tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_bytes((new / "config.json").read_bytes())
    tensors = load_file(new / "model.safetensors")
    table = "model.embed_tokens" if knows_mappers else f"{LAYER}.mlp.up_proj"
    for part in ("compressed", "bitmask", "shape"):
        tensors[f"{table}.weight.{part}"] = tensors.pop(f"{LAYER}.mlp.up_proj.{part}")
    save_file(tensors, old / "model.safetensors", {"format": "pt"})
    if not knows_mappers:
        monkeypatch.delattr(plugin.QuantizationConfig, "get_checkpoint_weight_mapper")
    with pytest.raises(UnsupportedError, match=rf"{table}\.weight.* vLLM .*convert .* --to ct-sparse-24-bitmask"):
        config_of(old, "sparse24")
