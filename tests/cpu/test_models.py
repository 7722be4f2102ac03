"""Dense models: every known family walks block by block as the whole model runs; folders, GGUF and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from spearfish.compress.walk import Walker
from spearfish.errors import FormatError, UnsupportedError
from spearfish.models import ARCHITECTURES, DenseModel, convert_gguf, load_dense, refuse_broken

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


def family(model_type: str, folder: Path) -> torch.nn.Module:
    """A random model of a family, saved; sliding windows shorter than the text where the family has them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    changes: dict[str, Any] = {}
    if model_type == "gemma3_text":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        changes = {"sliding_window": 6, "layer_types": kinds, "query_pre_attn_scalar": 8}
    if model_type == "mistral":
        changes = {"sliding_window": 6}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_block_by_block_equals_the_whole(model_type: str, tmp_path: Path) -> None:
    whole = family(model_type, tmp_path)
    dense = load_dense(tmp_path)
    tokens = torch.randint(0, 128, (5, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = whole(tokens, output_hidden_states=True).hidden_states
    walker = Walker(dense, torch.device("cpu"), fast=False)
    hidden = walker.embed(tokens)
    torch.testing.assert_close(hidden, wanted[0])
    assert len(walker.paths) == 3
    for index in range(3):
        block = walker.load(index)
        names = {name for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)}
        assert names == {name for group in dense.architecture.linears for name in group}
        hidden = walker.forward(index, hidden)
        walker.release(index)
        if index < 2:  # the last hidden state that transformers gives has gone through the final norm
            torch.testing.assert_close(hidden, wanted[index + 1], rtol=1e-4, atol=1e-4)
    walker.model.materialise(walker.net, "model.norm")
    torch.testing.assert_close(walker.net.get_submodule("model.norm")(hidden), wanted[-1], rtol=1e-4, atol=1e-4)
    # Nothing but the buffers and that norm is left in memory.
    held = {name for name, parameter in walker.net.named_parameters() if parameter.device.type != "meta"}
    assert held == {"model.norm.weight"}
    torch.testing.assert_close(dense.whole()(tokens).logits, whole(tokens).logits, rtol=1e-4, atol=1e-4)


def test_linears_that_share_an_input_are_stated_rightly(tmp_path: Path) -> None:
    """The tuples of the block list: same input within one, the order of the forward pass among them."""
    for model_type, architecture in ARCHITECTURES.items():
        model = family(model_type, tmp_path / model_type)
        block = model.get_submodule(f"{architecture.blocks}.0")
        seen: list[tuple[str, int]] = []

        def look(_: torch.nn.Module, args: Any, name: str, into: list[tuple[str, int]] = seen) -> None:
            into.append((name, id(args[0])))

        for name, module in block.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(partial(look, name=name))
        with torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.long))
        order = [name for name, _ in seen]
        at = 0
        for group in architecture.linears:
            assert set(order[at : at + len(group)]) == set(group)
            assert len({place for name, place in seen[at : at + len(group)]}) == 1
            at += len(group)


def test_gguf_becomes_a_cached_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf
    import numpy

    monkeypatch.setenv("SPEARFISH_CACHE_DIR", str(tmp_path / "cache"))
    model = tiny.llama(num_hidden_layers=1, vocab_size=64)
    file = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(128)
    writer.add_block_count(1)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([chr(33 + i) for i in range(63)] + ['!"'])
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    names |= {f"model.layers.0.{ours}": f"blk.0.{theirs}" for ours, theirs in parts.items()}
    for ours, theirs in names.items():
        value = model.get_submodule(ours).weight.numpy()
        heads = {"attn_q": 4, "attn_k": 2}.get(theirs.rpartition(".")[2])
        if heads:  # GGUF interleaves the rotary halves of queries and keys
            value = value.reshape(heads, 2, 16, 128).swapaxes(1, 2).reshape(value.shape)
        writer.add_tensor(f"{theirs}.weight", numpy.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    dense = load_dense(file)
    assert dense.folder.is_relative_to(tmp_path / "cache") and "_model_name_or_path" not in dense.config
    for ours in names:
        stored = dense.reader.tensor(f"{ours}.weight")
        assert stored.dtype == torch.float16
        torch.testing.assert_close(stored, model.get_submodule(ours).weight.half())
    before = (dense.folder / "model.safetensors").stat().st_ino
    assert convert_gguf(file) == dense.folder
    assert (dense.folder / "model.safetensors").stat().st_ino == before


class Pieces:
    """A tokenizer of words, or one that has lost how their letters join."""

    def __init__(self, broken: int) -> None:
        self.words = [f"\u2581word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(100)]
        self.broken = broken

    def get_vocab(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)} | {"\u2581a": 100, "x": 101}

    def __call__(self, texts: list[str], add_special_tokens: bool) -> Any:
        from types import SimpleNamespace

        found = [self.words.index(f"\u2581{text.removeprefix('a ')}") for text in texts]
        return SimpleNamespace(input_ids=[[100, index] if index >= self.broken else [100, 101, 101] for index in found])


def test_a_tokenizer_that_takes_its_words_apart_is_refused() -> None:
    refuse_broken(Pieces(0), "fine.gguf")
    refuse_broken(Pieces(40), "rare words may be unlucky")
    with pytest.raises(
        UnsupportedError, match="bad.gguf: transformers .* 60 of 100 words of the vocabulary come apart"
    ):
        refuse_broken(Pieces(60), "bad.gguf")


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    model = tiny.llama()
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    dense = load_dense(tmp_path)
    assert len(set(dense.reader.files.values())) > 1
    for name, parameter in model.named_parameters():
        assert torch.equal(dense.reader.tensor(name), parameter)
        assert dense.reader.shape(name) == list(parameter.shape)
    next(tmp_path.glob("*-00002-*")).unlink()
    with pytest.raises(FormatError, match="00002.* cannot be read"):
        for name in dense.reader.names():
            dense.reader.tensor(name)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no folder, no .gguf file"):
        load_dense(tmp_path / "nothing" / "here")
    with pytest.raises(FormatError, match=r"no config.json"):
        load_dense(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(FormatError, match="not valid JSON"):
        load_dense(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(FormatError, match="convert them to safetensors first"):
        load_dense(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(FormatError, match="not a whole safetensors file"):
        load_dense(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": {"bits": 4}}))
    with pytest.raises(UnsupportedError, match="quantised already"):
        load_dense(tmp_path)
    with pytest.raises(FormatError, match="package nowhere_to_be_found is not installed"):
        load_dense("package:nowhere_to_be_found")
    with pytest.raises(FormatError, match="there is no file"):
        load_dense(tmp_path / "absent.gguf")
    (tmp_path / "odd.pt").write_bytes(b"")
    with pytest.raises(FormatError, match="neither a model folder nor"):
        load_dense(tmp_path / "odd.pt")


def test_a_tensor_of_another_size_than_config_says(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 512}))
    dense: DenseModel = load_dense(tmp_path)
    with pytest.raises(
        FormatError, match=r"gate_proj.weight has shape \[256, 128\], config.json asks for \[512, 128\]"
    ):
        dense.whole()
