"""Directories of our own: what was saved comes back in any layout and dtype, and conversion leaves all or nothing."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from golden.tiny_models import MODELS, weight
from tiny_checkpoints import (
    assert_params,
    expected_params,
    hf_config,
    hf_tensors,
    llama,
    tiny_config,
    unrolled,
    write_gguf,
    write_hf,
)

from paxserve.checkpoints import convert as convert_module
from paxserve.checkpoints.config_json import config_from_json, config_to_json
from paxserve.checkpoints.convert import convert
from paxserve.checkpoints.load import load_params
from paxserve.checkpoints.orbax import load_orbax, orbax_config, save_orbax
from paxserve.checkpoints.reader import CheckpointError
from paxserve.checkpoints.safetensors import SafetensorsReader
from paxserve.model_source import resolve_model
from paxserve.models.config import RopeConfig
from paxserve.models.config_hf import config_from_hf
from paxserve.models.registry import model_class
from paxserve.models.weights import tensor_sources
from paxserve.sharding import make_mesh

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def test_config_survives_json():
    plain = tiny_config(rope_scaling=LLAMA3, eos_token_id=[2, 7])
    factors = RopeConfig(frequency_factors=(1.0, 0.3, 1 / 3))
    for config in (plain, dataclasses.replace(plain, windows=(None, 8), rope=factors, bos_token_id=None)):
        assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config
    with pytest.raises(ValueError, match="unknown ModelConfig fields: flavour"):
        config_from_json(config_to_json(plain) | {"flavour": 1})
    with pytest.raises(ValueError, match="missing 1 required positional argument: 'vocab_size'"):
        config_from_json({k: v for k, v in config_to_json(plain).items() if k != "vocab_size"})


@pytest.mark.parametrize("saved_scanned", [False, True])
@pytest.mark.parametrize("restored_scanned", [False, True])
def test_round_trip_between_layouts(tmp_path, saved_scanned, restored_scanned):
    config = tiny_config(attention_bias=True)
    tensors = hf_tensors(config)
    write_hf(tmp_path / "hf", hf_config(attention_bias=True), tensors)
    mesh = make_mesh()
    params = load_params(SafetensorsReader(tmp_path / "hf"), config, llama(config, scan_layers=saved_scanned), mesh)
    save_orbax(tmp_path, config, params)
    assert orbax_config(tmp_path) == config
    restored = load_orbax(tmp_path, llama(config, scan_layers=restored_scanned), mesh)
    assert_params(restored, expected_params(config, tensors))


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_casts_to_the_declared_dtype(tmp_path, stored, scan_layers):
    config = tiny_config()
    tensors = hf_tensors(config)
    write_hf(tmp_path / "hf", hf_config(), tensors)
    convert(tmp_path / "hf", tmp_path / "out", dtype=stored)
    source = resolve_model(tmp_path / "out")
    assert source.config.dtype == stored
    expected = {name: value.astype(stored) for name, value in expected_params(config, tensors).items()}
    for dtype in (jnp.float32, jnp.bfloat16):
        params = source.load(llama(config, dtype, scan_layers), make_mesh())
        assert_params(params, {name: value.astype(dtype) for name, value in expected.items()})


@pytest.fixture
def converted(tmp_path):
    config = tiny_config()
    write_hf(tmp_path / "hf", hf_config(), hf_tensors(config))
    convert(tmp_path / "hf", tmp_path / "converted")
    return tmp_path / "converted"


def test_refuses_what_does_not_fit(converted):
    config = tiny_config()
    other = dataclasses.replace(config, num_layers=3, windows=(None,) * 3)
    with pytest.raises(CheckpointError, match=r"converted/params lacks parameter layers\.2\.attn\.out\.kernel, "):
        load_orbax(converted, llama(other, scan_layers=True), make_mesh())
    other = dataclasses.replace(config, num_layers=1, windows=(None,))
    with pytest.raises(
        CheckpointError, match=r"unknown parameter layers\.1\.attn\.out\.kernel, .* in .*converted/params"
    ):
        load_orbax(converted, llama(other), make_mesh())
    other = dataclasses.replace(config, vocab_size=65)
    with pytest.raises(
        CheckpointError,
        match=r"embed\.embedding in .*converted/params has shape \[64, 32\]; the model asks for \[65, 32\]",
    ):
        load_orbax(converted, llama(other), make_mesh())


def test_refuses_damaged_directories(converted):
    config = tiny_config()
    data = max((converted / "params").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"converted/params is damaged; restoring .* failed"):
        load_orbax(converted, llama(config), make_mesh())
    (converted / "params" / "_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match="converted/params is not a readable Orbax checkpoint"):
        load_orbax(converted, llama(config), make_mesh())
    (converted / "model_config.json").write_text('{"format_version": 1, "config": {}}')
    with pytest.raises(
        CheckpointError,
        match=r"model_config\.json cannot be read: .*format_version is 1; supported is 2; convert it anew",
    ):
        resolve_model(converted)
    (converted / "model_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"model_config\.json cannot be read"):
        resolve_model(converted)


def test_convert_keeps_the_tokenizer_and_generation_config(tmp_path, smollm2_gguf):
    """From GGUF, then from our own format again."""
    config = dataclasses.replace(tiny_config(), dtype="float32")
    write_gguf(tmp_path / "tiny.gguf", config, hf_tensors(config), tokenizer_of=smollm2_gguf)
    convert(tmp_path / "tiny.gguf", tmp_path / "one")
    convert(tmp_path / "one", tmp_path / "two", dtype="bfloat16")
    first, last = resolve_model("smollm2").tokenizer, resolve_model(tmp_path / "two").tokenizer
    text = "def f(x):\n    return 12345 * x  # Größe 🍕 <|im_end|>"
    assert last.encode(text) == first.encode(text)
    assert (last.eos_token_id, last.chat_template) == (first.eos_token_id, first.chat_template)
    assert first.chat_template


def test_convert_copies_hugging_face_files(tmp_path):
    write_hf(tmp_path / "hf", hf_config(), hf_tensors(tiny_config()))
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [2, 9], "temperature": 0.6}')
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "hf" / "README.md").write_text("not needed")
    convert(tmp_path / "hf", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "chat_template.jinja",
        "generation_config.json",
        "model_config.json",
        "params",
    ]
    source = resolve_model(tmp_path / "out")
    assert source.config.eos_token_ids == (2, 9)
    assert source.generation_config["temperature"] == 0.6
    assert source.tokenizer is None


def test_convert_writes_all_or_nothing(tmp_path, monkeypatch):
    write_hf(tmp_path / "hf", hf_config(), hf_tensors(tiny_config()))

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, "_copy_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "hf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]

    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="out exists already; remove it or choose another name"):
        convert(tmp_path / "hf", tmp_path / "out")
    with pytest.raises(ValueError, match="dtype 'int8' is not supported"):
        convert(tmp_path / "hf", tmp_path / "other", dtype="int8")


def bfloat16_llama():
    """(config.json, tensors)"""
    fields = hf_config(torch_dtype="bfloat16")
    return fields, hf_tensors(config_from_hf(fields), ml_dtypes.bfloat16)


def bfloat16_deepseek():
    """The same of a model with 8 heads and 8 experts."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    fields = {**MODELS["deepseek_v3_experts"], **heads, "n_routed_experts": 8, "torch_dtype": "bfloat16"}
    sources = tensor_sources(config_from_hf(fields))
    return fields, {source.name: weight(source.name, source.shape).astype(ml_dtypes.bfloat16) for source in sources}


@pytest.mark.parametrize("make", [bfloat16_llama, bfloat16_deepseek])
def test_every_device_holds_and_reads_its_shard_only(tmp_path, make):
    """On 8 devices, from both kinds of directory, in a process of its own; the values are those of one device."""
    fields, tensors = make()
    write_hf(tmp_path / "hf", fields, tensors)
    convert(tmp_path / "hf", tmp_path / "orbax")
    script = Path(__file__).with_name("load_on_eight_devices.py")
    result = subprocess.run(
        [sys.executable, script, tmp_path / "hf", tmp_path / "orbax", tmp_path / "values.npz"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
        env={"PYTHONPATH": ".", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    )
    assert result.returncode == 0, result.stderr
    values = np.load(tmp_path / "values.npz")
    config = config_from_hf(fields)
    declared = nnx.state(model_class(config)(config, dtype=config.dtype, scan_layers=False))
    expected = unrolled(load_params(SafetensorsReader(tmp_path / "hf"), config, declared, make_mesh()))
    assert len(values) == 4 * len(expected)
    for key in values:
        _, name = key.split(":")
        np.testing.assert_array_equal(values[key], expected[name].astype(np.float32), err_msg=key)
