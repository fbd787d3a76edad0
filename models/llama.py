"""Llama and the models built like it: Llama 2 to 3.2, SmolLM2, Mistral, Qwen 2, 2.5 and 3.

A pre-norm decoder: RMSNorm, grouped-query attention (MHA and MQA are its two ends) over paged KV with RoPE, RMSNorm,
gated MLP. What tells the families apart is `ModelConfig`: biases, norms of q and k, sliding windows, RoPE scaling.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from paxserve.models.batch import AttentionBatch
from paxserve.models.config import ModelConfig
from paxserve.models.decoder import Decoder, KVPages, Window
from paxserve.models.layers import Linear, RMSNorm
from paxserve.models.page_ranks import PAGES, merge_pages
from paxserve.models.params import Declare
from paxserve.models.rope import RopeTable, apply_rope
from paxserve.pallas_kernels import (
    GQASizes,
    gqa_pages_shape,
    page_size_of,
    paged_attention,
    schedule_attention,
    stacks_kv,
    write_pages,
)
from paxserve.sharding import gather


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245) over paged KV, with one fused projection for q, k and v.

    Row g < group of a KV head's projection is its query head g, then come its K and its V.

    On a mesh a device computes its KV heads for the pages that it holds. The projections are split over the devices that
    share a KV head's pages, too: each of them projects a part of every head's width and then has all of q, and of what
    the heads attended to, side by side, a part.
    """

    def __init__(self, declare: Declare, config: ModelConfig) -> None:
        self.group, self.head_dim = config.group, config.head_dim
        kv_heads, embed = config.num_kv_heads, config.hidden_size
        self.qkv = Linear(
            declare,
            (kv_heads, self.group + 2, self.head_dim),
            embed,
            ("kv_heads", "group", "kv_head_dim"),
            "embed",
            use_bias=config.qkv_bias,
        )
        self.q_norm = RMSNorm(declare, self.head_dim, "head_dim", config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(declare, self.head_dim, "head_dim", config.rms_norm_eps) if config.qk_norm else None
        attended = config.num_heads * self.head_dim
        self.out = Linear(declare, (embed,), attended, ("embed",), "attended", use_bias=config.out_bias)

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
            qkv = gather(self.qkv(x), PAGES, -1)  # [tokens, kv_heads, group + 2, head_dim]
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
            attended, lse = paged_attention(
                q,
                kv_pages,
                batch.block_tables + first_page,
                batch.context_lens,
                batch.query_starts,
                scale=self.head_dim**-0.5,
                window=window,
                max_query_len=batch.max_query_len,
                page_stride=batch.page_stride,
                page_offset=batch.page_offset,
                schedule=batch.schedule,
                implementation=batch.attention,
            )  # [tokens, heads, head_dim]
            attended = merge_pages(attended, lse, (tokens, -1))  # [tokens, attended of this device]

        with jax.named_scope("out"):
            return self.out(attended), kv_pages


class Llama(Decoder):
    """A decoder with grouped-query attention in every layer."""

    attention = Attention
    pages_axes = ("page", "kv_heads")

    @staticmethod
    def pages_shape(config: ModelConfig, num_pages: int, page_size: int, platform: str) -> tuple[int, ...]:
        sizes = config.num_layers, num_pages, config.num_kv_heads, page_size, config.head_dim
        return gqa_pages_shape(*sizes, stacked=stacks_kv(platform))

    def schedule(self, x: Float[Array, "tokens embed"], kv_pages: KVPages, batch: AttentionBatch) -> Any:
        """None for layers with different windows, whose work differs."""
        config, kv_heads = self.config, kv_pages.shape[1]
        window, *others = set(config.windows)
        if others:
            return None
        page_size = page_size_of(kv_pages, config.head_dim)
        return schedule_attention(
            GQASizes(kv_heads * config.group, kv_heads, config.head_dim, page_size),
            batch.context_lens,
            batch.query_starts,
            tokens=len(x),
            max_pages=batch.block_tables.shape[1],
            dtypes=(x.dtype, kv_pages.dtype),
            window=window,
            max_query_len=batch.max_query_len,
            page_stride=batch.page_stride,
            page_offset=batch.page_offset,
            implementation=batch.attention,
        )
