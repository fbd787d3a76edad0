"""DeepSeek-V2, V2-Lite, V3 and R1, and the models built like them (Kimi-K2): multi-head latent attention.

The decoder is the one of all our models. What is cached of a token is one latent, from which every head's keys and
values could be expanded, and one rotated key that all heads share (arXiv:2405.04434, section 2.1).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from paxserve.models.batch import AttentionBatch
from paxserve.models.config import ModelConfig
from paxserve.models.decoder import Decoder, KVPages
from paxserve.models.fp8 import BlockScaled, Kernel, kernel_value
from paxserve.models.layers import Linear, RMSNorm
from paxserve.models.page_ranks import PAGES, merge_pages
from paxserve.models.params import Declare
from paxserve.models.rope import RopeTable, apply_rope, softmax_factor
from paxserve.models.token_chunks import cut, in_chunks
from paxserve.pallas_kernels import (
    MLASizes,
    latent_page_size,
    mla_paged_attention,
    mla_pages_shape,
    pairs_latents,
    schedule_attention,
    write_latent_pages,
)
from paxserve.sharding import TENSOR, axes_size, gather

QUERY_ROWS = 2**17
"""Tokens times query heads that attend at a time: their latent queries and outputs are several times what the rest of a step
makes of a token."""

LATENT_NORM_EPSILON = 1e-6  # whatever a model's rms_norm_eps is, in the released code and in transformers


class LatentAttention(nnx.Module):
    """Multi-head latent attention over paged latents, in the absorbed form.

    kv_b, which expands a latent to a head's key and value, is two parameters: its key half is multiplied into the query
    and its value half into the output, so that the cache is never expanded.

    On a mesh a device projects its own query heads, and attends with all of them to the pages that it holds: the latents,
    which all heads share, are nowhere twice.
    """

    def __init__(self, declare: Declare, config: ModelConfig) -> None:
        mla = config.mla
        assert mla is not None
        self.mla, self.num_heads = mla, config.num_heads
        self.scale = config.head_dim**-0.5 * softmax_factor(config.rope)
        heads, embed, q_rank, rank = config.num_heads, config.hidden_size, mla.q_lora_rank, mla.kv_lora_rank
        bias = config.qkv_bias
        head_axes = ("heads", "head_dim")
        if q_rank is None:
            self.q_a = self.q_a_norm = None
            self.q = Linear(declare, (heads, config.head_dim), embed, head_axes, "embed")
        else:
            self.q_a = Linear(declare, (q_rank,), embed, ("latent",), "embed", use_bias=bias)
            self.q_a_norm = RMSNorm(declare, q_rank, "latent", LATENT_NORM_EPSILON)
            self.q = Linear(declare, (heads, config.head_dim), q_rank, head_axes, "latent")
        self.kv_a = Linear(declare, (mla.cached_dim,), embed, ("latent",), "embed", use_bias=bias)
        self.kv_a_norm = RMSNorm(declare, rank, "latent", LATENT_NORM_EPSILON)
        k_dim, v_dim = mla.qk_nope_head_dim, mla.v_head_dim
        self.k_b, self.k_b_scale = declare.kernel((heads, k_dim), rank, head_axes, "latent", beside=v_dim)
        self.v_b, self.v_b_scale = declare.kernel((heads, v_dim), rank, head_axes, "latent", beside=k_dim)
        self.out = Linear(declare, (embed,), heads * v_dim, ("embed",), "attended", use_bias=config.out_bias)

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        kv_pages: KVPages,
        batch: AttentionBatch,
        rope: RopeTable,
        layer: Int[Array, ""] | int,
        window: None,
    ) -> tuple[Float[Array, "tokens embed"], KVPages]:
        """(output, kv_pages with this layer's latents and rotated keys of the tokens written)."""
        assert window is None, "ModelConfig has no windows with latent attention"
        first_page = layer * batch.num_pages

        with jax.named_scope("q"):
            q_a = x if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x))
            q = self.q(q_a)  # [tokens, heads, qk_nope_head_dim + qk_rope_head_dim]
            q_nope, q_rope = jnp.split(q, [self.mla.qk_nope_head_dim], axis=-1)

        with jax.named_scope("kv"):
            latent, k_rope = jnp.split(self.kv_a(x), [self.mla.kv_lora_rank], axis=-1)
            latent = self.kv_a_norm(latent)  # [tokens, kv_lora_rank]

        with jax.named_scope("rope"):
            interleaved = self.mla.rope_interleaved
            q_rope = apply_rope(q_rope, rope, interleaved=interleaved)
            k_rope = apply_rope(k_rope[:, None], rope, interleaved=interleaved)[:, 0]  # [tokens, qk_rope_head_dim]

        with jax.named_scope("write_pages"):
            kv_pages = write_latent_pages(kv_pages, latent, k_rope, batch.token_pages + first_page, batch.token_offsets)

        def attend(q_nope: Array, q_rope: Array, context_lens: Array, query_starts: Array, schedule: Any) -> Array:
            """Some tokens' values of this device's heads [tokens, heads * v_head_dim]."""
            with jax.named_scope("absorb"):
                k_b = kernel_value(self.k_b, self.k_b_scale)
                q_latent = _per_head("htn,hnr->htr", q_nope, k_b)  # [tokens, heads, kv_lora_rank]
            with jax.named_scope("paged_attention"):
                if axes_size(PAGES) > 1:
                    q = gather(jnp.concatenate([q_latent, q_rope], axis=-1), PAGES, 1)
                    q_latent, q_rope = jnp.split(q, [self.mla.kv_lora_rank], axis=-1)  # of all devices' heads
                attended, lse = mla_paged_attention(
                    q_latent,
                    q_rope,
                    kv_pages,
                    batch.block_tables + first_page,
                    context_lens,
                    query_starts,
                    scale=self.scale,
                    max_query_len=batch.max_query_len,
                    page_stride=batch.page_stride,
                    page_offset=batch.page_offset,
                    schedule=schedule,
                    implementation=batch.attention,
                )
                attended = merge_pages(attended, lse, attended.shape)  # [tokens, heads of this device, kv_lora_rank]
            with jax.named_scope("expand"):
                values = _per_head("htr,hvr->htv", attended, kernel_value(self.v_b, self.v_b_scale))
            return values.reshape(len(values), -1)

        values = in_chunks(attend, (q_nope, q_rope), batch, _most_tokens(self.num_heads))
        with jax.named_scope("out"):
            return self.out(values), kv_pages


class DeepSeek(Decoder):
    """A decoder with latent attention in every layer."""

    attention = LatentAttention
    pages_axes = ("page",)

    @staticmethod
    def pages_shape(config: ModelConfig, num_pages: int, page_size: int, platform: str) -> tuple[int, ...]:
        assert config.mla is not None
        sizes = config.num_layers, num_pages, page_size, config.mla.cached_dim
        return mla_pages_shape(*sizes, paired=pairs_latents(platform))

    def schedule(self, x: Float[Array, "tokens embed"], kv_pages: KVPages, batch: AttentionBatch) -> Any:
        """Of each chunk that `in_chunks` makes of the step."""
        mla, heads = self.config.mla, self.config.num_heads
        assert mla is not None
        own_heads = heads // axes_size(TENSOR) * axes_size(PAGES)  # those that attend to the pages here
        page_size = latent_page_size(kv_pages, mla.cached_dim)
        size, context_lens, query_starts = cut(batch, len(x), _most_tokens(heads))

        def schedule(context_lens: Array, query_starts: Array) -> Any:
            return schedule_attention(
                MLASizes(own_heads, mla.kv_lora_rank, mla.qk_rope_head_dim, page_size),
                context_lens,
                query_starts,
                tokens=size,
                max_pages=batch.block_tables.shape[1],
                dtypes=(x.dtype, kv_pages.dtype),
                max_query_len=batch.max_query_len,
                page_stride=batch.page_stride,
                page_offset=batch.page_offset,
                implementation=batch.attention,
            )

        make = schedule if size == len(x) else jax.vmap(schedule)
        return make(context_lens, query_starts)


def _most_tokens(heads: int) -> int:
    """That attend at a time."""
    return max(QUERY_ROWS // heads, 1)


def _per_head(
    spec: str, x: Float[Array, "tokens heads inputs"], kernel: Kernel
) -> Float[Array, "tokens heads outputs"]:
    """Each head's vectors times that head's matrix [heads, ...], summed in float32. `spec` has x's heads first."""
    if isinstance(kernel, BlockScaled):
        kernel = kernel.dequantized(x.dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    # Turned by hand: XLA:CPU refuses a bfloat16 product in which the head is not the first axis on both sides.
    y = jnp.einsum(spec, x.swapaxes(0, 1), kernel, precision=precision, preferred_element_type=jnp.float32)
    return y.astype(x.dtype).swapaxes(0, 1)
