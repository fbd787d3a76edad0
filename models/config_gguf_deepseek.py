"""What the metadata of a GGUF file of llama.cpp's architecture "deepseek2" say of latent attention and experts.

That one architecture covers DeepSeek-V2, V2-Lite, V3 and R1 and the models built like them. The weights keep the released
order of RoPE's pairs, neighbours.
"""

from collections.abc import Collection, Mapping
from typing import Any

from paxserve.models.config import MLAConfig, MoEConfig

READ = frozenset(
    {
        "attention.q_lora_rank",
        "attention.kv_lora_rank",
        "attention.key_length_mla",
        "attention.value_length_mla",
        "leading_dense_block_count",
        "expert_count",
        "expert_used_count",
        "expert_shared_count",
        "expert_feed_forward_length",
        "expert_gating_func",
        "expert_group_count",
        "expert_group_used_count",
        "expert_weights_norm",
        "expert_weights_scale",
        "rope.scaling.yarn_log_multiplier",
    }
)
_SCORING = {1: "softmax", 2: "sigmoid"}


def mla_config(fields: Mapping[str, Any]) -> MLAConfig:
    """The sizes of a head, which older files give as key_length and value_length. Newer ones have those, and
    head_count_kv, describe the cached latent instead, which adds nothing to its rank.
    """
    suffix = "_mla" if "attention.key_length_mla" in fields else ""
    rope_dim = fields["rope.dimension_count"]
    return MLAConfig(
        q_lora_rank=fields.get("attention.q_lora_rank") or None,
        kv_lora_rank=fields["attention.kv_lora_rank"],
        qk_nope_head_dim=fields[f"attention.key_length{suffix}"] - rope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields[f"attention.value_length{suffix}"],
    )


def moe_config(fields: Mapping[str, Any], tensor_names: Collection[str]) -> MoEConfig | None:
    """The experts, None where every layer is dense.

    Files from before llama.cpp knew groups of experts do not say how many there are; experts are chosen from all then,
    as llama.cpp does.
    """
    num_layers, first = fields["block_count"], fields.get("leading_dense_block_count", 0)
    if not fields.get("expert_count") or first >= num_layers:
        return None
    gating = fields.get("expert_gating_func") or 1  # files of V2 may be older than the key
    if gating not in _SCORING:
        raise NotImplementedError(f"deepseek2.expert_gating_func={gating} is not supported, only softmax and sigmoid")
    normalize = bool(fields.get("expert_weights_norm"))
    if normalize and _SCORING[gating] == "softmax":
        # The released code and llama.cpp disagree about them; no released model has them.
        raise NotImplementedError("deepseek2.expert_weights_norm=True is not supported with softmax")
    groups = fields.get("expert_group_count") or 1
    width = fields["expert_feed_forward_length"]
    score_bias = f"blk.{first}.exp_probs_b.bias" in tensor_names
    return MoEConfig(
        num_experts=fields["expert_count"],
        experts_per_token=fields["expert_used_count"],
        intermediate_size=width,
        layers=tuple(index >= first for index in range(num_layers)),
        shared_intermediate_size=width * (fields.get("expert_shared_count") or 0),
        scoring=_SCORING[gating],
        groups=groups,
        top_groups=fields["expert_group_used_count"] if groups > 1 else 1,
        # V3 chooses with a bias and ranks groups by two experts, V2 has neither.
        group_score="top2" if score_bias else "max",
        score_bias=score_bias,
        normalize=normalize,
        scaling=fields.get("expert_weights_scale") or 1.0,
    )
