"""A DeepSeek in float64 numpy: keys and values of every head, no latents in a cache; experts chosen token by token."""

import numpy as np
from dense_llama import DenseLlama, log_softmax


class DenseDeepSeek(DenseLlama):
    """A DeepSeek-V3 checkpoint in memory, with a query rank and RoPE of the default kind."""

    def _attention(self, x: np.ndarray, name: str, layer: int) -> np.ndarray:
        heads, rank = self.config["num_attention_heads"], self.config["kv_lora_rank"]
        nope, rope, value = (self.config[f] for f in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        q = self._linear(
            self._norm(self._linear(x, name + "q_a_proj"), name + "q_a_layernorm", 1e-6), name + "q_b_proj"
        )
        q = q.reshape(len(x), heads, nope + rope).swapaxes(0, 1)
        compressed = self._linear(x, name + "kv_a_proj_with_mqa")
        k_rope = self._rope(compressed[None, :, rank:])
        kv = self._linear(self._norm(compressed[:, :rank], name + "kv_a_layernorm", 1e-6), name + "kv_b_proj")
        kv = kv.reshape(len(x), heads, nope + value).swapaxes(0, 1)
        scores = q[..., :nope] @ kv[..., :nope].swapaxes(1, 2) + self._rope(q[..., nope:]) @ k_rope.swapaxes(1, 2)
        visible = np.tri(len(x), dtype=bool)
        attended = np.exp(log_softmax(np.where(visible, scores / np.sqrt(nope + rope), -np.inf))) @ kv[..., nope:]
        return self._linear(attended.swapaxes(0, 1).reshape(len(x), heads * value), name + "o_proj")

    def _mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        if name + "gate.weight" not in self.tensors:
            return super()._mlp(x, name)
        result = super()._mlp(x, name + "shared_experts.")
        scores = 1 / (1 + np.exp(-self._linear(x, name + "gate")))
        chosen = [self._choose(row + self.tensors[name + "gate.e_score_correction_bias"]) for row in scores]
        for expert in range(self.config["n_routed_experts"]):
            tokens = [token for token, experts in enumerate(chosen) if expert in experts]
            shares = [scores[token, expert] / scores[token, chosen[token]].sum() for token in tokens]
            weights = self.config["routed_scaling_factor"] * np.array(shares)
            result[tokens] += weights[:, None] * super()._mlp(x[tokens], f"{name}experts.{expert}.")
        return result

    def _choose(self, scores: np.ndarray) -> list[int]:
        """The best experts of the groups whose two best have the highest sums."""
        size = len(scores) // self.config["n_group"]
        groups = [range(start, start + size) for start in range(0, len(scores), size)]
        groups.sort(key=lambda group: -sum(sorted(scores[group])[-2:]))
        experts = [expert for group in groups[: self.config["topk_group"]] for expert in group]
        return sorted(experts, key=lambda expert: -scores[expert])[: self.config["num_experts_per_tok"]]

    def _rope(self, x: np.ndarray) -> np.ndarray:
        """As a product of complex numbers, whose parts are neighbours."""
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-np.arange(half) / half)
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * np.arange(x.shape[1])[:, None] * frequencies)
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
