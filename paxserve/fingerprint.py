"""Whether two models are the same one, without reading all of their weights."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from paxserve.checkpoints.config_json import config_to_json
from paxserve.checkpoints.orbax import PARAMS_DIR
from paxserve.config import EngineConfig
from paxserve.model_source import ModelSource

_SAMPLES, _SAMPLE_BYTES = 64, 1024


def fingerprint(source: ModelSource, config: EngineConfig) -> str:
    """16 hex digits of the model's configuration and of 64 KiB out of every file of weights, evenly spread.

    Does not depend on where the files are. Random weights are known by their seed.
    """
    digest = hashlib.sha256(json.dumps(config_to_json(source.config), sort_keys=True).encode())
    if config.load_format == "dummy":
        digest.update(f"random weights {config.seed}".encode())
    else:
        for file in _weight_files(source):
            for sample in _samples(file):
                digest.update(sample)
    return digest.hexdigest()[:16]


def _weight_files(source: ModelSource) -> list[Path]:
    if source.format == "gguf":
        return [source.path]
    if source.format == "orbax":
        return sorted(file for file in (source.path / PARAMS_DIR).rglob("*") if file.is_file())
    return sorted(source.path.glob("*.safetensors"))


def _samples(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield f"{size} bytes".encode()
    with open(path, "rb") as file:
        for number in range(_SAMPLES):
            file.seek(number * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)
