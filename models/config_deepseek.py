"""What a config.json of DeepSeek-V2, V3 and the models built like them says of latent attention and experts.

Field names and defaults are those of transformers; what it leaves out (`scoring_func`, `moe_layer_freq`, `topk_method` of
V3) is read as DeepSeek's released code does.
"""

from collections.abc import Mapping
from typing import Any

from paxserve.models.config import MLAConfig, MoEConfig

_LATENT_DEFAULTS: Mapping[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
}
V2_DEFAULTS: Mapping[str, Any] = {
    **_LATENT_DEFAULTS,
    "vocab_size": 102_400,
    "intermediate_size": 11_008,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "topk_method": "greedy",
    "n_group": None,
    "topk_group": None,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
V3_DEFAULTS: Mapping[str, Any] = {
    **_LATENT_DEFAULTS,
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
# The released code and transformers disagree about V2 with normalised weights, which no released V2 has.
V2_FIXED: Mapping[str, Any] = {"rope_interleave": True, "scoring_func": "softmax", "norm_topk_prob": False}
V3_FIXED: Mapping[str, Any] = {"mlp_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def mla_config(fields: Mapping[str, Any]) -> MLAConfig:
    return MLAConfig(
        q_lora_rank=fields["q_lora_rank"],
        kv_lora_rank=fields["kv_lora_rank"],
        qk_nope_head_dim=fields["qk_nope_head_dim"],
        qk_rope_head_dim=fields["qk_rope_head_dim"],
        v_head_dim=fields["v_head_dim"],
        rope_interleaved=fields["rope_interleave"],
    )


def moe_config(fields: Mapping[str, Any]) -> MoEConfig | None:
    """The experts, None where every layer is dense. Raises NotImplementedError for another way of choosing them."""
    num_layers, first, step = fields["num_hidden_layers"], fields["first_k_dense_replace"], fields["moe_layer_freq"]
    layers = tuple(index >= first and index % step == 0 for index in range(num_layers))
    if fields["n_routed_experts"] is None or not any(layers):
        return None
    if fields["num_experts_per_tok"] is None:
        raise ValueError("num_experts_per_tok is missing")
    method, is_v3 = fields["topk_method"], fields["scoring_func"] == "sigmoid"  # V3 has one method, V2 two
    if not is_v3 and method not in ("greedy", "group_limited_greedy"):
        raise NotImplementedError(f"topk_method={method!r} is not supported, only greedy and group_limited_greedy")
    grouped = method != "greedy"
    if grouped and not (fields["n_group"] and fields["topk_group"]):
        raise ValueError(f"topk_method {method!r} needs n_group and topk_group")
    return MoEConfig(
        num_experts=fields["n_routed_experts"],
        experts_per_token=fields["num_experts_per_tok"],
        intermediate_size=fields["moe_intermediate_size"],
        layers=layers,
        shared_intermediate_size=fields["moe_intermediate_size"] * (fields["n_shared_experts"] or 0),
        scoring=fields["scoring_func"],
        groups=fields["n_group"] if grouped else 1,
        top_groups=fields["topk_group"] if grouped else 1,
        group_score="top2" if is_v3 else "max",
        score_bias=is_v3,
        normalize=fields["norm_topk_prob"],
        scaling=fields["routed_scaling_factor"],
    )
