"""Configurations as published with real checkpoints, read from config.json and from GGUF metadata."""

import copy
from dataclasses import replace
from math import prod

import pytest
from golden.tiny_models import MODELS

from paxserve.models.config import ModelConfig, MoEConfig, RopeConfig
from paxserve.models.config_gguf import config_from_gguf
from paxserve.models.config_hf import config_from_hf
from paxserve.models.weights import tensor_sources

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_32_1B = {
    **LLAMA_31_8B,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": {**LLAMA_31_8B["rope_scaling"], "factor": 32.0},
    "tie_word_embeddings": True,
}
MISTRAL_7B_V01 = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
MISTRAL_7B_V03 = {**MISTRAL_7B_V01, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768}
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN3_30B_A3B = {
    **QWEN3_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_attention_heads": 32,
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
REAL = {
    "Llama-2-7b": LLAMA_2_7B,
    "Llama-3.1-8B": LLAMA_31_8B,
    "Llama-3.2-1B": LLAMA_32_1B,
    "Mistral-7B-v0.1": MISTRAL_7B_V01,
    "Mistral-7B-v0.3": MISTRAL_7B_V03,
    "Qwen2.5-7B": QWEN25_7B,
    "Qwen3-8B": QWEN3_8B,
    "Mixtral-8x7B": MIXTRAL_8X7B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "SmolLM2-135M": SMOLLM2_135M,
}
LLAMA3_ROPE = RopeConfig(500_000.0, "llama3", 8.0, 8192, 1.0, 4.0)


def test_llama_31_8b():
    assert config_from_hf(LLAMA_31_8B) == ModelConfig(
        architecture="llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope=LLAMA3_ROPE,
        windows=(None,) * 32,
        dtype="bfloat16",
        bos_token_id=128_000,
        eos_token_ids=(128_001, 128_008, 128_009),
    )


# Parameter counts are those the model cards give: a check on all the sizes together.
@pytest.mark.parametrize(
    ("name", "head_dim", "windows", "theta", "kind", "billions"),
    [
        ("Llama-2-7b", 128, {None}, 1e4, "default", 6.738),
        ("Llama-3.1-8B", 128, {None}, 5e5, "llama3", 8.030),
        ("Llama-3.2-1B", 64, {None}, 5e5, "llama3", 1.236),
        ("Mistral-7B-v0.1", 128, {4096}, 1e4, "default", 7.242),
        ("Mistral-7B-v0.3", 128, {None}, 1e6, "default", 7.248),
        ("Qwen2.5-7B", 128, {None}, 1e6, "default", 7.616),
        ("Qwen3-8B", 128, {None}, 1e6, "default", 8.191),
        ("Mixtral-8x7B", 128, {None}, 1e6, "default", 46.70),
        ("Qwen3-30B-A3B", 128, {None}, 1e6, "default", 30.53),
        ("SmolLM2-135M", 64, {None}, 1e5, "default", 0.1345),
    ],
)
def test_real_configs(name, head_dim, windows, theta, kind, billions):
    config = config_from_hf(REAL[name])
    assert (config.head_dim, set(config.windows), config.rope.theta, config.rope.kind) == (
        head_dim,
        windows,
        theta,
        kind,
    )
    assert config.architecture == REAL[name]["model_type"]
    assert config.qk_norm == name.startswith("Qwen3-")
    assert (config.qkv_bias, config.out_bias) == (name == "Qwen2.5-7B", False)
    parameters = sum(prod(source.shape) for source in tensor_sources(config))
    assert parameters / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("name", REAL)
def test_new_spelling_reads_the_same(name):
    """transformers 5 writes rope_parameters and dtype."""
    new = copy.deepcopy(REAL[name])
    new["dtype"] = new.pop("torch_dtype")
    new["rope_parameters"] = {
        "rope_type": "default",
        **(new.pop("rope_scaling", None) or {}),
        "rope_theta": new.pop("rope_theta", 10_000.0),
    }
    assert config_from_hf(new) == config_from_hf(REAL[name])
    nested = {
        **new,
        "rope_parameters": {"full_attention": new["rope_parameters"], "sliding_attention": new["rope_parameters"]},
    }
    assert config_from_hf(nested) == config_from_hf(REAL[name])


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_type_is_the_old_name_of_rope_type(kind):
    old = config_from_hf({**LLAMA_2_7B, "rope_scaling": {"type": kind, "factor": 2.0}})
    new = config_from_hf({**LLAMA_2_7B, "rope_scaling": {"rope_type": kind, "factor": 2.0}})
    assert old == new
    assert old.rope == RopeConfig(kind=kind, factor=2.0, original_max_position=4096 if kind == "dynamic" else None)


def test_yarn_fields():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = config_from_hf({**QWEN25_7B, "rope_scaling": yarn}).rope
    assert rope == RopeConfig(1e6, "yarn", 4.0, 32_768)
    more = {**yarn, "beta_fast": 16, "attention_factor": 1.5, "truncate": False, "mscale": None}
    rope = config_from_hf({**QWEN25_7B, "rope_scaling": more}).rope
    assert rope == RopeConfig(1e6, "yarn", 4.0, 32_768, beta_fast=16, attention_factor=1.5, truncate=False)


def test_missing_fields_take_the_defaults_of_the_model_type():
    llama, mistral, qwen2, qwen3 = (config_from_hf({"model_type": t}) for t in ("llama", "mistral", "qwen2", "qwen3"))
    assert (llama.num_kv_heads, llama.max_position_embeddings, llama.eos_token_ids) == (32, 2048, (2,))
    assert (mistral.num_kv_heads, set(mistral.windows), mistral.intermediate_size) == (8, {4096}, 14_336)
    assert (qwen2.vocab_size, qwen2.qkv_bias, qwen2.out_bias, set(qwen2.windows)) == (151_936, True, False, {None})
    assert (qwen3.head_dim, qwen3.qkv_bias, qwen3.qk_norm, qwen3.eos_token_ids) == (128, False, True, ())


def test_experts_of_mixtral():
    mixtral = MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=14_336, layers=(True,) * 32)
    assert config_from_hf(MIXTRAL_8X7B).moe == mixtral
    assert config_from_hf({"model_type": "mixtral"}).moe == mixtral


def test_experts_of_qwen3_moe():
    moe = MoEConfig(num_experts=128, experts_per_token=8, intermediate_size=768, layers=(True,) * 48)
    assert config_from_hf(QWEN3_30B_A3B).moe == moe
    new = {("num_local_experts" if key == "num_experts" else key): value for key, value in QWEN3_30B_A3B.items()}
    assert config_from_hf(new).moe == moe
    assert config_from_hf({"model_type": "qwen3_moe"}).moe == replace(moe, layers=(True,) * 24, normalize=False)
    sparse = config_from_hf({**QWEN3_30B_A3B, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert sparse.moe.layers == (False, True, False, False, False, True)
    assert config_from_hf({**QWEN3_30B_A3B, "num_experts": 0}).moe is None
    windowed = config_from_hf({**QWEN3_30B_A3B, "use_sliding_window": True, "sliding_window": 8})
    assert windowed.windows == (8,) * 48  # of all layers, as in transformers, whatever max_window_layers says


def test_fp8_blocks_change_nothing_else():
    for quantization in (FP8, FP8 | {"modules_to_not_convert": ["lm_head"]}):
        assert config_from_hf({**QWEN3_8B, "quantization_config": quantization}) == config_from_hf(QWEN3_8B)


def test_attention_bias_of_llama_is_on_the_output_too():
    config = config_from_hf(MODELS["llama_mqa_biases"])
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (True, True, True)


def test_windows_of_qwen():
    windowed = {**QWEN25_7B, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8}
    assert config_from_hf({**windowed, "max_window_layers": 3}).windows == (None, None, None, 8)
    types = ["sliding_attention", "full_attention"] * 2
    assert config_from_hf({**windowed, "layer_types": types}).windows == (8, None, 8, None)
    off = {**windowed, "use_sliding_window": False}
    assert config_from_hf({**off, "layer_types": ["full_attention"] * 4}).windows == (None,) * 4
    for wrong in ({**off, "layer_types": types}, {**windowed, "layer_types": types[:3]}):
        with pytest.raises(NotImplementedError, match="layer_types"):
            config_from_hf(wrong)


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (LLAMA_2_7B, {"model_type": "gpt2"}, "gpt2"),
        (LLAMA_2_7B, {"model_type": None}, "model_type"),
        (LLAMA_2_7B, {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (LLAMA_2_7B, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA_2_7B, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*gptq"),
        (LLAMA_2_7B, {"quantization_config": {}}, "quantization_config without activation_scheme"),
        (LLAMA_2_7B, {"quantization_config": FP8 | {"weight_block_size": [64, 64]}}, "weight_block_size=.64, 64."),
        (LLAMA_2_7B, {"quantization_config": FP8 | {"activation_scheme": "static"}}, "activation_scheme='static'"),
        (LLAMA_2_7B, {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}, "scale_fmt='ue8m0'"),
        (LLAMA_2_7B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA_2_7B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (LLAMA_2_7B, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (LLAMA_2_7B, {"rope_interleaved": True}, "rope_interleaved"),
        (LLAMA_2_7B, {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (LLAMA_2_7B, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        (LLAMA_2_7B, {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1.0}}, "alpha"),
        (
            LLAMA_2_7B,
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        (QWEN25_7B, {"use_mrope": True}, "use_mrope"),
        (QWEN25_7B, {"mlp_bias": True}, "mlp_bias"),
        (MISTRAL_7B_V01, {"attention_bias": True}, "attention_bias"),
        (MISTRAL_7B_V01, {"layer_types": ["full_attention"] * 32}, "layer_types"),
        (
            LLAMA_2_7B,
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}},
            "layer type",
        ),
    ],
)
def test_refusals_name_the_field(base, change, named):
    with pytest.raises(NotImplementedError, match=named):
        config_from_hf({**base, **change})


@pytest.mark.parametrize(
    ("rope", "named"), [({"type": "linear"}, "factor"), ({"rope_type": "llama3", "factor": 8.0}, "high_freq_factor")]
)
def test_incomplete_rope_scaling_is_an_error(rope, named):
    with pytest.raises(ValueError, match=named):
        config_from_hf({**LLAMA_2_7B, "rope_scaling": rope})


def test_uneven_head_groups_are_an_error():
    with pytest.raises(ValueError, match="evenly"):
        config_from_hf({**LLAMA_2_7B, "num_key_value_heads": 5})


# The metadata of the published SmolLM2-135M-Instruct GGUF, tokens shortened; float32 values as a reader returns them.
SMOLLM2_GGUF = {
    "general.architecture": "llama",
    "general.file_type": 3,
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.vocab_size": 49152,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
GGUF_NAMES = {"token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight"}


def test_gguf_reads_as_config_json_does():
    assert config_from_gguf(SMOLLM2_GGUF, GGUF_NAMES) == config_from_hf(SMOLLM2_135M)


def test_gguf_optional_tensors():
    qwen = {key.replace("llama.", "qwen2."): value for key, value in SMOLLM2_GGUF.items()}
    qwen |= {"general.architecture": "qwen2", "general.file_type": 1, "tokenizer.ggml.eot_token_id": 0}
    del qwen["qwen2.vocab_size"]
    names = {"output.weight", "blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", *GGUF_NAMES}
    config = config_from_gguf(qwen, names)
    assert (config.architecture, config.vocab_size, config.dtype) == ("qwen2", 3, "float16")
    assert (config.tie_word_embeddings, config.qkv_bias, config.out_bias, config.qk_norm) == (False, True, False, True)
    assert config.eos_token_ids == (2, 0)


def test_gguf_rope():
    scaling = {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 2048}
    yarn = {**SMOLLM2_GGUF, **scaling, "llama.rope.scaling.type": "yarn"}
    assert config_from_gguf(yarn, GGUF_NAMES).rope == RopeConfig(1e5, "yarn", 4.0, 2048)
    linear = {**SMOLLM2_GGUF, **scaling, "llama.rope.scaling.type": "linear"}
    assert config_from_gguf(linear, GGUF_NAMES).rope == RopeConfig(1e5, "linear", 4.0)
    factors, names = [1.0] * 16 + [8.0] * 16, {"rope_freqs.weight", *GGUF_NAMES}
    assert config_from_gguf(SMOLLM2_GGUF, names, factors).rope == RopeConfig(1e5, frequency_factors=tuple(factors))
    for wrong_names, wrong_factors in ((names, None), (names, factors[1:]), (GGUF_NAMES, factors)):
        with pytest.raises(ValueError, match="rope_freqs"):
            config_from_gguf(SMOLLM2_GGUF, wrong_names, wrong_factors)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "gemma3"}, "gemma3"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "attn_factor"),
        ({"llama.rope.dimension_count": 32}, "dimension_count"),
        ({"llama.attention.value_length": 32}, "value_length"),
        ({"llama.attention.head_count_kv": [3, 1]}, "head_count_kv"),
    ],
)
def test_gguf_refusals_name_the_key(change, named):
    with pytest.raises(NotImplementedError, match=named):
        config_from_gguf({**SMOLLM2_GGUF, **change}, GGUF_NAMES)


def test_gguf_missing_key_is_an_error():
    broken = {key: value for key, value in SMOLLM2_GGUF.items() if key != "llama.block_count"}
    with pytest.raises(ValueError, match=r"llama\.block_count"):
        config_from_gguf(broken, GGUF_NAMES)
