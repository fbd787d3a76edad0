"""GGUF files of the architecture "deepseek2", written as llama.cpp's converter writes them, against safetensors.

Tensor names are those that the gguf package maps Hugging Face's to.
"""

import dataclasses

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from golden.tiny_models import MODELS, weight
from tiny_checkpoints import assert_params, unrolled, write_hf

from paxserve.checkpoints.gguf import GgufReader
from paxserve.checkpoints.reader import CheckpointError
from paxserve.model_source import resolve_model
from paxserve.models.builtin import builtin_config
from paxserve.models.config_gguf import config_from_gguf
from paxserve.models.config_hf import config_from_hf
from paxserve.models.registry import model_class
from paxserve.models.weights import tensor_sources
from paxserve.sharding import make_mesh

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
# Sizes that whole blocks of 32 values fit into.
SIZES = {"num_hidden_layers": 2, "moe_intermediate_size": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32}
V2_LITE = {
    **MODELS["deepseek_v2_lite_experts"],
    **SIZES,
    "mlp_bias": False,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "softmax",
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}
V2 = {**MODELS["deepseek_v2_experts"], **SIZES, "q_lora_rank": 28, "tie_word_embeddings": True}
V3 = {
    **MODELS["deepseek_v3_experts"],
    **SIZES,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}
SOURCES = {"v2_lite": V2_LITE, "v2": V2, "v3": V3}


def hf_tensors(hf):
    return {source.name: weight(source.name, source.shape) for source in tensor_sources(config_from_hf(hf))}


def gguf_tensors(hf, tensors, *, split, fused=False):
    """Hugging Face's tensors by their GGUF names: experts stacked, kv_b_proj split and its key half transposed if asked."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, hf["num_hidden_layers"])
    heads, nope = hf["num_attention_heads"], hf["qk_nope_head_dim"]
    plain, experts = {}, {}
    for name, tensor in tensors.items():
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            experts.setdefault(f"{layer}.experts.{rest.split('.')[1]}.weight", []).append(tensor)
        elif split and "kv_b_proj" in name:
            kv = tensor.reshape(heads, -1, tensor.shape[-1])
            plain[name.replace("kv_b", "k_b")] = kv[:, :nope].transpose(0, 2, 1)
            plain[name.replace("kv_b", "v_b")] = kv[:, nope:]
        else:
            plain[name] = tensor
    plain |= {name: np.stack(parts) for name, parts in experts.items()}
    named = {names.get_name(name, (".weight", ".bias")): tensor for name, tensor in plain.items()}
    if fused:
        for name in [name for name in named if name.endswith("ffn_gate_exps.weight")]:
            gate_up = [named.pop(name), named.pop(name.replace("gate", "up"))]
            named[name.replace("gate", "gate_up")] = np.concatenate(gate_up, axis=1)
    return {name: np.ascontiguousarray(tensor) for name, tensor in named.items()}


def write_gguf(file, hf, tensors, *, split=True, quantized=(), **options):
    """quantized: parts of the names of the tensors that are stored as Q8_0."""
    writer = gguf.GGUFWriter(file, "deepseek2")
    writer.add_vocab_size(hf["vocab_size"])
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_rope_freq_base(hf["rope_theta"])
    writer.add_rope_dimension_count(hf["qk_rope_head_dim"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if hf["q_lora_rank"] is not None:
        writer.add_q_lora_rank(hf["q_lora_rank"])
    writer.add_kv_lora_rank(hf["kv_lora_rank"])
    key, value = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"], hf["v_head_dim"]
    if split:
        writer.add_head_count_kv(1)
        writer.add_key_length(hf["kv_lora_rank"] + hf["qk_rope_head_dim"])
        writer.add_value_length(hf["kv_lora_rank"])
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    else:
        writer.add_head_count_kv(hf["num_attention_heads"])
        writer.add_key_length(key)
        writer.add_value_length(value)
    writer.add_leading_dense_block_count(hf["first_k_dense_replace"])
    writer.add_expert_count(hf["n_routed_experts"])
    writer.add_expert_used_count(hf["num_experts_per_tok"])
    writer.add_expert_shared_count(hf["n_shared_experts"])
    writer.add_expert_feed_forward_length(hf["moe_intermediate_size"])
    writer.add_expert_group_count(hf["n_group"])
    writer.add_expert_group_used_count(hf["topk_group"])
    writer.add_expert_weights_scale(hf.get("routed_scaling_factor", 1.0))
    if hf["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if "scoring_func" in hf:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType[hf["scoring_func"].upper()])
    if "rope_scaling" in hf:
        rope = hf["rope_scaling"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    for name, tensor in gguf_tensors(hf, tensors, split=split, **options).items():
        if any(part in name for part in quantized):
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(path, *, scan_layers=False):
    source = resolve_model(path)
    declared = nnx.state(model_class(source.config)(source.config, dtype=jnp.float32, scan_layers=scan_layers))
    return source.load(declared, make_mesh())


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("options", [{"split": True}, {"split": False}, {"split": True, "fused": True}])
def test_equals_safetensors(tmp_path, name, options):
    hf = SOURCES[name]
    tensors = hf_tensors(hf)
    write_hf(tmp_path, hf, tensors)
    write_gguf(tmp_path / "model.gguf", hf, tensors, **options)
    assert resolve_model(tmp_path / "model.gguf").config == resolve_model(tmp_path).config
    params = load(tmp_path / "model.gguf", scan_layers=options["split"])
    assert_params(params, unrolled(load(tmp_path)))


@pytest.mark.parametrize("split", [True, False])
def test_quantized(tmp_path, split):
    """Q8_0 experts, and the expansion of latents, of which a transposed half has other blocks than the whole."""
    tensors, kind = hf_tensors(V3), GGMLQuantizationType.Q8_0
    parts = ("_exps.", "attn_k_b", "attn_v_b", "attn_kv_b")
    write_gguf(tmp_path / "model.gguf", V3, tensors, split=split, quantized=parts)
    expected = {}
    for name, tensor in tensors.items():
        if ".experts." in name or ("kv_b_proj" in name and not split):
            tensor = dequantize(quantize(tensor, kind), kind)
        elif "kv_b_proj" in name:
            kv = tensor.reshape(V3["num_attention_heads"], -1, tensor.shape[-1])
            k, v = np.split(kv, [V3["qk_nope_head_dim"]], axis=1)
            k = dequantize(quantize(np.ascontiguousarray(k.swapaxes(1, 2)), kind), kind).swapaxes(1, 2)
            v = dequantize(quantize(np.ascontiguousarray(v), kind), kind)
            tensor = np.concatenate([k, v], axis=1).reshape(tensor.shape)
        expected[name] = tensor
    write_hf(tmp_path, V3, expected)
    assert_params(load(tmp_path / "model.gguf"), unrolled(load(tmp_path)))


def test_reads_parts_of_transposed_tensors(tmp_path):
    tensors = hf_tensors(V3)
    write_gguf(tmp_path / "model.gguf", V3, tensors, quantized=("attn_k_b",))
    reader, name = GgufReader(tmp_path / "model.gguf"), "model.layers.1.self_attn.k_b_proj.weight"
    assert reader.tensors[name].shape == (4, 32, 32)
    whole = reader.read(name, (slice(0, 4), slice(0, 32), slice(0, 32)))
    part = (slice(1, 3), slice(5, 20), slice(8, 31))
    np.testing.assert_array_equal(reader.read(name, part), whole[part])
    kv = tensors["model.layers.1.self_attn.kv_b_proj.weight"].reshape(4, -1, 32)
    np.testing.assert_allclose(whole, kv[:, :32], atol=0.01)


def test_refuses_tensors_that_do_not_fit(tmp_path):
    tensors = hf_tensors(V3)
    write_gguf(tmp_path / "model.gguf", V3, {name: t for name, t in tensors.items() if "up_proj" not in name})
    with pytest.raises(CheckpointError, match=r"lacks tensor .*model\.layers\.1\.mlp\.experts\.up_proj"):
        load(tmp_path / "model.gguf")
    name = "model.layers.1.self_attn.q_a_proj.bias"
    write_gguf(tmp_path / "model.gguf", V3, tensors | {name: np.ones(28, np.float32)})
    with pytest.raises(CheckpointError, match=rf"unknown tensor {name}"):
        load(tmp_path / "model.gguf")


# The metadata of published files: one of V2-Lite from before llama.cpp attended to latents, and one of V3 from after it.
V2_LITE_METADATA = {
    "general.architecture": "deepseek2",
    "general.file_type": 15,
    "deepseek2.block_count": 27,
    "deepseek2.context_length": 163840,
    "deepseek2.embedding_length": 2048,
    "deepseek2.feed_forward_length": 10944,
    "deepseek2.attention.head_count": 16,
    "deepseek2.attention.head_count_kv": 16,
    "deepseek2.rope.freq_base": 10000.0,
    "deepseek2.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "deepseek2.expert_used_count": 6,
    "deepseek2.leading_dense_block_count": 1,
    "deepseek2.vocab_size": 102400,
    "deepseek2.attention.kv_lora_rank": 512,
    "deepseek2.attention.key_length": 192,
    "deepseek2.attention.value_length": 128,
    "deepseek2.expert_feed_forward_length": 1408,
    "deepseek2.expert_count": 64,
    "deepseek2.expert_shared_count": 2,
    "deepseek2.expert_weights_scale": 1.0,
    "deepseek2.rope.dimension_count": 64,
    "deepseek2.rope.scaling.type": "yarn",
    "deepseek2.rope.scaling.factor": 40.0,
    "deepseek2.rope.scaling.original_context_length": 4096,
    "deepseek2.rope.scaling.yarn_log_multiplier": 0.0706999972462654,
    "tokenizer.ggml.bos_token_id": 100000,
    "tokenizer.ggml.eos_token_id": 100001,
}
V3_METADATA = {
    **V2_LITE_METADATA,
    "deepseek2.block_count": 61,
    "deepseek2.embedding_length": 7168,
    "deepseek2.feed_forward_length": 18432,
    "deepseek2.attention.head_count": 128,
    "deepseek2.attention.head_count_kv": 1,
    "deepseek2.expert_used_count": 8,
    "deepseek2.expert_group_count": 8,
    "deepseek2.expert_group_used_count": 4,
    "deepseek2.expert_gating_func": 2,
    "deepseek2.leading_dense_block_count": 3,
    "deepseek2.vocab_size": 129280,
    "deepseek2.attention.q_lora_rank": 1536,
    "deepseek2.attention.key_length": 576,
    "deepseek2.attention.value_length": 512,
    "deepseek2.attention.key_length_mla": 192,
    "deepseek2.attention.value_length_mla": 128,
    "deepseek2.expert_feed_forward_length": 2048,
    "deepseek2.expert_count": 256,
    "deepseek2.expert_shared_count": 1,
    "deepseek2.expert_weights_scale": 2.5,
    "deepseek2.expert_weights_norm": True,
    "deepseek2.rope.scaling.yarn_log_multiplier": 0.10000000149011612,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}
NAMES = {"token_embd.weight", "output.weight", "blk.3.exp_probs_b.bias"}


@pytest.mark.parametrize(("name", "metadata"), [("deepseek-v2-lite", V2_LITE_METADATA), ("deepseek-v3", V3_METADATA)])
def test_metadata_read_as_config_json_does(name, metadata):
    config = config_from_hf(builtin_config(name))
    assert config_from_gguf(metadata, NAMES) == dataclasses.replace(config, mtp_layers=0, quantization=None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"expert_gating_func": 4}, r"deepseek2\.expert_gating_func=4"),
        ({"expert_gating_func": 1}, r"deepseek2\.expert_weights_norm"),
        ({"nextn_predict_layers": 1}, r"deepseek2\.nextn_predict_layers"),
        ({"attention.temperature_scale": 0.1}, r"deepseek2\.attention\.temperature_scale"),
        ({"expert_group_scale": 0.5}, r"deepseek2\.expert_group_scale"),
        ({"rope.scaling.yarn_attn_factor": 2.0}, r"deepseek2\.rope\.scaling\.yarn_attn_factor"),
        ({"rope.scaling.type": "linear"}, "rope.scaling.type 'linear'"),
    ],
)
def test_refusals_name_the_key(change, named):
    changed = V3_METADATA | {f"deepseek2.{key}": value for key, value in change.items()}
    with pytest.raises(NotImplementedError, match=named):
        config_from_gguf(changed, NAMES)


@pytest.mark.parametrize("key", ["attention.kv_lora_rank", "rope.dimension_count", "expert_group_used_count"])
def test_missing_keys_are_errors(key):
    broken = {name: value for name, value in V3_METADATA.items() if name != f"deepseek2.{key}"}
    with pytest.raises(ValueError, match=rf"lacks the key deepseek2\.{key}"):
        config_from_gguf(broken, NAMES)


def test_dense_models():
    config = config_from_gguf(V3_METADATA | {"deepseek2.leading_dense_block_count": 61}, NAMES)
    assert config.moe is None
