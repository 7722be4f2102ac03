"""Gemma 3 from a GGUF file to a checkpoint that runs: norms before and behind each part of a block, of queries and of
keys, heads wider than the stream has room for, sliding windows, tied embeddings, sizes that groups of 128 do not
divide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from spearfish.checkpoint import open_checkpoint
from spearfish.compress import Recipe, compress
from spearfish.models import load_dense
from spearfish.reference import dequantize

BLOCKS, WIDTH, INNER, HEADS, HEAD, WORDS = 6, 192, 320, 2, 128, 320
PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gemma() -> Any:
    """A random Gemma 3: blocks 0 to 4 see a window of 12 tokens, block 5 all."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS, num_key_value_heads=1, head_dim=HEAD, query_pre_attn_scalar=256, sliding_window=12,
        max_position_embeddings=256, rms_norm_eps=1e-6, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(std=0.3 if "norm" in name else 0.1)
    return model


def write_gguf(model: Any, file: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(file, "gemma3")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_sliding_window(12)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    letters = [f"<0x{value:02X}>" for value in range(256)]
    words = ["<pad>", "<eos>", "<bos>", "<unk>", *letters]
    words += [f"▁{word}" for word in sorted(set(tiny.PROSE.replace(".", "").replace(",", "").split()))]
    words += [f"<unused{index}>" for index in range(WORDS - len(words))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([-float(index) for index in range(WORDS)])
    writer.add_token_types([3, 3, 3, 2] + [6] * 256 + [1] * (WORDS - 260))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    for index in range(BLOCKS):
        names |= {f"model.layers.{index}.{ours}": f"blk.{index}.{theirs}" for ours, theirs in PARTS.items()}
    for ours, theirs in names.items():
        value = model.get_submodule(ours).weight
        writer.add_tensor(f"{theirs}.weight", (value + 1 if "norm" in ours else value).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_from_gguf_to_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spearfish.integrations.transformers import load

    monkeypatch.setenv("SPEARFISH_CACHE_DIR", str(tmp_path / "cache"))
    model = gemma()
    write_gguf(model, tmp_path / "small.gguf")
    dense = load_dense(tmp_path / "small.gguf")
    assert "lm_head.weight" not in dense.reader and dense.config["layer_types"] == ["sliding_attention"] * 5 + [
        "full_attention"
    ]
    assert dense.config["dtype"] == "bfloat16"  # its stream outgrows float16
    tokens = torch.randint(4, WORDS, (2, 40), generator=torch.Generator().manual_seed(1))
    wanted = model(tokens).logits
    torch.testing.assert_close(dense.whole()(tokens).logits, wanted, rtol=0.02, atol=0.02)

    (tmp_path / "text.txt").write_text("\n\n".join([tiny.PROSE] * 40))
    recipe = Recipe(
        method="joint", calibration=str(tmp_path / "text.txt"), num_samples=24, seq_len=24, budget=0.2, reconstruct=2
    )
    report = compress(dense, tmp_path / "out", recipe, fast=False)
    assert len(report.layers) == 7 * BLOCKS and not report.ignored and report.calibration["tokens"] == 24 * 24
    checkpoint = open_checkpoint(tmp_path / "out")
    assert "lm_head.weight" not in checkpoint.tensor_names
    filled = dense.whole()
    for name in checkpoint.linears:
        filled.get_submodule(name).weight.data.copy_(dequantize(checkpoint.weight(name)))
    loaded = load(tmp_path / "out", device="cpu", dtype=torch.float32)
    torch.testing.assert_close(loaded(tokens).logits, filled(tokens).logits, rtol=2e-3, atol=2e-3)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "gemma3_text"
    # What is lost stays in proportion: far closer to the dense model than a model with the same weights shuffled.
    lost = (filled(tokens).logits - wanted).norm() / wanted.norm()
    assert 0 < lost < 0.9
