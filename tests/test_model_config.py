"""Configurations as published with real checkpoints, read from config.json and from GGUF metadata."""

import copy
import dataclasses
from math import prod

import pytest
from golden.tiny_models import MODELS

from paxserve.models.config import MLAConfig, ModelConfig, MoEConfig, RopeConfig
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
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = {
    **DEEPSEEK_V3,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "beta_fast": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
DEEPSEEK_V2 = {
    **DEEPSEEK_V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "num_nextn_predict_layers": None,
    "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "vocab_size": 102400,
}
DEEPSEEK_V2_LITE = {
    **DEEPSEEK_V2,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
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
    "DeepSeek-V2": DEEPSEEK_V2,
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "DeepSeek-V3": DEEPSEEK_V3,
    "Kimi-K2": KIMI_K2,
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
        ("DeepSeek-V2-Lite", 192, {None}, 1e4, "yarn", 15.7),
        ("DeepSeek-V2", 192, {None}, 1e4, "yarn", 235.7),
        ("DeepSeek-V3", 192, {None}, 1e4, "yarn", 671.0),
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
    shapes = {source.name: source.shape for source in tensor_sources(config)}
    parameters = sum(map(prod, shapes.values()))
    assert parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_deepseek():
    v3, v2, lite, kimi = map(config_from_hf, (DEEPSEEK_V3, DEEPSEEK_V2, DEEPSEEK_V2_LITE, KIMI_K2))
    assert v3.mla == v2.mla == kimi.mla == MLAConfig(1536, 512, 128, 64, 128, rope_interleaved=True)
    assert lite.mla == dataclasses.replace(v3.mla, q_lora_rank=None)
    assert (v3.head_dim, v3.num_kv_heads, v3.rope_dim) == (192, 128, 64)
    assert v3.rope == RopeConfig(1e4, "yarn", 40, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert v3.moe == MoEConfig(
        num_experts=256,
        experts_per_token=8,
        intermediate_size=2048,
        layers=(False,) * 3 + (True,) * 58,
        shared_intermediate_size=2048,
        scoring="sigmoid",
        groups=8,
        top_groups=4,
        group_score="top2",
        score_bias=True,
        normalize=True,
        scaling=2.5,
    )
    assert v2.moe == MoEConfig(
        num_experts=160,
        experts_per_token=6,
        intermediate_size=1536,
        layers=(False,) + (True,) * 59,
        shared_intermediate_size=3072,
        groups=8,
        top_groups=3,
        normalize=False,
        scaling=16.0,
    )
    assert lite.moe == MoEConfig(64, 6, 1408, (False,) + (True,) * 26, 2816, normalize=False)
    assert (kimi.architecture, kimi.moe.groups, kimi.moe.top_groups, kimi.moe.scaling) == ("deepseek_v3", 1, 1, 2.827)
    assert [config.mtp_layers for config in (v3, v2, kimi)] == [1, 0, 0]
    assert v3.alike_layers() == [range(3), range(3, 61)]


def test_deepseek_layers_without_experts():
    dense = config_from_hf({**DEEPSEEK_V3, "first_k_dense_replace": 61})
    assert (dense.moe, dense.alike_layers()) == (None, [range(61)])
    assert config_from_hf({**DEEPSEEK_V3, "n_routed_experts": None}) == dense
    every_third = config_from_hf({**DEEPSEEK_V3, "num_hidden_layers": 7, "moe_layer_freq": 3})
    assert every_third.alike_layers() == [range(3), range(3, 4), range(4, 6), range(6, 7)]


@pytest.mark.parametrize("name", REAL)
def test_new_spelling_reads_the_same(name):
    """transformers 5 writes rope_parameters and dtype."""
    new = copy.deepcopy(REAL[name])
    new["dtype"] = new.pop("torch_dtype")
    scaling = new.pop("rope_scaling", None) or {}
    new["rope_parameters"] = {
        "rope_type": scaling.pop("type", "default"),
        **scaling,
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
    named = {
        name: DEEPSEEK_V3[name] for name in ("model_type", "max_position_embeddings", "rope_scaling", "torch_dtype")
    }
    assert config_from_hf(named) == dataclasses.replace(config_from_hf(DEEPSEEK_V3), mtp_layers=0)


def test_experts_of_mixtral():
    mixtral = MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=14_336, layers=(True,) * 32)
    assert config_from_hf(MIXTRAL_8X7B).moe == mixtral
    assert config_from_hf({"model_type": "mixtral"}).moe == mixtral


def test_experts_of_qwen3_moe():
    moe = MoEConfig(num_experts=128, experts_per_token=8, intermediate_size=768, layers=(True,) * 48)
    assert config_from_hf(QWEN3_30B_A3B).moe == moe
    new = {("num_local_experts" if key == "num_experts" else key): value for key, value in QWEN3_30B_A3B.items()}
    assert config_from_hf(new).moe == moe
    assert config_from_hf({"model_type": "qwen3_moe"}).moe == dataclasses.replace(
        moe, layers=(True,) * 24, normalize=False
    )
    sparse = config_from_hf({**QWEN3_30B_A3B, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert sparse.moe.layers == (False, True, False, False, False, True)
    assert config_from_hf({**QWEN3_30B_A3B, "num_experts": 0}).moe is None
    windowed = config_from_hf({**QWEN3_30B_A3B, "use_sliding_window": True, "sliding_window": 8})
    assert windowed.windows == (8,) * 48  # of all layers, as in transformers, whatever max_window_layers says


def test_fp8_blocks_change_nothing_else():
    for quantization in (FP8, FP8 | {"modules_to_not_convert": ["lm_head"]}):
        config = config_from_hf({**QWEN3_8B, "quantization_config": quantization})
        assert config == dataclasses.replace(config_from_hf(QWEN3_8B), quantization="fp8")


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
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method"),
        (DEEPSEEK_V3, {"mlp_bias": True}, "mlp_bias"),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, "topk_method"),
        (DEEPSEEK_V2, {"rope_interleave": False}, "rope_interleave"),
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


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (LLAMA_2_7B, {"num_key_value_heads": 5}, "evenly"),
        (DEEPSEEK_V3, {"num_key_value_heads": 64}, "64 KV heads"),
        (DEEPSEEK_V2, {"n_group": None}, "n_group"),
        (DEEPSEEK_V2, {"num_experts_per_tok": None}, "num_experts_per_tok"),
    ],
)
def test_fields_that_do_not_fit_are_an_error(base, change, named):
    with pytest.raises(ValueError, match=named):
        config_from_hf({**base, **change})


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
