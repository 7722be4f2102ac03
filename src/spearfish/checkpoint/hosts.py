"""Which programs run a folder of which format. Versions as of November 2026."""

from __future__ import annotations

_OURS = "spearfish (its own runtime, the transformers integration, the vLLM plugin)"

_HOSTS: dict[str, tuple[str, ...]] = {
    "marlin_24": (
        "vLLM 0.4.3 to 0.14.1 without a plugin (batches above 16 rows need n % 256 = 0 there); removed in 0.15",
        "Text Generation Inference (archived in 2026) with --quantize marlin",
    ),
    "gptq": ("vLLM, SGLang, and transformers with GPTQModel, as dense GPTQ",),
    "gptq_v2": ("transformers with GPTQModel, and vLLM if symmetric (zero points are not read then), as dense GPTQ",),
    "marlin": ("vLLM 0.3 to 0.8 and AutoGPTQ 0.7, as dense Marlin (4 bit)",),
    "ct-marlin-24": ("vLLM 0.5 to 0.14.1 through compressed-tensors (4 bit only)",),
    "ct-pack-quantized": ("vLLM, SGLang, and transformers with compressed-tensors, as dense codes",),
    "ct-sparse-24-bitmask": ("transformers and vLLM with compressed-tensors 0.9 to 0.14; removed since",),
    "ct-sparse-bitmask": ("transformers with compressed-tensors up to 0.14; removed since",),
    "dense": ("anything that reads safetensors, as a dense model",),
}


def hosts(form: str, extended: bool) -> list[str]:
    """One line per program that runs the format; only ours if the folder is extended."""
    return [_OURS] if extended else [_OURS, *_HOSTS.get(form, ())]
