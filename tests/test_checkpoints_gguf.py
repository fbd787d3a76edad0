"""GGUF files: against gguf.GGUFReader and gguf.quants, and against transformers' reading of the packaged SmolLM2."""

import json
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tiny_checkpoints import (
    assert_params,
    expected_params,
    hf_tensors,
    llama,
    llama_cpp_rows,
    tiny_config,
    unrolled,
    write_gguf,
)

from paxserve.checkpoints.gguf import SUPPORTED_TYPES, GgufReader, gguf_metadata
from paxserve.checkpoints.load import load_params
from paxserve.checkpoints.reader import CheckpointError
from paxserve.model_source import resolve_model
from paxserve.models.weights import tensor_sources
from paxserve.sharding import make_mesh


@pytest.mark.parametrize(
    ("fields", "scan_layers"),
    [
        ({"attention_bias": True, "mlp_bias": True}, False),
        ({"tie_word_embeddings": True}, True),
        ({"model_type": "qwen2"}, True),
        ({"model_type": "qwen3"}, False),
    ],
)
def test_loads_float32_in_hugging_face_order(tmp_path, fields, scan_layers):
    config = tiny_config(**fields)
    tensors = hf_tensors(config)
    write_gguf(tmp_path / "model.gguf", config, tensors)
    source = resolve_model(tmp_path / "model.gguf")
    assert source.config == config
    params = source.load(llama(config, scan_layers=scan_layers), make_mesh())
    assert_params(params, expected_params(config, tensors))


def random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """Bytes of random blocks of a type that the package cannot quantise to; their scales are finite float16."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, block_bytes), np.uint8)
    for scale in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]:
        half = rng.uniform(-0.1, 0.1, blocks.shape[:-1]).astype(np.float16)
        blocks[..., scale : scale + 2] = half[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


@pytest.mark.parametrize("kind", [GGMLQuantizationType[name] for name in SUPPORTED_TYPES], ids=lambda kind: kind.name)
def test_dequantises_every_type(tmp_path, kind):
    config = tiny_config(hidden=256, mlp=256)
    rng = np.random.default_rng(1)
    tensors = hf_tensors(config)
    raw, expected = {}, dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            continue
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        data = random_blocks(tensor.shape, kind, rng) if kind.name.endswith("_K") else quantize(tensor, kind)
        # The stored rows are those of a head's halves in turn; the values expected are those of the plain order.
        raw[name] = (data if heads is None else llama_cpp_rows(data, heads), kind)
        expected[name] = dequantize(data, kind)
    write_gguf(tmp_path / "model.gguf", config, tensors, raw)
    reader = GgufReader(tmp_path / "model.gguf")
    params = load_params(reader, config, llama(config), make_mesh())
    assert_params(params, expected_params(config, expected))

    name = "model.layers.1.self_attn.k_proj.weight"
    np.testing.assert_array_equal(reader.read(name, (slice(3, 70), slice(17, 90))), expected[name][3:70, 17:90])


def test_header_equals_the_gguf_package(smollm2_gguf):
    reference = gguf.GGUFReader(smollm2_gguf)
    metadata = gguf_metadata(smollm2_gguf)
    theirs = {key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert metadata == theirs
    assert all(type(value) in (int, float, str, bool, list) for value in metadata.values())
    reader = GgufReader(smollm2_gguf)
    assert reader.gguf_names == [tensor.name for tensor in reference.tensors]
    for tensor, info in zip(reference.tensors, reader.tensors.values(), strict=True):
        assert (tuple(tensor.shape[::-1].tolist()), tensor.tensor_type.name) == (info.shape, info.dtype)
    for index in (0, 6, 9):
        name, tensor = list(reader.tensors)[index], reference.tensors[index]
        if "self_attn.q" not in name and "self_attn.k" not in name:
            everything = (slice(None),) * len(reader.tensors[name].shape)
            np.testing.assert_array_equal(reader.read(name, everything), dequantize(tensor.data, tensor.tensor_type))


def test_smollm2_weights_equal_transformers(smollm2_gguf):
    golden = json.loads((Path(__file__).parent / "golden" / "smollm2.json").read_text())
    reader, config = GgufReader(smollm2_gguf), resolve_model(smollm2_gguf).config
    shapes = {source.name: source.shape for source in tensor_sources(config)}
    checked = 0
    for name, samples in golden["weights"].items():
        if name in shapes:  # transformers lists the tied output projection again
            assert list(shapes[name]) == samples["shape"]
            values = reader.read(name, (slice(None),) * len(shapes[name])).reshape(-1)[samples["indices"]]
            np.testing.assert_array_equal(values, np.array(samples["values"], np.float32), err_msg=name)
            checked += 1
    assert checked == 2 + 2 * 9


def test_smollm2_loads(smollm2_gguf):
    source = resolve_model("smollm2")
    assert (source.name, source.path, source.format) == ("smollm2", smollm2_gguf, "gguf")
    config = source.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.eos_token_ids == (2,)
    params = unrolled(source.load(llama(config, jnp.bfloat16), make_mesh()))
    assert sum(value.size for value in params.values()) == 134_515_008  # as on the model's page
    q = source.gguf.read("model.layers.7.self_attn.q_proj.weight", (slice(None), slice(None)))
    np.testing.assert_array_equal(
        params["layers.7.attn.qkv.kernel"][2, 1], q.reshape(3, 3, 64, 576)[2, 1].astype(jnp.bfloat16)
    )


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        GgufReader(path)


def test_refuses_other_types_by_name(tmp_path):
    config = tiny_config(hidden=256, mlp=256)
    tensors = hf_tensors(config)
    name = "model.layers.1.mlp.up_proj.weight"
    kind = GGMLQuantizationType.TQ2_0
    write_gguf(tmp_path / "model.gguf", config, tensors, {name: (quantize(tensors[name], kind), kind)})
    refused(
        tmp_path / "model.gguf",
        r"tensor blk\.1\.ffn_up\.weight in .*model\.gguf has quantisation type TQ2_0; supported",
    )


def test_refuses_what_does_not_fit(tmp_path):
    config = tiny_config()
    tensors = hf_tensors(config)
    path = tmp_path / "model.gguf"
    name = "model.layers.1.mlp.up_proj.weight"

    def load_message(changed, extra=None):
        write_gguf(path, config, changed, extra=extra)
        with pytest.raises(CheckpointError) as error:
            load_params(GgufReader(path), config, llama(config), make_mesh())
        return str(error.value)

    assert f"{path} lacks tensor {name}" in load_message({k: v for k, v in tensors.items() if k != name})
    assert f"tensor {name} in {path} has shape [32, 48]" in load_message(tensors | {name: tensors[name].T})
    assert f"unknown tensor blk.0.foo.weight in {path}" in load_message(
        tensors, {"blk.0.foo.weight": np.ones(3, np.float32)}
    )


def test_refuses_damaged_files(tmp_path):
    config = tiny_config()
    path, cut = tmp_path / "model.gguf", tmp_path / "cut.gguf"
    write_gguf(path, config, hf_tensors(config))
    whole = path.read_bytes()
    last = GgufReader(path).gguf_names[-1]

    cut.write_bytes(whole[:-4000])
    refused(cut, rf"tensor {last} in .*cut\.gguf is cut off: it ends at byte \d+ of {len(whole) - 4000}")
    for length in (0, 3, 20, 200, 1000):
        cut.write_bytes(whole[:length])
        refused(cut, r"cut\.gguf (has a damaged or cut off GGUF header|is not a GGUF file)")
    cut.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + whole[8:])
    refused(cut, "GGUF version 1; supported are 2 and 3")
    cut.write_bytes(b"PK\3\4" + whole[4:])
    refused(cut, "not a GGUF file")
    refused(tmp_path / "none.gguf", "cannot be opened: No such file")
    refused(tmp_path, "cannot be opened: Is a directory")


def test_any_damage_to_the_header_is_a_checkpoint_error(tmp_path):
    config = tiny_config()
    path = tmp_path / "model.gguf"
    write_gguf(path, config, hf_tensors(config))
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    messages = []
    for _ in range(400):
        damaged = bytearray(whole)
        for at in rng.integers(4, 2000, 3):
            damaged[at] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            GgufReader(path)
        except CheckpointError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all(str(path) in message for message in messages)


def test_split_files_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "part.gguf", "one part of a split model; join it")
