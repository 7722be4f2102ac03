"""vLLM as a host: `vllm serve FOLDER` runs checkpoints that vLLM itself no longer reads, on our kernels.

vLLM finds `register` through the entry point group "vllm.general_plugins" and calls it in each of its processes. It
registers three methods, which claim the files that are ours before vLLM's own GPTQ and compressed-tensors see them;
every other file stays theirs.

A layer of vLLM may hold several layers of the file (q, k and v; gate and up) and one rank's part of them. Each is a
`Part`: rows and columns of one stored layer, maybe in a format of its own. The parts' tensors are cut while they are
loaded, decoded when all are there, joined where they are alike, and prepared for the kernels; what was loaded is let
go. So one path serves every format, any mixture of them, and any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import vllm.envs as envs
from torch.nn import functional
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS as HOST_METHODS
from vllm.model_executor.layers.quantization import get_quantization_config as host_class
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from spearfish import quantization, sparse24
from spearfish.checkpoint import open_checkpoint
from spearfish.checkpoint.config import QuantConfig, interpret
from spearfish.checkpoint.patterns import Budget, Pattern
from spearfish.checkpoint.reader import BITMASK_PARTS, Checkpoint
from spearfish.errors import FormatError, SpearfishError, UnsupportedError
from spearfish.formats import FORMATS, transforms
from spearfish.formats.ct_bitmask import CtSparseBitmask
from spearfish.formats.ct_pack_quantized import CtPackQuantized
from spearfish.formats.dense import Dense
from spearfish.formats.gptq import Gptq, GptqV2
from spearfish.kernels.matmul import prepare
from spearfish.quantization.compressed_tensors import CompressedTensorsConfig, Sparse24Config
from spearfish.quantization.marlin import GptqMarlin24Config, MarlinConfig
from spearfish.quantization.shard import Stored, Window, cut, decode, why_not
from spearfish.scheme import QuantScheme, QuantWeight

logger = init_logger("vllm.spearfish")

# Formats that vLLM reads too: ours only if they turn out to be 2:4.
_SHARED = (Gptq.name, GptqV2.name, CtPackQuantized.name)
# Formats of plain values, which may or may not be 2:4.
_VALUES = (Dense.name, CtSparseBitmask.name)
# vLLM's own newer word for the GPTQ family.
_HOSTS_WORD = "auto_gptq"
# Layers looked into to see whether a file that does not say so is 2:4.
_SAMPLES = 3


def register() -> None:
    """Make our methods known to vLLM. It calls this once in every process; calling it again changes nothing."""
    for ours in (GptqMarlin24ForVllm, MarlinForVllm, Sparse24ForVllm):
        name = ours.get_name()
        if name not in HOST_METHODS:
            register_quantization_config(name)(ours)
        elif not _is_ours(name):
            logger.warning("spearfish leaves the name %r to vLLM, which has a method of that name", name)


def _is_ours(name: str) -> bool:
    return name in HOST_METHODS and issubclass(host_class(name), FileConfig)


def claim(block: Mapping[str, Any], user: str | None, hf_config: Any = None) -> str | None:
    """The method of ours that takes a checkpoint with this quantization_config, or None to leave it to vLLM."""
    try:
        quant = interpret(dict(block), "quantization_config")
    except SpearfishError:
        return None
    served = GptqMarlin24Config.name
    if quant.format in _SHARED:
        forced = user == served and quant.format == CtPackQuantized.name
        if not forced and (user not in (None, served) or not _is_24(block, quant, hf_config)):
            return None
    else:
        try:
            served = quantization.resolve(block, None if user == _HOSTS_WORD else user, hf_config)
        except SpearfishError:
            return None
        if served == CompressedTensorsConfig.name:
            served = GptqMarlin24Config.name
    # Each of our methods serves every file; so a name that vLLM keeps for itself is replaced by one that is ours.
    names = (served, GptqMarlin24Config.name, MarlinConfig.name, Sparse24Config.name)
    return next((name for name in names if _is_ours(name)), None)


def _is_24(block: Mapping[str, Any], quant: QuantConfig, hf_config: Any) -> bool:
    """Whether a file in a format that does not record 2:4 is so: by its label, else by its values, else because we
    wrote it. Files of others are only looked into where nothing else reads 2:4 from them."""
    sparsity = block.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("sparsity_structure") == "2:4":
        return True
    if quant.ours is None and quant.format != CtPackQuantized.name:
        return False
    folder = str(getattr(hf_config, "_name_or_path", "") or "")
    seen = _looks_24(folder) if folder else None
    return quant.ours is not None if seen is None else seen


@lru_cache(maxsize=8)
def _looks_24(name: str) -> bool | None:
    """Whether any of the smallest layers of a folder is 2:4; None if there is nothing that can be looked into. Models
    with quantised experts are not: vLLM runs those dense, and we would refuse them."""
    folder = _local(name)
    # The hub's cache holds the config before it holds weights.
    if folder is None or not any(folder.glob("*.safetensors")):
        return None
    try:
        checkpoint = open_checkpoint(folder)
        if any("experts" in layer.split(".") for layer in checkpoint.linears):
            return False
        smallest = sorted(checkpoint.linears.values(), key=lambda info: info.nbytes)[:_SAMPLES]
        return any(checkpoint.weight(info.name).scheme.is_sparse for info in smallest)
    except SpearfishError as error:
        logger.warning("spearfish cannot look into %s: %s", name, error)
        return None


def _local(name: str, revision: str | None = None, download: bool = False) -> Path | None:
    """The folder of a model: itself, or the hub's copy in the cache, fetched if `download` says so."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.safetensors", "*.json"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=not download))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        if download:
            logger.warning("spearfish: %s cannot be fetched: %s", name, error)
        return None


@dataclass(frozen=True)
class FileLayer:
    """One quantised layer of the file: how it is stored, its true size, and the dtype of each of its tensors."""

    stored: Stored
    n: int
    k: int
    dtypes: dict[str, torch.dtype]
    companions: tuple[str, ...] = ()


def _layers_of(checkpoint: Checkpoint) -> dict[str, FileLayer]:
    """Every quantised layer of a folder, from headers and config."""
    layers = {}
    companions: dict[str, list[str]] = {}
    for full in checkpoint.companions:
        name, _, local = full.rpartition(".")
        companions.setdefault(name, []).append(local)
    for name, info in checkpoint.linears.items():
        form = FORMATS[info.format]
        n, k = (-(-size // step) * step for size, step in ((info.n, form.n_multiple), (info.k, form.k_multiple)))
        stored = Stored(name, form, n, k, info.scheme, info.bits, checkpoint.quant.of(name))
        dtypes = {local: checkpoint.entries[full].dtype for local, full in info.tensors.items()}
        layers[name] = FileLayer(stored, info.n, info.k, dtypes, tuple(companions.get(name, ())))
    return layers


class FileConfig(QuantizationConfig):  # type: ignore[misc]
    """What vLLM asks about a whole checkpoint. One subclass per method name; the file decides everything else."""

    method: type[quantization.QuantizationConfig]

    def __init__(self, block: Mapping[str, Any]) -> None:
        super().__init__()
        self.block = dict(block)
        interpret(self.block, "quantization_config")  # a block that contradicts itself must fail now
        # None until a folder was seen; then the layers' names, as vLLM calls the unfused ones.
        self.layers: dict[str, FileLayer] | None = None
        self.report = Report()

    @property
    def quant(self) -> QuantConfig:
        """What the block says. Read anew each time: it holds patterns, which do not travel to vLLM's processes."""
        return interpret(self.block, "quantization_config")

    @classmethod
    def get_name(cls) -> str:
        return cls.method.name

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return list(cls.method.supported_dtypes)

    @classmethod
    def get_min_capability(cls) -> int:
        return cls.method.min_capability

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantize_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FileConfig:
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Exceptional, as vLLM says: these files call themselves GPTQ or compressed-tensors."""
        return claim(hf_quant_cfg, user_quant, hf_config)

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """vLLM drops the group index of every column by default; our formats want to see it. The oldest bitmask files
        put the parameter's own name in front: P.weight.bitmask."""
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper(orig_to_new_suffix={f".weight.{part}": f".{part}" for part in BITMASK_PARTS})

    def maybe_update_config(self, model_name: str, *_: Any, revision: str | None = None, **__: Any) -> None:
        """Read the headers of the checkpoint, which tell of every layer its format, size and scheme."""
        folder = _local(model_name, revision, download=True)
        if folder is None or not any(folder.glob("*.safetensors")):
            logger.warning(
                "spearfish: no safetensors to look into for %s; every linear that the config does not ignore is taken"
                " to be %s",
                *(model_name, self.quant.format),
            )
            return
        checkpoint = open_checkpoint(folder)
        self._refuse_old_names(checkpoint)
        self.layers = _layers_of(checkpoint)

    @staticmethod
    def _refuse_old_names(checkpoint: Checkpoint) -> None:
        """Raise UnsupportedError for what the oldest bitmask files hold and this vLLM has no place for."""
        reason = None
        if checkpoint.tables:
            reason = f"{next(iter(checkpoint.tables))} is compressed, which vLLM only reads of linear layers"
        elif not hasattr(QuantizationConfig, "get_checkpoint_weight_mapper"):
            old = (name for name in checkpoint.entries if name.endswith(".weight.bitmask"))
            reason = next((f"it has the old name {name}, which this vLLM cannot map" for name in old), None)
        if reason:
            raise UnsupportedError(
                f"{checkpoint.path}: {reason}. Write it anew: spearfish convert {checkpoint.path} OUT"
                f" --to ct-sparse-24-bitmask"
            )

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the layers as vLLM renames modules of this model."""
        if self.layers is not None:
            self.layers = hf_to_vllm_mapper.apply_dict(self.layers)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        if not isinstance(layer, LinearBase):
            self._refuse_others(layer, prefix)
            return None
        names = self.names(prefix)
        if not any(self.is_quantised(name) for name in names):
            return UnquantizedLinearMethod()
        return FileLinearMethod(self, prefix, names)

    def names(self, prefix: str) -> list[str]:
        """The unfused names behind a name of vLLM's: qkv_proj stands for q_proj, k_proj and v_proj."""
        parent, dot, leaf = prefix.rpartition(".")
        fused = self.packed_modules_mapping.get(leaf, [])
        if not fused or (self.layers is not None and prefix in self.layers):
            return [prefix]
        return [f"{parent}{dot}{each}" for each in fused]

    def is_quantised(self, name: str) -> bool:
        """Whether the file holds this layer quantised; without a file, whether the config does not exclude it."""
        if self.layers is not None:
            return name in self.layers
        listed = self.block.get("ignore") or self.block.get("modules_to_not_convert") or []
        patterns = [each[3:] for each in listed if each.startswith("re:")]
        patterns += [key[2:] for key in self.block.get("dynamic") or {} if key.startswith("-:")]
        budget = Budget(name)
        return name not in listed and not any(Pattern(f"^(?:{each})").search(name, budget) for each in patterns)

    def layer_of(self, name: str, n: int, k: int) -> FileLayer | None:
        """What is known of an unfused layer [n, k], or None if it is not quantised."""
        if not self.is_quantised(name):
            return None
        if self.layers is not None:
            return self.layers[name]
        quant = self.quant
        declared, form = quant.of(name), FORMATS[quant.format]
        size = -1 if declared.group_size is None else declared.group_size
        scheme = QuantScheme(declared.bits, None if size == -1 else size) if declared.bits else QuantScheme(16)
        stored_n, stored_k = (-(-s // step) * step for s, step in ((n, form.n_multiple), (k, form.k_multiple)))
        # The format itself says what a layer with its tensors is: whether it is 2:4, for one.
        specs = form.tensors(stored_n, stored_k, scheme)
        tensors = {
            spec.name: torch.tensor([stored_n, stored_k]).reshape(spec.shape)
            if torch.Size(spec.shape).numel() == 2 and torch.int64 in spec.dtypes
            else torch.empty(spec.shape, dtype=spec.dtypes[0], device="meta")
            for spec in specs
            if not spec.optional
        }
        about = form.describe(tensors, declared, name)
        stored = Stored(name, form, stored_n, stored_k, about.scheme, about.bits, declared)
        return FileLayer(stored, n, k, {spec.name: spec.dtypes[0] for spec in specs})

    def _refuse_others(self, layer: torch.nn.Module, prefix: str) -> None:
        """Raise UnsupportedError if the file holds quantised layers inside a module that is no linear."""
        inside = [name for name in self.layers or () if name == prefix or name.startswith(f"{prefix}.")]
        if inside:
            raise UnsupportedError(
                f"{prefix} is a {type(layer).__name__} and quantised in the file ({inside[0]}"
                f"{f' and {len(inside) - 1} more' if len(inside) > 1 else ''}); spearfish runs quantised linear layers"
                f" only. Compress the model again with these layers ignored, or convert it to a dense format"
            )


class GptqMarlin24ForVllm(FileConfig):
    method = GptqMarlin24Config


class MarlinForVllm(FileConfig):
    method = MarlinConfig


class Sparse24ForVllm(FileConfig):
    method = Sparse24Config


@dataclass
class Report:
    """Counts the layers of one model, to say once what they take."""

    open: int = 0
    layers: int = 0
    loaded: int = 0
    prepared: int = 0
    paths: dict[str, int] = field(default_factory=dict)
    warm: set[tuple[Any, ...]] = field(default_factory=set)  # kinds of pieces whose kernels were run

    def done(self, loaded: int, prepared: int, paths: Sequence[str]) -> None:
        self.open -= 1
        self.layers += 1
        self.loaded += loaded
        self.prepared += prepared
        for path in paths:
            self.paths[path] = self.paths.get(path, 0) + 1
        if self.open == 0:
            logger.info(
                "spearfish: %d layers, %.1f MiB as loaded, %.1f MiB as they run (%s)",
                *(self.layers, self.loaded / 2**20, self.prepared / 2**20),
                ", ".join(f"{count} x {path}" for path, count in self.paths.items()),
            )


@dataclass
class Part:
    """Rows and columns of one layer of the file that this rank holds: consecutive rows of a layer of vLLM's.

    file: None if the layer is not quantised, though it shares a fused layer with one that is.
    """

    name: str
    file: FileLayer | None
    window: Window
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensor_names(self) -> list[str]:
        return ["weight"] if self.file is None else self.file.stored.tensor_names()

    def take(self, local: str, tensor: torch.Tensor, device: torch.device) -> None:
        """Keep what this part needs of a whole tensor."""
        if self.file is None or self.file.stored.form.name == Dense.name:
            w = self.window
            piece = tensor[w.n_start : w.n_stop, w.k_start : w.k_stop]
        else:
            piece = cut(self.file.stored, self.window, local, tensor)
        self.tensors[local] = piece.to(device, copy=True)

    def weight(self, dtype: torch.dtype) -> QuantWeight | torch.Tensor:
        """The neutral weight, or the plain values [n, k] of a layer that has none."""
        if not self.tensors:
            raise FormatError(f"{self.name}: the checkpoint has none of its tensors")
        file = self.file
        if file is not None and file.stored.form.name not in _VALUES:
            return transforms.find_24(decode(file.stored, self.window, self.tensors))
        w = self.window
        if file is not None and file.stored.form.name == CtSparseBitmask.name:
            values = CtSparseBitmask().values(self.tensors, self.name)[w.n_start : w.n_stop, w.k_start : w.k_stop]
        else:
            values = self.tensors["weight"]
        if file is not None:
            try:
                return transforms.sparse_values(values, self.name)
            except FormatError as reason:
                logger.info("spearfish: %s runs as a plain linear: %s", self.name, reason)
        return values.to(dtype)

    def invented(self, dtype: torch.dtype, device: torch.device) -> QuantWeight | torch.Tensor:
        """A weight of the right kind for vLLM's dummy loading, which reads no file."""
        n, k = self.window.n_stop - self.window.n_start, self.window.k_stop - self.window.k_start
        if self.file is None:
            return torch.full((n, k), 1e-3, dtype=dtype, device=device)
        scheme = self.file.stored.scheme
        width = k // 2 if scheme.is_sparse else k
        positions = None
        if scheme.is_sparse:
            patterns = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8, device=device)
            positions = patterns[torch.randint(len(patterns), (n, k // 4), device=device)]
        # Values such that activations keep about their size from layer to layer.
        size = width**-0.5
        if scheme.bits == 16:
            values = torch.empty((n, width), dtype=dtype, device=device).uniform_(-2 * size, 2 * size)
            return QuantWeight(scheme, values, positions=positions)
        codes = torch.randint(0, 1 << scheme.bits, (n, width), dtype=torch.uint8, device=device)
        scales = torch.empty((n, scheme.groups(k)), dtype=torch.float16, device=device)
        scales.uniform_(size, 3 * size).div_(1 << (scheme.bits - 1))
        return QuantWeight(replace(scheme, symmetric=True), codes, scales, positions)


@dataclass(frozen=True)
class Piece:
    """Rows of the layer's product that one call gives: by the kernels' op, or by the library if `facts` is None."""

    n: int
    facts: tuple[Any, ...] | None
    suffix: str  # of the names of its parameters


class FileLinearMethod(QuantizeMethodBase):  # type: ignore[misc]
    """The method of one linear layer of vLLM's."""

    def __init__(self, config: FileConfig, prefix: str, names: list[str]) -> None:
        self.config, self.prefix, self.names = config, prefix, names
        self.parts: list[Part] = []
        self.dtype = torch.float16
        self.is_dummy = False
        self.graph_sizes: list[int] = []
        self.placeholders: list[str] = []
        self.pieces: list[Piece] | None = None

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Say which parts of which stored layers this rank needs, and put an empty parameter for each tensor name.

        Raises UnsupportedError if the number of ranks cuts a layer where it cannot be cut, FormatError if the file's
        sizes are not the model's.
        """
        from vllm.config import get_current_vllm_config

        self.dtype = params_dtype
        engine = get_current_vllm_config()
        # vLLM's dummy loading invents the weights, for measurements without a checkpoint.
        self.is_dummy = str(engine.load_config.load_format) == "dummy"
        self.graph_sizes = list(engine.compilation_config.cudagraph_capture_sizes or ())
        sizes = Sizes(layer, input_size_per_partition, list(output_partition_sizes), input_size)
        sources = _sources(self.config, self.prefix, self.names, sizes)
        _require_legal(self.prefix, sources, sizes)
        self.parts = [part for source in sources for part in source.parts(sizes, sizes.rank)]
        wanted: dict[str, torch.dtype] = {}
        for source in sources:
            if source.file is None:
                wanted.setdefault("weight", params_dtype)
            else:
                wanted |= source.file.dtypes
                wanted |= dict.fromkeys(source.file.companions, params_dtype)
        self.placeholders = list(wanted)
        for local, dtype in wanted.items():
            placeholder = torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
            placeholder.weight_loader = Loader(self, local)  # type: ignore[attr-defined]
            layer.register_parameter(local, placeholder)
        self.config.report.open += 1

    def load(self, local: str, placeholder: torch.Tensor, loaded: torch.Tensor, shard: Any = None) -> None:
        """Take a whole tensor of the file. shard: which of the fused layers it belongs to, as vLLM numbers them."""
        for part in self.parts_of(shard):
            if local in part.tensor_names():
                part.take(local, loaded, placeholder.device)

    def parts_of(self, shard: Any) -> list[Part]:
        """The parts behind vLLM's shard id: None for all, q, k or v, a number, or several numbers."""
        if shard is None:
            return self.parts
        numbers = shard if isinstance(shard, tuple) else (shard,)
        return [self.parts["qkv".index(each) if isinstance(each, str) else each] for each in numbers]

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Decode the parts, join what is alike, prepare it for the kernels, and let go of what was loaded."""
        if self.pieces is not None:
            return
        device = getattr(layer, self.placeholders[0]).device
        loaded = sum(tensor.nbytes for part in self.parts for tensor in part.tensors.values())
        weights: list[QuantWeight | torch.Tensor] = []
        for part in self.parts:
            weights.append(part.invented(self.dtype, device) if self.is_dummy else part.weight(self.dtype))
            part.tensors.clear()
        for local in self.placeholders:
            delattr(layer, local)
        self.pieces, paths, nbytes = [], [], 0
        for number, weight in enumerate(_joined(weights)):
            suffix = f"_{number}" if number else ""
            if isinstance(weight, QuantWeight):
                prepared = prepare(weight, device, self.dtype, batch_invariant(device))
                paths.append(f"{weight.scheme}, {prepared.path}")
                dense, stream, scale = prepared.dense, prepared.stream, prepared.column_scale
                facts = None if stream is None else prepared.facts
                n = prepared.n
            else:
                dense, stream, scale, facts, n = weight, None, None, None, weight.shape[0]
                paths.append("plain values")
            # The names are those by which vLLM's adapters find the device of a layer.
            for name, tensor in (("weight", dense), ("weight_packed", stream), ("column_scale", scale)):
                if tensor is not None:
                    layer.register_parameter(name + suffix, torch.nn.Parameter(tensor, requires_grad=False))
                    nbytes += tensor.nbytes
            self.pieces.append(Piece(n, facts, suffix))
            if device.type == "cuda":
                self.warm_up(layer, self.pieces[-1])
        self.config.report.done(loaded, nbytes, paths)

    def warm_up(self, layer: torch.nn.Module, piece: Piece) -> None:
        """Run a piece once with each number of tokens that vLLM will capture a CUDA graph of, unless a piece of its
        kind was: kernels are compiled and loaded at their first call, which must not fall into a capture."""
        if piece.facts is None or piece.facts in self.config.report.warm:
            return
        self.config.report.warm.add(piece.facts)
        k = piece.facts[2]
        for tokens in self.graph_sizes:
            x = torch.zeros((tokens, k), dtype=self.dtype, device=getattr(layer, f"weight_packed{piece.suffix}").device)
            _product(layer, x, None, piece)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., k] to [..., n]."""
        pieces = self.pieces
        if pieces is None:
            raise SpearfishError(f"{self.prefix}: called before its weights were processed")
        if len(pieces) == 1:
            return _product(layer, x, bias, pieces[0])
        products = torch.cat([_product(layer, x, None, piece) for piece in pieces], dim=-1)
        return products if bias is None else products + bias


class Loader:
    """What vLLM calls with each tensor of a parameter's name. An object, since closures cannot be copied."""

    def __init__(self, method: FileLinearMethod, local: str) -> None:
        self.method, self.local = method, local

    def __call__(self, parameter: torch.Tensor, loaded: torch.Tensor, shard: Any = None) -> None:
        self.method.load(self.local, parameter, loaded, shard)


def _product(layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None, piece: Piece) -> torch.Tensor:
    if piece.facts is None:
        return functional.linear(x, getattr(layer, f"weight{piece.suffix}"), bias)
    stream = getattr(layer, f"weight_packed{piece.suffix}")
    scale = getattr(layer, f"column_scale{piece.suffix}", None)
    product: torch.Tensor = torch.ops.spearfish.matmul(x, stream, scale, bias, *piece.facts)
    return product


def batch_invariant(device: torch.device) -> bool:
    """Whether vLLM was told to give each row the same bits in every batch. A CPU has one way to run only."""
    return bool(envs.VLLM_BATCH_INVARIANT) and device.type == "cuda"


@dataclass(frozen=True)
class Sizes:
    """The sizes of a layer of vLLM's: what one rank holds, of how much."""

    layer: torch.nn.Module
    k: int  # of one rank
    rows: list[int]  # of one rank, for each fused layer
    full_k: int

    @property
    def ranks(self) -> int:
        return int(getattr(self.layer, "tp_size", 1))

    @property
    def rank(self) -> int:
        return int(getattr(self.layer, "tp_rank", 0))

    @property
    def is_row_parallel(self) -> bool:
        return self.k < self.full_k

    def full_rows(self) -> list[int]:
        """Rows of each fused layer in the file."""
        return [size * self.ranks_of_rows() // self.replicas(number) for number, size in enumerate(self.rows)]

    def ranks_of_rows(self) -> int:
        whole = self.is_row_parallel or sum(self.rows) == int(getattr(self.layer, "output_size", 0))
        return 1 if whole else self.ranks

    def replicas(self, number: int) -> int:
        """How many ranks hold the same rows: more than one for k and v if there are more ranks than heads of them."""
        return int(getattr(self.layer, "num_kv_head_replicas", 1)) if number and len(self.rows) == 3 else 1


@dataclass(frozen=True)
class Source:
    """One layer of the file and the fused layers of vLLM's, by number, that its rows belong to."""

    name: str
    file: FileLayer | None
    numbers: tuple[int, ...]

    def windows(self, sizes: Sizes, rank: int, ranks: int) -> list[Window]:
        """What a rank of so many needs of the file, one window for each fused layer."""
        full, first, found = sizes.full_rows(), 0, []
        k_step = sizes.full_k // ranks if sizes.is_row_parallel else sizes.full_k
        k_start = k_step * rank if sizes.is_row_parallel else 0
        for number in self.numbers:
            split = sizes.ranks_of_rows() > 1
            step = sizes.rows[number] if ranks == sizes.ranks else full[number] // ranks
            start = first + (rank // sizes.replicas(number) * step if split else 0)
            found.append(Window(start, start + (step if split else full[number]), k_start, k_start + k_step))
            first += full[number]
        return found

    def parts(self, sizes: Sizes, rank: int) -> list[Part]:
        return [Part(self.name, self.file, window) for window in self.windows(sizes, rank, sizes.ranks)]


def _sources(config: FileConfig, prefix: str, names: list[str], sizes: Sizes) -> list[Source]:
    """The layers of the file behind a layer of vLLM's. Raises FormatError if their sizes are not the model's."""
    full = sizes.full_rows()
    left = list(range(len(full)))
    sources = []
    for place, name in enumerate(names):
        known = config.layers.get(name) if config.layers is not None else None
        if len(names) == len(full):
            numbers = left[:1]
        elif known is None:
            numbers = left if place == len(names) - 1 else []
        else:
            # One stored layer may fill several of vLLM's: as many as its rows suffice for.
            numbers = []
            while sum(full[each] for each in numbers) < known.n and len(numbers) < len(left):
                numbers = left[: len(numbers) + 1]
        n = sum(full[each] for each in numbers)
        file = known or config.layer_of(name, n, sizes.full_k)
        if not numbers or (file is not None and (file.n, file.k) != (n, sizes.full_k)):
            stored = "" if file is None else f" and [{file.n}, {file.k}] in the file"
            raise FormatError(
                f"{name} is [{n}, {sizes.full_k}] in the model{stored} (part of {prefix}, rows {full}); do config.json"
                f" and the weights belong together?"
            )
        sources.append(Source(name, file, tuple(numbers)))
        left = left[len(numbers) :]
    if left:
        raise UnsupportedError(
            f"{prefix}: vLLM fuses layers of {full} rows, which the file's {', '.join(names)} do not fill"
        )
    return sources


def _require_legal(prefix: str, sources: Sequence[Source], sizes: Sizes) -> None:
    """Raise UnsupportedError if a layer cannot be cut for this number of ranks, naming the nearest one that works."""

    def reason(ranks: int) -> str | None:
        for source in sources:
            if source.file is None or source.file.stored.form.name in _VALUES:
                continue
            for rank in range(ranks):
                for window in source.windows(sizes, rank, ranks):
                    found = why_not(source.file.stored, window)
                    if found:
                        shape = f"[{window.n_stop - window.n_start}, {window.k_stop - window.k_start}]"
                        return f"{source.name} [{source.file.n}, {source.file.k}] as {shape} on rank {rank}: {found}"
        return None

    why = reason(sizes.ranks)
    if why is None:
        return
    fits = [ranks for ranks in range(sizes.ranks - 1, 0, -1) if sizes.full_k % ranks == 0 and not reason(ranks)]
    advice = f"the nearest size that works is {fits[0]}" if fits else "it does not run at any size"
    raise UnsupportedError(f"{prefix} cannot be split over tensor_parallel_size {sizes.ranks}: {why}; {advice}")


def _joined(weights: Sequence[QuantWeight | torch.Tensor]) -> list[QuantWeight | torch.Tensor]:
    """Neighbours that are alike put on top of each other, so that one call does for all."""
    joined: list[QuantWeight | torch.Tensor] = []
    for weight in weights:
        last = joined[-1] if joined else None
        if isinstance(last, torch.Tensor) and isinstance(weight, torch.Tensor):
            joined[-1] = torch.cat((last, weight))
        elif isinstance(last, QuantWeight) and isinstance(weight, QuantWeight) and _alike(last, weight):
            both = {name: torch.cat((tensor, weight.tensors()[name])) for name, tensor in last.tensors().items()}
            joined[-1] = QuantWeight(last.scheme, **both)
        else:
            joined.append(weight)
    return joined


def _alike(a: QuantWeight, b: QuantWeight) -> bool:
    if a.group_index is not None or b.group_index is not None:
        return False
    dtypes = [{name: tensor.dtype for name, tensor in weight.tensors().items()} for weight in (a, b)]
    return a.scheme == b.scheme and dtypes[0] == dtypes[1]
