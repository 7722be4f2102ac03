"""Small random models and weights for the tests: nothing is downloaded, everything is made from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spearfish import sparse24
from spearfish.scheme import QuantScheme, QuantWeight

PROSE = (
    "The river rose in the night and the lower fields were under water by the morning. Nobody in the village had seen"
    " it come so fast. The miller counted his sacks, the children counted the ducks, and the old bridge held."
)


def round_to_nearest(dense: torch.Tensor, bits: int = 4, group: int | None = 64, sparse: bool = True) -> QuantWeight:
    """`dense` [n, k] as a symmetric QuantWeight: the larger two of every four, the nearest code, fp16 scales."""
    n, k = dense.shape
    dense = dense.detach().float()
    zero, size = 1 << (bits - 1), group or k
    positions = None
    if sparse:
        mask = sparse24.magnitude_mask(dense.abs())
        dense, positions = dense * mask, sparse24.positions_of_mask(mask)
    groups = -(-k // size)
    padded = torch.nn.functional.pad(dense, (0, groups * size - k)).reshape(n, groups, size)
    scales = (padded.abs().amax(-1) / (zero - 1)).clamp(min=1e-4).half()
    per_k = scales.float().repeat_interleave(size, dim=1)[:, :k]
    codes = (dense / per_k).round().clamp(-zero, zero - 1).add(zero).to(torch.uint8)
    if positions is not None:
        codes = sparse24.compress(codes, positions)
    return QuantWeight(QuantScheme(bits, group, sparsity="2:4" if sparse else "dense"), codes, scales, positions)


def llama(seed: int = 0, bias: bool = False, **changes: Any) -> Any:
    """A random Llama in float32 with grouped-query attention: 2 blocks, hidden 128, 512 words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "attention_bias": bias,
        "mlp_bias": bias,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        **changes,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings)).eval().requires_grad_(False)
    if bias:
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.1)
    return model


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The linear layers of the blocks, by name: all but lm_head."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name
    }


def words(count: int) -> list[str]:
    """Words of the prose in an order of their own, always the same."""
    known = PROSE.split()
    return [known[i] for i in torch.randint(0, 40, (count,), generator=torch.Generator().manual_seed(0))]


def save_tokenizer(folder: Path, chat: bool = False) -> None:
    """A byte-level tokenizer of at most 512 words, trained on one paragraph."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([PROSE], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>")
    if chat:
        fast.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
