"""Hugging Face directories: what is written with safetensors is what is loaded, and every defect has its message."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_checkpoints import assert_params, expected_params, hf_config, hf_tensors, llama, tiny_config, write_hf

from paxserve.checkpoints import load
from paxserve.checkpoints.load import load_params
from paxserve.checkpoints.reader import CheckpointError
from paxserve.checkpoints.safetensors import SafetensorsReader
from paxserve.models.config_hf import config_from_hf
from paxserve.sharding import make_mesh

BIASES = {"attention_bias": True, "mlp_bias": True}
FILE = "model.safetensors"


@pytest.mark.parametrize(
    ("fields", "shards", "scan_layers"),
    [
        ({}, 1, False),
        ({}, 3, True),
        (BIASES, 1, True),
        (BIASES, 2, False),
        ({"model_type": "qwen2", "tie_word_embeddings": True}, 1, False),
        ({"model_type": "qwen3"}, 2, True),
        ({"num_key_value_heads": 1}, 1, False),
    ],
)
def test_loads_what_was_saved(tmp_path, fields, shards, scan_layers):
    config = config_from_hf(hf_config(**fields))
    tensors = hf_tensors(config)
    write_hf(tmp_path, hf_config(**fields), tensors, shards)
    params = load_params(SafetensorsReader(tmp_path), config, llama(config, scan_layers=scan_layers), make_mesh())
    assert_params(params, expected_params(config, tensors))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_casts_to_the_declared_dtype(tmp_path, stored, dtype):
    config = tiny_config()
    tensors = hf_tensors(config, stored)
    write_hf(tmp_path, hf_config(), tensors)
    params = load_params(SafetensorsReader(tmp_path), config, llama(config, dtype), make_mesh())
    assert_params(params, {name: value.astype(dtype) for name, value in expected_params(config, tensors).items()})


def test_reads_only_the_slice(tmp_path):
    tensor = np.arange(24, dtype=np.float32).reshape(4, 6)
    save_file({"a": tensor}, tmp_path / FILE)
    reader = SafetensorsReader(tmp_path)
    np.testing.assert_array_equal(reader.read("a", (slice(1, 3), slice(2, 5))), tensor[1:3, 2:5])
    assert reader.tensors["a"].shape == (4, 6)
    assert reader.tensors["a"].dtype == "F32"


def test_tolerates_derived_and_tied_tensors(tmp_path):
    fields = {"tie_word_embeddings": True}
    config = tiny_config(**fields)
    tensors = hf_tensors(config)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
        "lm_head.weight": tensors["model.embed_tokens.weight"],
    }
    write_hf(tmp_path, hf_config(**fields), tensors | extra)
    params = load_params(SafetensorsReader(tmp_path), config, llama(config), make_mesh())
    assert_params(params, expected_params(config, tensors))

    write_hf(tmp_path, hf_config(**fields), tensors | {"lm_head.weight": extra["lm_head.weight"] + 1})
    check_refused(tmp_path, config, rf"lm_head\.weight in .*{FILE} differs from model\.embed_tokens\.weight")


def check_refused(directory, config, message):
    """The load fails with the message before a value of a parameter is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_read_block", lambda *args: pytest.fail("a value was read"))
        with pytest.raises(CheckpointError, match=message):
            load_params(SafetensorsReader(directory), config, llama(config), make_mesh())


NAME = "model.layers.1.mlp.up_proj.weight"


def without(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != NAME}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without, rf"lacks tensor {NAME}$"),
        (
            lambda t: t | {"model.layers.2.foo": t[NAME]},
            r"unknown tensor model\.layers\.2\.foo in .*model\.safetensors; ",
        ),
        (lambda t: t | {NAME: t[NAME].T.copy()}, rf"{NAME} in .*{FILE} has shape \[32, 48\].* asks for \[48, 32\]"),
        (lambda t: t | {NAME: t[NAME].astype(np.int8)}, rf"{NAME} in .*{FILE} has type I8; supported are F32"),
    ],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_refuses_what_does_not_fit(tmp_path, change, message, shards):
    config = tiny_config()
    write_hf(tmp_path, hf_config(), change(hf_tensors(config)), shards)
    check_refused(tmp_path, config, message.replace(FILE, r".*\.safetensors").replace(r"model\.safetensors", ".*"))


def test_names_the_tensor_that_is_cut_off(tmp_path):
    config = tiny_config()
    tensors = hf_tensors(config)
    write_hf(tmp_path, hf_config(), tensors)
    whole = (tmp_path / FILE).read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    (tmp_path / FILE).write_bytes(whole[:-1])
    check_refused(
        tmp_path, config, rf"tensor {last} in .*{FILE} is cut off: it ends at byte {len(whole)} of {len(whole) - 1}"
    )
    for length in (0, 7, 8, 100):
        (tmp_path / FILE).write_bytes(whole[:length])
        check_refused(tmp_path, config, rf"{FILE} is not a safetensors file, or is cut off within its header")


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"\xff\xfe\xfd\xfc",
        b"[1, 2]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}',
    ],
)
def test_refuses_damaged_headers(tmp_path, header):
    (tmp_path / FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=FILE):
        SafetensorsReader(tmp_path)


def test_index_and_shards_must_agree(tmp_path):
    tensors = hf_tensors(tiny_config())
    write_hf(tmp_path, hf_config(), tensors, shards=2)
    shard, index = tmp_path / "model-00002-of-00002.safetensors", tmp_path / "model.safetensors.index.json"

    content = index.read_text()
    index.write_text(content.replace(NAME, "model.foo"))
    with pytest.raises(CheckpointError, match=r"model-0000.*does not hold tensor model\.foo, which .*index\.json"):
        SafetensorsReader(tmp_path)
    index.write_text(content.replace(shard.name, "../elsewhere.safetensors"))
    with pytest.raises(CheckpointError, match=r"outside its directory: \.\./elsewhere"):
        SafetensorsReader(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        SafetensorsReader(tmp_path)

    index.write_text(content)
    save_file(tensors, shard)
    with pytest.raises(CheckpointError, match=r"tensor .* is in both .*00001.* and .*00002"):
        SafetensorsReader(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} cannot be opened: No such file"):
        SafetensorsReader(tmp_path)
