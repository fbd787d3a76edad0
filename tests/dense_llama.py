"""What the engine must give, written again in float64 numpy: a dense decoder without pages, and sampling by sorting.

Only the Gumbel noise is taken from JAX; it defines the draw of a (seed, position).
"""

import functools
from collections import Counter

import jax
import numpy as np

from paxserve.sampling_params import SamplingParams


class DenseLlama:
    """A Llama or Qwen2 checkpoint in memory (config.json, tensors by their Hugging Face names)."""

    def __init__(self, config: dict, tensors: dict[str, np.ndarray]) -> None:
        self.config = config
        self.tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        self.vocab = config["vocab_size"]
        self._results: dict[tuple, list[int]] = {}

    def logits(self, tokens: list[int]) -> np.ndarray:
        """[tokens, vocab] for a whole sequence at once."""
        x = self.tensors["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            x = x + self._attention(self._norm(x, name + "input_layernorm"), name + "self_attn.", layer)
            x = x + self._mlp(self._norm(x, name + "post_attention_layernorm"), name + "mlp.")
        return self._linear(self._norm(x, "model.norm"), "lm_head")

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        return log_softmax(self.logits(tokens))

    def generate(self, prompt: list[int], params: SamplingParams, index: int = 0) -> list[int]:
        """Tokens of sample `index` of a request, alone; `params.seed` must be given if it draws."""
        key = (tuple(prompt), repr(params), index)
        if key not in self._results:
            tokens: list[int] = []
            stops = {*params.stop_token_ids, *(() if params.ignore_eos else (self.config["eos_token_id"],))}
            seed = ((params.seed or 0) + index) % 2**64
            while len(tokens) < params.max_tokens and not (tokens and tokens[-1] in stops):
                logits = self.logits(prompt + tokens)[-1]
                tokens.append(next_token(logits, params, prompt, tokens, stops, seed))
            self._results[key] = tokens
        return self._results[key]

    def _attention(self, x: np.ndarray, name: str, layer: int) -> np.ndarray:
        heads, kv_heads, dim = (self.config[f] for f in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        q, k, v = (self._linear(x, f"{name}{p}_proj").reshape(len(x), -1, dim).swapaxes(0, 1) for p in "qkv")
        q, k = self._rope(q), self._rope(k)
        k, v = np.repeat(k, heads // kv_heads, axis=0), np.repeat(v, heads // kv_heads, axis=0)
        distance = np.arange(len(x))[:, None] - np.arange(len(x))[None]
        visible = distance >= 0
        if self.config.get("use_sliding_window") and layer >= self.config["max_window_layers"]:
            visible &= distance < self.config["sliding_window"]
        scores = np.where(visible, q @ k.swapaxes(1, 2) / np.sqrt(dim), -np.inf)
        attended = np.exp(log_softmax(scores)) @ v  # [heads, tokens, dim]
        return self._linear(attended.swapaxes(0, 1).reshape(len(x), heads * dim), name + "o_proj")

    def _mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        gate = self._linear(x, name + "gate_proj")
        return self._linear(gate / (1 + np.exp(-gate)) * self._linear(x, name + "up_proj"), name + "down_proj")

    def _rope(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        frequencies = self.config.get("rope_theta", 10_000.0) ** (-np.arange(half) / half)
        angles = np.arange(x.shape[1])[:, None] * frequencies
        first, second = x[..., :half], x[..., half:]
        return np.concatenate(
            [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)],
            axis=-1,
        )

    def _norm(self, x: np.ndarray, name: str, epsilon: float | None = None) -> np.ndarray:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean + (epsilon or self.config["rms_norm_eps"])) * self.tensors[name + ".weight"]

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        # Not `@`: for matrices this small BLAS only waits for its threads.
        return np.einsum("te,fe->tf", x, self.tensors[name + ".weight"]) + self.tensors.get(name + ".bias", 0)


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def modified_logits(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], stops: set[int] = frozenset()
) -> np.ndarray:
    """After bias, min_tokens and penalties, one token at a time, as the papers and the OpenAI API define them."""
    x = np.array(logits, np.float64)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if len(output) < params.min_tokens:
        x[list(stops)] = -np.inf
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    return x


def kept_tokens(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """bool [vocab]: what min-p, top-k and top-p leave, in this order, of logits x divided by the temperature."""
    kept = x - x.max() >= (np.log(params.min_p) if params.min_p else -np.inf)
    if params.top_k:
        kept &= x >= np.sort(np.where(kept, x, -np.inf))[::-1][min(params.top_k, len(x)) - 1]
    if params.top_p < 1:
        probs = np.where(kept, np.exp(log_softmax(np.where(kept, x, -np.inf))), 0)
        descending = np.sort(probs)[::-1]
        last = min(np.searchsorted(np.cumsum(descending), params.top_p), len(x) - 1)
        kept &= probs >= descending[last]
    return kept


def next_token(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], stops: set[int], seed: int
) -> int:
    x = modified_logits(logits, params, prompt, output, stops)
    if params.temperature == 0:
        return int(np.argmax(x))
    x /= params.temperature
    noise = gumbel(seed, len(prompt) + len(output), len(x))
    return int(np.argmax(np.where(kept_tokens(x, params), x + noise, -np.inf)))


def gumbel(seed: int, position: int, size: int) -> np.ndarray:
    return np.asarray(_gumbel(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), position, size), np.float64)


@functools.partial(jax.jit, static_argnums=2)
def _gumbel(seed: jax.Array, position: int, size: int) -> jax.Array:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, position), (size,))
