"""transformers as a host: checkpoints of every format load as ordinary transformers models with `QuantLinear` layers.

`load(folder)` does it for any checkpoint. Importing this module also puts a switch over the methods "gptq" and
"compressed-tensors" in transformers' table of quantisers, so that plain `from_pretrained` loads the files that are
ours; all others go to the original, untouched.

transformers builds the model on the meta device and loads what is not quantised; each linear is a placeholder until
then, which holds nothing but its bias. Afterwards every placeholder is read from the checkpoint, one layer at a time,
and becomes a `QuantLinear`.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, TextStreamer
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from spearfish import reference
from spearfish.checkpoint import Checkpoint, open_checkpoint
from spearfish.checkpoint.config import OUR_KEY, interpret
from spearfish.errors import FormatError, SpearfishError, UnsupportedError
from spearfish.formats.ct_pack_quantized import CtPackQuantized
from spearfish.formats.dense import Dense
from spearfish.formats.gptq import Gptq, GptqV2
from spearfish.nn import QuantLinear
from spearfish.quantization import get_quantization_config, resolve

logger = logging.getLogger(__name__)

# Methods of config.json that hosts know and that ours hide behind; "spearfish" is never written to a file.
OURS = "spearfish"
SHARED_METHODS = ("gptq", "compressed-tensors")
# Formats of these methods that the original quantisers read.
THEIRS = (Gptq.name, GptqV2.name, CtPackQuantized.name, Dense.name)


def load(
    path: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    quantization: str | None = None,
    **options: Any,
) -> Any:
    """A checkpoint folder of any format as a transformers model, in eval mode.

    dtype: of the computation. By default float32 on a CPU, and on a GPU what the checkpoint says if that is 16 bit,
        else float16.
    device: "cuda" if there is a GPU, else "cpu"; `device_map` may be given instead, as to `from_pretrained`, to which
        all other options go.
    quantization: the name of a method (`spearfish.quantization`), if the file's own is not wanted: "gptq" runs a GPTQ
        file dequantised, without the kernels.
    Raises FormatError for a damaged folder, UnsupportedError for what cannot be placed or run, QuantizationError for a
    method that does not take the file.
    """
    checkpoint = open_checkpoint(path)
    if "device_map" not in options:
        options["device_map"] = {"": str(device or ("cuda" if torch.cuda.is_available() else "cpu"))}
    elif device is not None:
        raise UnsupportedError("give either device or device_map, not both")
    # Without a word on it transformers asks on the terminal whether code out of the folder may run.
    trusted = options.setdefault("trust_remote_code", False)
    try:
        config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=trusted)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedError(f"{path}: transformers cannot make this model from its config: {error}") from error
    block = _block_of(checkpoint)
    plain = quantization is not None and get_quantization_config(resolve(block, quantization)).plain
    config.quantization_config = FileConfig(block, plain)
    if dtype is None:
        dtype = _default_dtype(config, options["device_map"])
    model, info = AutoModelForCausalLM.from_pretrained(
        checkpoint.path, config=config, dtype=dtype, output_loading_info=True, **options
    )
    # transformers only warns, fills these at random, and answers nonsense.
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise FormatError(
            f"{checkpoint.path} lacks {len(missing)} tensors that a {type(model).__name__} needs:"
            f" {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
        )
    return model.eval()


def _block_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The quantization_config block of a folder, from wherever it lies; an empty one of our own if there is none."""
    for config in (checkpoint.config, checkpoint.config.get("text_config")):
        if isinstance(config, dict) and isinstance(config.get("quantization_config"), dict):
            return dict(config["quantization_config"])
    separate = checkpoint.path / "quantize_config.json"
    if separate.is_file():
        return {"quant_method": "gptq", **json.loads(separate.read_text(encoding="utf-8"))}
    return {"quant_method": OURS}


def _default_dtype(config: Any, device_map: Any) -> torch.dtype:
    devices = device_map.values() if isinstance(device_map, dict) else [device_map]
    if all(str(device) == "cpu" for device in devices) or not torch.cuda.is_available():
        return torch.float32
    stored = getattr(config, "dtype", None)
    return stored if stored in (torch.float16, torch.bfloat16) else torch.float16


def streamer(tokenizer: Any) -> Any:
    """Prints a model's answer to standard output while it is generated."""
    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


class FileConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The quantization_config block of a file, kept word for word, so that saving writes what was read.

    plain: whether its layers run dequantised although a kernel may exist.
    """

    def __init__(self, block: dict[str, Any], plain: bool = False) -> None:
        self.block = dict(block)
        self.plain = plain
        self.quant_method = self.block.get("quant_method", OURS)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.block)

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict: transformers looks at the block before it makes an object of it."""
        return self.block.get(key, default)


class Placeholder(nn.Module):
    """Stands where a linear was until its weight is read; knows its bias, and by its buffer where to put the weight.

    The buffer is as large as the layer in its file, so that transformers' automatic device maps see the right sizes.
    """

    room: torch.Tensor
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, nbytes: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.register_buffer("room", torch.empty(nbytes, dtype=torch.uint8, device="meta"), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise SpearfishError("this layer's weight was never read: the model was not loaded through from_pretrained")


class FileQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads one checkpoint folder. Holds it open between the two calls that transformers makes."""

    requires_calibration = False
    is_trainable = True  # of adapters on top; the quantised weights themselves stay as they are
    is_compileable = True

    def __init__(self, quantization_config: FileConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.checkpoint: Checkpoint | None = None
        self.dtype = torch.float32

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self.dtype = dtype
        return dtype

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        if isinstance(device_map, dict):
            kinds = {
                torch.device(d).type if isinstance(d, str) and d != "disk" else str(d) for d in device_map.values()
            }
            if "disk" in kinds or ("cpu" in kinds and len(kinds) > 1):
                raise UnsupportedError(
                    "quantised layers cannot be offloaded to CPU or disk while others run on a GPU; use more or larger"
                    f" GPUs, or device_map='cpu' for all of it (device_map puts layers on {', '.join(sorted(kinds))})"
                )

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        if not checkpoint_files:
            raise UnsupportedError("a quantised checkpoint is loaded from its folder, not from a state_dict")
        checkpoint = self.checkpoint = open_checkpoint(Path(checkpoint_files[0]).parent)
        for name, info in checkpoint.linears.items():
            linear = _linear_of(model, name)
            if (linear.out_features, linear.in_features) != (info.n, info.k):
                raise FormatError(
                    f"{name} is [{info.n}, {info.k}] in the file, but config.json makes it"
                    f" [{linear.out_features}, {linear.in_features}]"
                )
            _replace(model, name, Placeholder(linear, info.nbytes))
        # What is read by us, afterwards, would be listed as unexpected (packed) or missing (as the model knows it).
        names = [*checkpoint.linears, *(name.removesuffix(".weight") for name in checkpoint.tables)]
        _ignore(model, "_keys_to_ignore_on_load_unexpected", [rf"{re.escape(name)}\..+" for name in names])
        _ignore(model, "_keys_to_ignore_on_load_missing", [re.escape(name) for name in checkpoint.tables])

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        if self.checkpoint is None:
            raise SpearfishError("the checkpoint was not opened before its weights were to be read")
        for name in self.checkpoint.tables:
            parameter = model.get_parameter(name)
            parameter.data.copy_(self.checkpoint.tensor(name))
        nbytes = 0
        for name, module in list(model.named_modules()):
            if isinstance(module, Placeholder):
                device = module.room.device
                layer = _read(self.checkpoint, name, module.bias, self.dtype, self.quantization_config.plain)
                if isinstance(layer, QuantLinear):
                    prepared = layer.prepare(device, self.dtype).prepared
                    nbytes += prepared.nbytes if prepared else 0
                else:
                    layer.to(device)
                _replace(model, name, layer)
        logger.info("%d quantised layers take %.1f MiB", len(self.checkpoint.linears), nbytes / 2**20)
        if self.quantization_config.quant_method == OURS:
            del model.config.quantization_config  # type: ignore[union-attr]  # it was in no file, and goes into none
        teach_peft()
        return model

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """What `save_pretrained` writes: the frozen layers as they lie in the file that was loaded, everything else
        as it is in the model."""
        if self.checkpoint is None:
            raise SpearfishError("only a model that was loaded from a checkpoint can be saved in its format")
        adapters_only = getattr(model, "_hf_peft_config_loaded", False)
        state: dict[str, torch.Tensor] = {}
        # Module by module, since model.state_dict() would unpack every layer at once.
        for name, module in model.named_modules():
            if not isinstance(module, QuantLinear):
                module._save_to_state_dict(state, f"{name}." if name else "", keep_vars=False)
            elif not adapters_only:
                tensors = self.checkpoint.linears[name].tensors.values()
                state |= {full: self.checkpoint.tensor(full) for full in tensors}
                if module.bias is not None:
                    state[f"{name}.bias"] = module.bias.detach()
        return state, {}

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
        # transformers hands on what the config says, which saving turns into a word.
        wanted = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
        for name, module in list(quantised(model)):
            weight = reference.dequantize(module.weight, wanted or torch.float32)
            if module.prepared is not None:  # where a layer has no tile stream, its neutral weight stayed on the CPU
                weight = weight.to(module.prepared.device)
            _replace(model, name, _plain_linear(weight, module.bias))
        return model


def quantised(model: nn.Module) -> Iterator[tuple[str, QuantLinear]]:
    """Name and layer of every `QuantLinear` in a model."""
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            yield name, module


def _read(checkpoint: Checkpoint, name: str, bias: nn.Parameter | None, dtype: torch.dtype, plain: bool) -> nn.Module:
    """The layer in the place of a placeholder: a QuantLinear, or nn.Linear for 16-bit values that are not 2:4."""
    if checkpoint.linears[name].scheme.bits < 16:
        return QuantLinear(checkpoint.weight(name), bias, plain=plain)
    try:
        return QuantLinear(checkpoint.weight(name), bias)
    except (FormatError, UnsupportedError) as reason:
        logger.info("%s stays a plain linear: %s", name, reason)
    values = checkpoint.tensor(f"{name}.weight") if f"{name}.weight" in checkpoint.entries else checkpoint.dense(name)
    return _plain_linear(values.to(dtype), bias)


def _ignore(model: nn.Module, attribute: str, patterns: list[str]) -> None:
    """Add to the patterns of tensor names that transformers does not complain about."""
    known = set(getattr(model, attribute, None) or ())
    setattr(model, attribute, known | ({f"^(?:{'|'.join(patterns)})$"} if patterns else set()))


def _plain_linear(weight: torch.Tensor, bias: nn.Parameter | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.register_parameter("bias", bias)
    return linear


def _linear_of(model: nn.Module, name: str) -> nn.Linear:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise FormatError(
            f"the checkpoint holds a quantised layer {name}, which {type(model).__name__} does not have"
        ) from None
    if not isinstance(module, nn.Linear):
        raise UnsupportedError(f"{name} is quantised in the file, but a {type(module).__name__} in this model")
    return module


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    owner = model.get_submodule(parent)
    old = getattr(owner, leaf)
    hook = getattr(old, "_hf_hook", None)
    if hook is not None:  # accelerate moves the inputs of a layer that was placed by itself
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(new, hook)
    setattr(owner, leaf, new.train(old.training))


class Switch:
    """Sits in one row of transformers' two tables: ours where the file is ours, the original for all others."""

    def __init__(self, original: Any, ours: Any) -> None:
        self.original, self.ours = original, ours
        self.takes_all = False

    def from_dict(self, block: dict[str, Any], **options: Any) -> Any:
        """The table of configs: makes an object of a block of config.json."""
        return self.ours(block) if self.takes_all or is_ours(block) else self.original.from_dict(block, **options)

    def __call__(self, config: Any, **options: Any) -> Any:
        """The table of quantisers: the quantiser for a config object."""
        return self.ours(config, **options) if isinstance(config, FileConfig) else self.original(config, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def is_ours(block: dict[str, Any]) -> bool:
    """Whether spearfish wrote a quantization_config, or reads a format that no other quantiser does, or one of its
    methods takes the file over from the method that it names (`spearfish.quantization`)."""
    if OUR_KEY in block:
        return True
    try:
        return interpret(block, "quantization_config").format not in THEIRS or resolve(block) != block["quant_method"]
    except SpearfishError:
        return False


def serve(arguments: Sequence[str]) -> None:
    """Run transformers' own OpenAI-style server; `arguments` are those of `transformers serve`.

    Within it every GPTQ and compressed-tensors file that can be read here is ours. Raises UnsupportedError if the
    packages of the server are missing.
    """
    try:
        from transformers.cli.serve import Serve, is_serve_available
    except ImportError as error:
        raise UnsupportedError(f"this transformers has no server: {error}") from error
    if not is_serve_available():
        raise UnsupportedError("the server needs a few more packages: pip install 'transformers[serving]'")
    import typer

    for table in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
        for method in SHARED_METHODS:
            table[method].takes_all = True
    server = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    server.command(context_settings={"help_option_names": ["-h", "--help"]})(Serve)
    server(args=list(arguments), prog_name="spearfish serve")


def register() -> None:
    """Put the switch over the shared methods. Calling it again changes nothing."""
    tables = ((auto.AUTO_QUANTIZATION_CONFIG_MAPPING, FileConfig), (auto.AUTO_QUANTIZER_MAPPING, FileQuantizer))
    for table, ours in tables:
        for method in SHARED_METHODS:
            if method in table and not isinstance(table[method], Switch):
                table[method] = Switch(table[method], ours)
        table.setdefault(OURS, ours)


def teach_peft() -> None:
    """Let PEFT put LoRA adapters on `QuantLinear` (it knows layers by their class). Nothing happens without PEFT."""
    try:
        from peft.tuners import tuners_utils
        from peft.tuners.lora import model as lora_model
        from peft.tuners.lora.gptq import GPTQLoraLinear
    except ImportError:
        return

    class QuantLoraLinear(GPTQLoraLinear):  # type: ignore[misc]
        """PEFT's layer for frozen bases: it calls the base as a whole and never reaches for its weight."""

        def _get_base_layer_device_and_dtype(self, base: QuantLinear) -> tuple[torch.device, torch.dtype]:
            prepared = base.prepared or base.prepare().prepared
            if prepared is None:
                raise SpearfishError("a layer has no prepared weight to put an adapter on")
            return prepared.device, prepared.dtype

    original = lora_model.dispatch_default
    if getattr(original, "knows_quant_linear", False):
        return

    def dispatch(target: nn.Module, adapter_name: str, config: Any, **options: Any) -> Any:
        base: Any = target
        if hasattr(target, "get_base_layer"):
            base = target.get_base_layer()  # type: ignore[operator]
        if isinstance(base, QuantLinear):
            with warnings.catch_warnings():
                # PEFT tells of every layer whose class it does not know that it is at the user's own risk.
                warnings.filterwarnings("ignore", message="Unsupported layer type")
                return QuantLoraLinear(target, adapter_name, config=config, **options)
        return original(target, adapter_name, config, **options)

    dispatch.knows_quant_linear = True  # type: ignore[attr-defined]
    lora_model.dispatch_default = dispatch
    plain_targets = tuners_utils._maybe_include_all_linear_layers

    def targets(config: Any, model: nn.Module) -> Any:
        """PEFT's "all-linear" stands for every `nn.Linear` but the head; ours are meant as well."""
        asked = str(getattr(config, "target_modules", None)).lower() == "all-linear"
        config = plain_targets(config, model)
        if asked:
            head = getattr(model, "get_output_embeddings", lambda: None)()
            # Below an adapter lies a `base_layer`, whose adapter PEFT has already named.
            ours = {name for name, layer in quantised(model) if layer is not head and not name.endswith(".base_layer")}
            config.target_modules = {*config.target_modules, *ours}
        return config

    tuners_utils._maybe_include_all_linear_layers = targets


register()
