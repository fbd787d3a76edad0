"""Tiny random models, the same for the script that makes the goldens with transformers and for the tests that read them.

Only configurations, token ids and results are stored: a weight is drawn from a generator seeded by its name.
"""

import math
import zlib

import numpy as np

VOCAB = 96
NUM_TOKENS = 40
# Where logits are stored: the start, both sides of the windows and original context lengths below, and the end.
LOGIT_POSITIONS = (0, 1, 7, 8, 11, 12, 15, 16, 24, 31, 38, 39)

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA = {**_SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 10_000.0}
_DEEPSEEK = {
    **_SMALL,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 2,
    "rope_theta": 10_000.0,
}
del _DEEPSEEK["head_dim"]
_EXPERTS = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
}
_DEEPSEEK_V2 = {**_DEEPSEEK, "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
_DEEPSEEK_V3 = {**_DEEPSEEK, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
_QWEN2 = {**_SMALL, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1_000_000.0}
_MIXTRAL = {
    **_SMALL,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
_QWEN3_MOE = {
    **_SMALL,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}

MODELS = {
    "llama_mha": {**_LLAMA, "num_key_value_heads": 4},
    "llama_gqa_tied": {
        **_LLAMA,
        "num_attention_heads": 6,
        "hidden_size": 96,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "llama_mqa_biases": {
        **_LLAMA,
        "num_key_value_heads": 1,
        "head_dim": 80,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama_llama3": {
        **_LLAMA,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama_linear": {**_LLAMA, "head_dim": 96, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_dynamic": {
        **_LLAMA,
        "max_position_embeddings": 16,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "qwen2_yarn_tied": {
        **_QWEN2,
        "tie_word_embeddings": True,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "mistral_window": {
        **_SMALL,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "head_dim": 128,
        "rope_theta": 10_000.0,
        "sliding_window": 12,
    },
    "qwen2_some_windows": {**_QWEN2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {
        **_SMALL,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 128,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
    },
    "mixtral_window": {**_MIXTRAL, "sliding_window": 12},
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe_some_dense": {
        **_QWEN3_MOE,
        "num_hidden_layers": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "deepseek_v2_lite": {
        **_DEEPSEEK_V2,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "deepseek_v2_query_rank_biases": {**_DEEPSEEK_V2, "q_lora_rank": 28, "attention_bias": True, "mlp_bias": True},
    "deepseek_v3": {
        **_DEEPSEEK_V3,
        "q_lora_rank": 28,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "deepseek_v3_not_interleaved": {**_DEEPSEEK_V3, "rope_interleave": False, "tie_word_embeddings": True},
    "deepseek_v2_experts": {
        **_DEEPSEEK_V2,
        **_EXPERTS,
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 4.0,
    },
    "deepseek_v2_lite_experts": {
        **_DEEPSEEK_V2,
        **_EXPERTS,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "n_shared_experts": 1,
        "mlp_bias": True,
    },
    "deepseek_v3_experts": {**_DEEPSEEK_V3, **_EXPERTS, "q_lora_rank": 28, "routed_scaling_factor": 2.5},
}

# What config.json says of experts, by way of which they are chosen.
_V2_ROUTER = {"model_type": "deepseek_v2", "n_routed_experts": 24, "num_experts_per_tok": 4}
_V3_ROUTER = {"model_type": "deepseek_v3", "n_routed_experts": 32, "num_experts_per_tok": 5, "first_k_dense_replace": 0}
ROUTERS = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True},
    "qwen3_moe_not_normalised": {"model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 4},
    "deepseek_v2_greedy": _V2_ROUTER,
    "deepseek_v2_grouped": {
        **_V2_ROUTER,
        "topk_method": "group_limited_greedy",
        "n_group": 6,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
    },
    "deepseek_v3": {**_V3_ROUTER, "n_group": 8, "topk_group": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "deepseek_v3_not_normalised": {**_V3_ROUTER, "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    "deepseek_v3_one_group": {**_V3_ROUTER, "n_group": 1, "topk_group": 1},
}
ROUTED_TOKENS = 64

# RoPE fields as in config.json, with head_dim and max_position_embeddings. The numbers are those of real checkpoints.
ROPES = {
    "default": (128, 4096, {"rope_type": "default", "rope_theta": 10_000.0}),
    "default_odd_dim": (80, 4096, {"rope_type": "default", "rope_theta": 1_000_000.0}),
    "linear": (128, 16_384, {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0}),
    "dynamic": (64, 2048, {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0}),
    "llama3": (
        128,
        131_072,
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": (
        128,
        131_072,
        {"rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 4.0, "original_max_position_embeddings": 32_768},
    ),
    "yarn_mscale": (
        64,
        163_840,
        {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    ),
    "yarn_not_truncated": (
        64,
        131_072,
        {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "attention_factor": 1.25,
            "truncate": False,
        },
    ),
}
ROPE_POSITIONS = (0, 1, 17, 2047, 2048, 5000, 40_000)


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 values of the tensor called `name` in a Hugging Face checkpoint."""
    uniform = np.random.default_rng(zlib.crc32(name.encode())).random(shape) * 2 - 1
    if name.endswith("norm.weight"):
        value = 1 + 0.3 * uniform
    elif name.endswith(".bias"):
        value = 0.5 * uniform
    else:
        value = uniform * math.sqrt(3 / shape[-1])
    return value.astype(np.float32)


def prompt(name: str) -> np.ndarray:
    """The token ids [NUM_TOKENS] of a model."""
    return np.random.default_rng(zlib.crc32(name.encode())).integers(0, VOCAB, NUM_TOKENS)


def router_logits(name: str, experts: int) -> np.ndarray:
    """Logits [ROUTED_TOKENS, experts] of one of ROUTERS."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal((ROUTED_TOKENS, experts), np.float32)
