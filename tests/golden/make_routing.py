"""Makes routing.npz with the routers of Hugging Face transformers (5.24, torch 2.13, CPU, float32).

    python tests/golden/make_routing.py

Needs torch and transformers, which paxserve does not.
"""

from pathlib import Path

import numpy as np
import torch
from tiny_models import ROUTERS, router_logits, weight
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

ROUTER_CLASSES = {
    "mixtral": MixtralTopKRouter,
    "qwen3_moe": Qwen3MoeTopKRouter,
    "deepseek_v2": DeepseekV2TopkRouter,
    "deepseek_v3": DeepseekV3TopkRouter,
}


def routing(name: str) -> dict[str, np.ndarray]:
    """Experts [ROUTED_TOKENS, k], in ascending order, and their weights."""
    fields = dict(ROUTERS[name])
    experts = fields.get("num_experts") or fields.get("n_routed_experts") or fields["num_local_experts"]
    # The router's kernel is the identity, so that its hidden states are its logits.
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, hidden_size=experts, num_attention_heads=1)
    router = ROUTER_CLASSES[config.model_type](config)
    with torch.no_grad():
        router.weight.copy_(torch.eye(experts))
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias.copy_(torch.from_numpy(weight(f"{name}.bias", (experts,))))
        _, weights, indices = router(torch.from_numpy(router_logits(name, experts)))
    indices, order = indices.sort(dim=-1)
    return {f"{name}/experts": indices.numpy(), f"{name}/weights": weights.gather(1, order).numpy()}


if __name__ == "__main__":
    routings = [routing(name) for name in ROUTERS]
    arrays = {key: value for result in routings for key, value in result.items()}
    np.savez_compressed(Path(__file__).parent / "routing.npz", **arrays)
