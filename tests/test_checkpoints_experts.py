"""Checkpoints of models with experts: both spellings, FP8 blocks, layers that are passed over, and Orbax."""

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from golden.tiny_models import MODELS, weight
from safetensors.numpy import save_file
from tiny_checkpoints import assert_params, unrolled, write_hf

from paxserve.checkpoints.convert import convert
from paxserve.checkpoints.load import load_params
from paxserve.checkpoints.reader import CheckpointError
from paxserve.checkpoints.safetensors import SafetensorsReader
from paxserve.model_source import resolve_model
from paxserve.models.config_hf import config_from_hf
from paxserve.models.registry import model_class
from paxserve.models.weights import tensor_sources
from paxserve.sharding import make_mesh

NAMES = ["mixtral_window", "qwen3_moe_some_dense"]
PARTS = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}
FILE = "model.safetensors"


def released(name):
    """(configuration, its tensors as released)."""
    config = config_from_hf(MODELS[name])
    return config, {source.name: weight(source.name, source.shape) for source in tensor_sources(config)}


def stacked(config, tensors):
    """The tensors as transformers 5 holds them: those of all experts in one."""
    tensors = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in tensors.items()}
    for layer in np.flatnonzero(config.moe.layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack([tensors.pop(f"{prefix}{expert}.{part}.weight") for expert in range(config.moe.num_experts)])
            for part in PARTS[config.architecture]
        )
        tensors |= {f"{prefix}gate_up_proj": np.concatenate([gate, up], axis=1), f"{prefix}down_proj": down}
    return tensors


def load(directory, config, *, scan_layers=False, dtype=jnp.float32):
    declared = nnx.state(model_class(config)(config, dtype=dtype, scan_layers=scan_layers))
    return load_params(SafetensorsReader(directory), config, declared, make_mesh())


@pytest.mark.parametrize("name", NAMES)
def test_both_spellings_give_the_same(tmp_path, name):
    config, tensors = released(name)
    write_hf(tmp_path / "released", MODELS[name], tensors, shards=2)
    write_hf(tmp_path / "stacked", MODELS[name], stacked(config, tensors))
    params = unrolled(load(tmp_path / "released", config))
    assert_params(load(tmp_path / "stacked", config), params)
    assert_params(load(tmp_path / "released", config, scan_layers=True), params)

    layer, experts = 1, range(config.moe.num_experts)
    prefix = f"model.layers.{layer}.{'block_sparse_moe' if config.architecture == 'mixtral' else 'mlp'}"
    gate, up, down = PARTS[config.architecture]
    for expert in experts:
        source = f"{prefix}.experts.{expert}"
        gate_up = np.stack([tensors[f"{source}.{gate}.weight"], tensors[f"{source}.{up}.weight"]])
        np.testing.assert_array_equal(params[f"layers.{layer}.mlp.gate_up"][expert], gate_up)
        np.testing.assert_array_equal(params[f"layers.{layer}.mlp.down"][expert], tensors[f"{source}.{down}.weight"])
    np.testing.assert_array_equal(params[f"layers.{layer}.mlp.router"], tensors[f"{prefix}.gate.weight"])


def test_routers_stay_in_float32(tmp_path):
    config, tensors = released("qwen3_moe")
    write_hf(tmp_path, MODELS["qwen3_moe"], tensors)
    params = unrolled(load(tmp_path, config, dtype=jnp.bfloat16))
    assert params["layers.0.mlp.router"].dtype == np.float32
    assert params["layers.0.mlp.down"].dtype == ml_dtypes.bfloat16


GATE = "model.layers.1.mlp.experts.5.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(GATE), rf"lacks tensor {GATE}$"),
        (
            lambda t: t.update({GATE: t[GATE].T.copy()}),
            rf"{GATE} in .*{FILE} has shape \[64, 40\].* asks for \[40, 64\]",
        ),
        (lambda t: t.update({GATE.replace("5", "8"): t[GATE]}), r"unknown tensor model\.layers\.1\.mlp\.experts\.8\."),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.gate_up_proj": np.zeros((8, 80, 64), np.float32)}),
            r"lacks tensor model\.layers\.1\.mlp\.experts\.down_proj$",
        ),
    ],
)
def test_refuses_what_does_not_fit(tmp_path, change, message):
    config, tensors = released("qwen3_moe_some_dense")
    change(tensors)
    write_hf(tmp_path, MODELS["qwen3_moe_some_dense"], tensors)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, config)


def test_layers_for_multi_token_prediction_are_passed_over(tmp_path):
    config, tensors = released("qwen3_moe")
    extra = {"model.layers.2.eh_proj.weight": np.ones((2, 4), np.float32)}
    write_hf(tmp_path, MODELS["qwen3_moe"], tensors | extra)
    params = load(tmp_path, dataclasses.replace(config, mtp_layers=1))
    write_hf(tmp_path / "without", MODELS["qwen3_moe"], tensors)
    assert_params(params, unrolled(load(tmp_path / "without", config)))
    with pytest.raises(CheckpointError, match=r"unknown tensor model\.layers\.2\.eh_proj\.weight"):
        load(tmp_path, config)


@pytest.mark.parametrize("name", ["qwen3_moe_some_dense"])
def test_orbax_keeps_everything(tmp_path, name):
    config, tensors = released(name)
    write_hf(tmp_path / "hf", MODELS[name], tensors)
    convert(tmp_path / "hf", tmp_path / "orbax")
    source = resolve_model(tmp_path / "orbax")
    assert source.config == config
    for scan_layers in (False, True):
        declared = nnx.state(model_class(config)(config, dtype=jnp.float32, scan_layers=scan_layers))
        assert_params(source.load(declared, make_mesh()), unrolled(load(tmp_path / "hf", config)))


def fp8(rng, shape):
    """(weight, scales, what they stand for), the last by the format's definition."""
    quantised = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scales = (0.5 + rng.random((*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)))).astype(np.float32)
    rows, columns = np.indices(shape[-2:]) // 128
    return quantised, scales, quantised.astype(np.float32) * scales[..., rows, columns]


@pytest.mark.parametrize("shape", [(300, 140), (128, 256), (3, 20, 200)])
def test_fp8_blocks_are_dequantised(tmp_path, shape):
    quantised, scales, expected = fp8(np.random.default_rng(0), shape)
    # Another tensor goes first, so that the data do not start where the file's do.
    save_file({"a": np.ones(3, np.float32), "w": quantised, "w_scale_inv": scales}, tmp_path / FILE)
    reader = SafetensorsReader(tmp_path)
    assert reader.tensors.keys() == {"a", "w"}
    rest = (slice(0, 2),) * (len(shape) - 2)
    for rows, columns in ((slice(0, shape[-2]), slice(0, shape[-1])), (slice(17, 19), slice(100, 140))):
        found = reader.read("w", (*rest, rows, columns))
        np.testing.assert_array_equal(found, expected[*rest, rows, columns], strict=True)


def test_fp8_model(tmp_path):
    """Experts, attention and dense layers in FP8, the rest in bfloat16, as released."""
    name, rng = "qwen3_moe_some_dense", np.random.default_rng(0)
    config, tensors = released(name)
    stored, plain = {}, {}
    for key, tensor in tensors.items():
        if "_proj." in key:
            stored[key], stored[f"{key}_scale_inv"], plain[key] = fp8(rng, tensor.shape)
        else:
            stored[key] = plain[key] = tensor.astype(ml_dtypes.bfloat16)
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }
    write_hf(tmp_path / "fp8", {**MODELS[name], "quantization_config": quantization}, stored)
    write_hf(tmp_path / "plain", MODELS[name], plain)
    found = config_from_hf(json.loads((tmp_path / "fp8" / "config.json").read_bytes()))
    assert found == dataclasses.replace(config, quantization="fp8")
    assert_params(load(tmp_path / "fp8", config), unrolled(load(tmp_path / "plain", config)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("w_scale_inv"), rf"tensor w in .*{FILE} has type F8_E4M3 but no scales"),
        (lambda t: t.update(w_scale_inv=np.ones((2, 2), np.float32)), r"w_scale_inv in .* does not hold scales"),
    ],
)
def test_fp8_needs_its_scales(tmp_path, change, message):
    quantised, scales, _ = fp8(np.random.default_rng(0), (130, 20))
    tensors = {"w": quantised, "w_scale_inv": scales}
    change(tensors)
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsReader(tmp_path)
