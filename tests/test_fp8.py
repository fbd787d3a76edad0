"""Weights kept in FP8: the numbers of weights dequantised when loaded, at a byte each."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from golden.tiny_models import MODELS, VOCAB, weight
from test_llama_logits import Runner
from tiny_checkpoints import assert_params, unrolled, write_hf

from paxserve import LLM, SamplingParams
from paxserve.checkpoints.reader import CheckpointError
from paxserve.cli import main
from paxserve.model_source import resolve_model
from paxserve.models.config_hf import config_from_hf
from paxserve.models.fp8 import BlockScaled, block_size
from paxserve.models.registry import model_class
from paxserve.models.weights import tensor_sources
from paxserve.sharding import make_mesh

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
# Blocks of 128 straddle heads in some of these sizes, end within an axis in others, and are whole in the rest.
HF = {
    "qwen3": {**MODELS["qwen3"], "hidden_size": 144, "intermediate_size": 320},
    "qwen3_moe": {**MODELS["qwen3_moe"], "hidden_size": 136, "moe_intermediate_size": 144},
    "deepseek_v3": {
        **MODELS["deepseek_v3_experts"],
        "num_hidden_layers": 2,
        "hidden_size": 160,
        "moe_intermediate_size": 136,
        "kv_lora_rank": 136,
        "qk_nope_head_dim": 64,
        "v_head_dim": 96,
    },
}


def write(directory, name, **changes):
    """A checkpoint in DeepSeek-V3's format; every weight of a block has another magnitude than its neighbours'."""
    hf = {**HF[name], "quantization_config": FP8, **changes}
    rng, tensors = np.random.default_rng(0), {}
    for source in tensor_sources(config_from_hf(hf)):
        tensor = weight(source.name, source.shape)
        if "_proj" in source.name:
            blocks = tuple(-(-size // 128) for size in source.shape)
            scales = np.exp(rng.uniform(-3, -1, blocks)).astype(np.float32)
            tensors[f"{source.name}_scale_inv"] = scales
            tensor = (4 * tensor * source.shape[1] ** 0.5).astype(ml_dtypes.float8_e4m3fn)
        tensors[source.name] = tensor
    write_hf(directory, hf, tensors)
    return tensors


def split(config, *, quantization="fp8", scan_layers=False):
    """(graphdef, declared parameters)"""
    model = model_class(config)(config, dtype=jnp.float32, scan_layers=scan_layers, quantization=quantization)
    return nnx.split(model)


def load(directory, **options):
    source = resolve_model(directory)
    return source.load(split(source.config, **options)[1], make_mesh())


def dequantized(params):
    """The parameters by name, kernels in float32."""
    flat = unrolled(params)
    scales = {name: flat.pop(name) for name in list(flat) if name.endswith("_scale")}
    for name, scale in scales.items():
        kernel = BlockScaled(jnp.asarray(flat[name.removesuffix("_scale")]), jnp.asarray(scale))
        flat[name.removesuffix("_scale")] = np.asarray(kernel.dequantized(jnp.float32))
    return flat


@pytest.mark.parametrize("name", HF)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_dequantised_they_are_what_is_loaded_by_default(tmp_path, name, scan_layers):
    write(tmp_path, name)
    kept, plain = load(tmp_path, scan_layers=scan_layers), unrolled(load(tmp_path, quantization=None))
    found = dequantized(kept)
    assert found.keys() == plain.keys()
    for path, value in plain.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


@pytest.mark.parametrize("name", HF)
def test_a_byte_for_a_weight(tmp_path, name):
    tensors = write(tmp_path, name)
    flat = unrolled(load(tmp_path))
    kernels = {path: value for path, value in flat.items() if f"{path}_scale" in flat}
    stored = sum(tensor.size for tensor in tensors.values() if tensor.dtype == ml_dtypes.float8_e4m3fn)
    assert sum(value.nbytes for value in kernels.values()) == stored
    assert {value.dtype for value in kernels.values()} == {np.dtype(ml_dtypes.float8_e4m3fn)}


@pytest.mark.parametrize(("name", "scan_layers"), [("qwen3", False), ("deepseek_v3", True)])
def test_logits(tmp_path, name, scan_layers):
    """A prefill, of more tokens than XLA:CPU has a special way for, and a decode step, against dequantised weights."""
    write(tmp_path, name)
    tokens = np.arange(41) * 7 % VOCAB
    found = []
    for quantization in ("fp8", None):
        options = {"quantization": quantization, "scan_layers": scan_layers}
        config = resolve_model(tmp_path).config
        runner = Runner(config, split(config, **options)[0], load(tmp_path, **options), attention="xla")
        prefill = runner.run([(tokens[:40], 0)], padded_tokens=72)[0]
        decode = runner.run([(tokens[40:], 40)], padded_tokens=2, max_query_len=1)[0]
        found.append(np.concatenate([prefill, decode]))
    np.testing.assert_allclose(*found, atol=1e-5 * np.abs(found[1]).max())


@pytest.mark.parametrize(("blocks", "size"), [((1, 2), (3, 256)), ((3, 3), (24, 6)), ((2, 1, 2), (2, 64, 8))])
def test_every_value_has_the_scale_of_its_block(blocks, size):
    rng = np.random.default_rng(0)
    values = rng.standard_normal(size).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.random(blocks).astype(np.float32)
    index = np.indices(size)
    of_value = scales[tuple(at * count // whole for at, count, whole in zip(index, blocks, size, strict=True))]
    kernel = BlockScaled(jnp.asarray(values), jnp.asarray(scales))
    found = kernel.dequantized(jnp.float32)
    np.testing.assert_array_equal(found, values.astype(np.float32) * of_value)


@pytest.mark.parametrize(("axis", "other", "size"), [(7168, 0, 128), (192, 0, 64), (80, 0, 16), (64, 96, 32)])
def test_blocks_are_as_long_as_heads_allow(axis, other, size):
    assert block_size(axis, other) == size


def test_random_weights_are_drawn_in_fp8(tmp_path):
    write(tmp_path, "deepseek_v3")
    source = resolve_model(tmp_path)
    params = unrolled(source.load_random(split(source.config)[1], make_mesh()))
    kernel, scale = (params[f"layers.1.mlp.gate_up{suffix}"] for suffix in ("", "_scale"))
    assert (kernel.dtype, kernel.shape) == (ml_dtypes.float8_e4m3fn, (12, 2, 136, 160))
    assert (scale.dtype, scale.shape) == (np.float32, (12, 2, 17, 5))
    value = np.asarray(BlockScaled(jnp.asarray(kernel), jnp.asarray(scale)).dequantized(jnp.float32))
    assert value.std() == pytest.approx(160**-0.5, rel=0.02)


OPTIONS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "page_size": 8, "kv_cache_bytes": 2**20}


def test_engine(tmp_path, xla_cache):
    """The engine's tokens, from safetensors and from Orbax, are those of dequantised weights."""
    write(tmp_path / "hf", "deepseek_v3")
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "orbax"), "--quantization", "fp8"]) == 0
    prompts, greedy = [list(range(3, 23)), [5, 8]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    tokens, weight_bytes = [], []
    for model, quantization in (("hf", None), ("hf", "fp8"), ("orbax", "fp8")):
        llm = LLM(str(tmp_path / model), quantization=quantization, compilation_cache_dir=xla_cache, **OPTIONS)
        outputs = llm.generate(prompts, greedy)
        tokens.append([output.outputs[0].token_ids for output in outputs])
        weight_bytes.append(llm.engine.runner.weight_bytes)
    assert tokens[1] == tokens[2] == tokens[0]
    assert weight_bytes[1] == weight_bytes[2] < 0.4 * weight_bytes[0]


def test_info_counts_bytes(tmp_path, capsys):
    write(tmp_path, "deepseek_v3")
    assert main(["info", "--model", str(tmp_path), "--quantization", "fp8", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    params = jax.tree.leaves(load(tmp_path))
    assert facts["model"]["weight_bytes"] == sum(leaf.nbytes for leaf in params)
    assert facts["dtypes"]["kernels"] == "float8_e4m3fn"
    assert main(["info", "--model", str(tmp_path), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["model"]["parameters"] == facts["model"]["parameters"]


def test_refusals(tmp_path):
    config = config_from_hf(HF["qwen3"])
    with pytest.raises(ValueError, match="quantization='fp4': must be one of"):
        LLM("smollm2", quantization="fp4")
    with pytest.raises(ValueError, match="quantization='fp8': the checkpoint's weights are not in FP8"):
        LLM("smollm2", quantization="fp8")

    tensors = write(tmp_path / "hf", "qwen3")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors |= {name: tensors[name].astype(np.float32)}
    del tensors[f"{name}_scale_inv"]
    write_hf(tmp_path / "mixed", {**HF["qwen3"], "quantization_config": FP8}, tensors)
    with pytest.raises(CheckpointError, match=rf"tensor {name} in .* has type F32, so it cannot be kept in FP8"):
        load(tmp_path / "mixed")
    load(tmp_path / "mixed", quantization=None)

    main(["convert", str(tmp_path / "hf"), str(tmp_path / "fp8"), "--quantization", "fp8"])
    with pytest.raises(CheckpointError, match="holds its weights in FP8; ask for quantization='fp8'"):
        load(tmp_path / "fp8", quantization=None)
    main(["convert", str(tmp_path / "hf"), str(tmp_path / "plain")])
    assert resolve_model(tmp_path / "plain").config == dataclasses.replace(config, quantization=None)
    assert_params(load(tmp_path / "plain", quantization=None), unrolled(load(tmp_path / "hf", quantization=None)))
