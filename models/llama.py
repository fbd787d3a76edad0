"""Llama and the models built like it: Llama 2 to 3.2, SmolLM2, Mistral, Qwen 2, 2.5 and 3.

A pre-norm decoder: RMSNorm, grouped-query attention (MHA and MQA are its two ends) over paged KV with RoPE, RMSNorm,
gated MLP. What tells the families apart is `ModelConfig`: biases, norms of q and k, sliding windows, RoPE scaling.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Num

from paxserve.models.batch import AttentionBatch
from paxserve.models.config import ModelConfig
from paxserve.models.layers import Embedding, GatedMLP, Linear, RMSNorm, project
from paxserve.models.params import Declare
from paxserve.models.rope import RopeTable, apply_rope, rope_table
from paxserve.pallas_kernels import gqa_pages_shape, paged_attention, stacks_kv, write_pages

# A window wider than any context. Layers without a window use it when layers with different windows share one scan.
NO_WINDOW = 2**30

KVPages = Num[Array, "layers_pages kv_heads page_size two_head_dim"]
Window = Int[Array, ""] | int | None


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245) over paged KV, with one fused projection for q, k and v.

    Row g < group of a KV head's projection is its query head g, then come its K and its V.
    """

    def __init__(self, declare: Declare, config: ModelConfig) -> None:
        self.group, self.head_dim = config.group, config.head_dim
        kv_heads, embed = config.num_kv_heads, config.hidden_size
        head_axes = ("kv_heads", "group", "head_dim")
        self.qkv = Linear(
            declare,
            (kv_heads, self.group + 2, self.head_dim),
            (embed,),
            head_axes,
            ("embed",),
            use_bias=config.qkv_bias,
        )
        self.q_norm = RMSNorm(declare, self.head_dim, "head_dim", config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(declare, self.head_dim, "head_dim", config.rms_norm_eps) if config.qk_norm else None
        self.out = Linear(
            declare, (embed,), (kv_heads, self.group, self.head_dim), ("embed",), head_axes, use_bias=config.out_bias
        )

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        kv_pages: KVPages,
        batch: AttentionBatch,
        rope: RopeTable,
        layer: Int[Array, ""] | int,
        window: Window,
    ) -> tuple[Float[Array, "tokens embed"], KVPages]:
        """(output, kv_pages with this layer's K and V of the tokens written)."""
        tokens = x.shape[0]
        first_page = layer * batch.num_pages

        with jax.named_scope("qkv"):
            qkv = self.qkv(x)  # [tokens, kv_heads, group + 2, head_dim]
            q, k, v = jnp.split(qkv, [self.group, self.group + 1], axis=2)
            q = q.reshape(tokens, -1, self.head_dim)  # [tokens, heads, head_dim]
            k, v = k[:, :, 0], v[:, :, 0]  # [tokens, kv_heads, head_dim]
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)

        with jax.named_scope("rope"):
            q, k = apply_rope(q, rope), apply_rope(k, rope)

        with jax.named_scope("write_pages"):
            kv_pages = write_pages(kv_pages, k, v, batch.token_pages + first_page, batch.token_offsets)

        with jax.named_scope("paged_attention"):
            attended, _ = paged_attention(
                q,
                kv_pages,
                batch.block_tables + first_page,
                batch.context_lens,
                batch.query_starts,
                scale=self.head_dim**-0.5,
                window=window,
                max_query_len=batch.max_query_len,
                implementation=batch.attention,
            )  # [tokens, heads, head_dim]

        with jax.named_scope("out"):
            return self.out(attended.reshape(tokens, -1, self.group, self.head_dim)), kv_pages


class DecoderLayer(nnx.Module):
    """One layer; all its parameters get a leading "layers" axis if `declare` stacks them."""

    def __init__(self, declare: Declare, config: ModelConfig) -> None:
        self.attn_norm = RMSNorm(declare, config.hidden_size, "embed", config.rms_norm_eps)
        self.attn = Attention(declare, config)
        self.mlp_norm = RMSNorm(declare, config.hidden_size, "embed", config.rms_norm_eps)
        self.mlp = GatedMLP(declare, config.hidden_size, config.intermediate_size, use_bias=config.mlp_bias)

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        kv_pages: KVPages,
        batch: AttentionBatch,
        rope: RopeTable,
        layer: Int[Array, ""] | int,
        window: Window,
    ) -> tuple[Float[Array, "tokens embed"], KVPages]:
        with jax.named_scope("attention"):
            attended, kv_pages = self.attn(self.attn_norm(x), kv_pages, batch, rope, layer, window)
            x = x + attended
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x)), kv_pages


class Llama(nnx.Module):
    """The whole model. `dtype` is that of weights and activations; norms, RoPE, softmax and logits are float32.

    scan_layers: stack the layers' parameters and go over them with one `lax.scan`, so that compile time does not grow
    with depth (TPU); otherwise layers are unrolled, which spares the copy of every layer's weights that XLA makes in a
    scan on CPU and GPU. Both run the same layer function on the same pages array and give the same numbers.
    """

    def __init__(self, config: ModelConfig, *, dtype: Any, scan_layers: bool) -> None:
        declare = Declare(dtype)
        self.config, self.scan_layers = config, scan_layers
        self.embed = Embedding(declare, config.vocab_size, config.hidden_size)
        self.layers: Any
        if scan_layers:
            self.layers = DecoderLayer(Declare(dtype, stack=config.num_layers), config)
        else:
            self.layers = nnx.List([DecoderLayer(declare, config) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(declare, config.hidden_size, "embed", config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(declare, (config.vocab_size,), (config.hidden_size,), ("vocab",), ("embed",))

    @staticmethod
    def pages_shape(config: ModelConfig, num_pages: int, page_size: int, platform: str) -> tuple[int, ...]:
        """Shape of the one array that holds every layer's `num_pages` KV pages on a platform."""
        sizes = config.num_layers, num_pages, config.num_kv_heads, page_size, config.head_dim
        return gqa_pages_shape(*sizes, stacked=stacks_kv(platform))

    def __call__(
        self, tokens: Int[Array, "tokens"], kv_pages: KVPages, batch: AttentionBatch
    ) -> tuple[Float[Array, "tokens embed"], KVPages]:
        """(hidden states after the final norm, kv_pages with the tokens' K and V of every layer written).

        Padding tokens give finite, meaningless hidden states.
        """
        with jax.named_scope("embed"):
            x = self.embed(tokens)  # [tokens, embed]
        with jax.named_scope("rope_table"):
            rope = rope_table(self.config.rope, self.config.head_dim, batch.positions)
        with jax.named_scope("layers"):
            run = self._scanned if self.scan_layers else self._unrolled
            x, kv_pages = run(x, kv_pages, batch, rope)
        with jax.named_scope("final_norm"):
            return self.final_norm(x), kv_pages

    def logits(self, hidden: Float[Array, "rows embed"]) -> Float[Array, "rows vocab"]:
        """float32 scores of the next token for rows of hidden states."""
        kernel = self.embed.embedding if self.config.tie_word_embeddings else self.lm_head.kernel
        with jax.named_scope("logits"):
            return project(hidden, kernel[...])

    def _unrolled(
        self, x: Array, kv_pages: KVPages, batch: AttentionBatch, rope: RopeTable
    ) -> tuple[Float[Array, "tokens embed"], KVPages]:
        for index, (layer, window) in enumerate(zip(self.layers, self.config.windows, strict=True)):
            graph, params = nnx.split(layer)
            x, kv_pages = _run_layer(graph, window, params, x, kv_pages, batch, rope, jnp.int32(index))
        return x, kv_pages

    def _scanned(
        self, x: Array, kv_pages: KVPages, batch: AttentionBatch, rope: RopeTable
    ) -> tuple[Float[Array, "tokens embed"], KVPages]:
        windows = self.config.windows
        uniform = len(set(windows)) == 1
        stacked_windows = jnp.array([NO_WINDOW if w is None else w for w in windows], jnp.int32)
        graph, stacked = nnx.split(self.layers)

        def body(
            carry: tuple[Array, KVPages], scanned: tuple[nnx.State, Array, Array]
        ) -> tuple[tuple[Array, Array], None]:
            params, index, window = scanned
            layer = nnx.merge(graph, params)
            return layer(*carry, batch, rope, index, windows[0] if uniform else window), None

        indices = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        (x, kv_pages), _ = jax.lax.scan(body, (x, kv_pages), (stacked, indices, stacked_windows))
        return x, kv_pages


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_layer(
    graph: nnx.GraphDef,
    window: int | None,
    params: nnx.State,
    x: Array,
    kv_pages: KVPages,
    batch: AttentionBatch,
    rope: RopeTable,
    layer: Int[Array, ""],
) -> tuple[Float[Array, "tokens embed"], KVPages]:
    """A layer as a function of its parameters and number, so that layers alike are traced once."""
    return nnx.merge(graph, params)(x, kv_pages, batch, rope, layer, window)
