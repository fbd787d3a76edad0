"""Any readable model to a directory of our own, with everything that serving it needs."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from paxserve.checkpoints.orbax import save_orbax
from paxserve.checkpoints.reader import CheckpointError
from paxserve.model_source import GGUF_TOKENIZER_FILE, ModelSource, gguf_tokenizer_metadata, resolve_model
from paxserve.models.config_quantization import check_quantization
from paxserve.models.registry import model_class
from paxserve.sharding import make_mesh

COPIED_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    GGUF_TOKENIZER_FILE,
)
DTYPES = ("float32", "bfloat16", "float16")


def convert(src: str | Path, dst: str | Path, dtype: str | None = None, quantization: str | None = None) -> None:
    """Writes the model `src` (whatever `resolve_model` takes) to the new directory `dst`, as an Orbax checkpoint.

    dtype: "float32", "bfloat16" or "float16"; None keeps what the source says. quantization: "fp8" keeps FP8 weights, which
    are dequantised otherwise. The whole model is held in host memory. An interrupted conversion leaves no `dst` behind.

    Raises CheckpointError if `dst` exists or the source cannot be loaded, ValueError for another dtype or a quantization
    that the source does not have.
    """
    dst = Path(dst)
    if dst.exists():
        raise CheckpointError(f"{dst} exists already; remove it or choose another name")
    source = resolve_model(src)
    dtype = source.config.dtype if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; supported are {', '.join(DTYPES)}")
    check_quantization(quantization, source.config)
    config = dataclasses.replace(source.config, dtype=dtype, quantization=quantization)

    model = model_class(config)(config, dtype=jnp.dtype(dtype), scan_layers=False, quantization=quantization)
    declared = nnx.state(model)
    params = source.load(declared, make_mesh(devices=jax.local_devices(backend="cpu")))
    partial = dst.with_name(f".{dst.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        save_orbax(partial, config, params)
        _copy_tokenizer(source, partial)
        partial.rename(dst)
    except BaseException:
        shutil.rmtree(partial)
        raise


def _copy_tokenizer(source: ModelSource, directory: Path) -> None:
    """What the tokenizer and the sampling defaults are read from."""
    if source.gguf is not None:
        if metadata := gguf_tokenizer_metadata(source.gguf):
            (directory / GGUF_TOKENIZER_FILE).write_text(json.dumps(metadata, ensure_ascii=False), encoding="utf-8")
        return
    for file in COPIED_FILES:
        if (source.path / file).exists():
            shutil.copyfile(source.path / file, directory / file)
