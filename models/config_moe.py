"""What a config.json of Mixtral and Qwen3-MoE says of experts; names and defaults are those of transformers."""

from collections.abc import Mapping
from typing import Any

from paxserve.models.config import MoEConfig

MIXTRAL_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3_MOE_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}


def mixtral_moe(fields: Mapping[str, Any]) -> MoEConfig:
    return MoEConfig(
        num_experts=_num_experts(fields),
        experts_per_token=fields["num_experts_per_tok"],
        intermediate_size=fields["intermediate_size"],
        layers=(True,) * fields["num_hidden_layers"],
    )


def qwen3_moe(fields: Mapping[str, Any]) -> MoEConfig | None:
    """None where every layer is dense."""
    num_experts, step, dense = _num_experts(fields), fields["decoder_sparse_step"], fields["mlp_only_layers"] or ()
    layers = tuple((index + 1) % step == 0 and index not in dense for index in range(fields["num_hidden_layers"]))
    if not num_experts or not any(layers):
        return None
    return MoEConfig(
        num_experts=num_experts,
        experts_per_token=fields["num_experts_per_tok"],
        intermediate_size=fields["moe_intermediate_size"],
        layers=layers,
        normalize=fields["norm_topk_prob"],
    )


def _num_experts(fields: Mapping[str, Any]) -> int:
    """Both names are in use; transformers 5 writes `num_local_experts`."""
    return fields.get("num_experts", fields["num_local_experts"])
