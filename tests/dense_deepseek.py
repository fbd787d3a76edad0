"""A DeepSeek in float64 numpy, in the expanded form: keys and values of every head, no latents in a cache."""

import numpy as np
from dense_llama import DenseLlama, log_softmax


class DenseDeepSeek(DenseLlama):
    """A DeepSeek-V2 or V3 checkpoint in memory, with a query rank, interleaved RoPE of the default kind."""

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

    def _rope(self, x: np.ndarray) -> np.ndarray:
        """As a product of complex numbers, whose parts are neighbours."""
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-np.arange(half) / half)
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * np.arange(x.shape[1])[:, None] * frequencies)
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
