"""Paged attention for any device: chunks of pages, an online softmax, never the whole gathered cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from paxserve.pallas_kernels.layout import Scale, load

CHUNK_KEYS = 128


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    kv_pages: Num[Array, "pages kv_heads page_size two_head_dim"],
    block_tables: Int[Array, "seqs max_pages"],
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    *,
    scale: float,
    window: int | Int[Array, ""] | None,
    soft_cap: float | None,
    sinks: Float[Array, "heads"] | None,
    k_scale: Scale | None,
    v_scale: Scale | None,
    max_query_len: int | None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """See `paxserve.pallas_kernels.paged_attention`."""
    del max_query_len
    tokens, heads, head_dim = q.shape
    kv_heads, page_size = kv_pages.shape[1:3]
    token = jnp.arange(tokens)
    is_real = token < query_starts[-1]
    seq = jnp.where(is_real, jnp.searchsorted(query_starts, token, side="right") - 1, 0)
    context = jnp.where(is_real, context_lens[seq], 0)
    position = jnp.where(context > 0, context - (query_starts[seq + 1] - token), -1)
    tables = block_tables[seq]
    first_key = jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0)
    first_page = first_key // page_size
    pages_per_chunk = min(max(CHUNK_KEYS // page_size, 1), block_tables.shape[1])
    chunks = -(-(position // page_size + 1 - first_page) // pages_per_chunk)
    exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    dtype = q.dtype

    def body(i, carry):
        m, total, acc = carry
        page = first_page[:, None] + i * pages_per_chunk + jnp.arange(pages_per_chunk)  # [tokens, chunk]
        ids = jnp.take_along_axis(tables, page, axis=1, mode="clip")
        kv = load(kv_pages.at[ids].get(mode="clip")).astype(dtype)  # [tokens, chunk, kv_heads, page_size, 2 * head_dim]
        kv = jnp.moveaxis(kv, 2, 1).reshape(tokens, kv_heads, -1, 2 * head_dim)
        key = (page[:, :, None] * page_size + jnp.arange(page_size)).reshape(tokens, -1)  # [tokens, keys]
        visible = (key >= first_key[:, None]) & (key <= position[:, None])
        kv = jnp.where(visible[:, None, :, None], kv, 0)
        k, v = kv[..., :head_dim], kv[..., head_dim:]
        logits = jnp.einsum("thgd,thkd->thgk", grouped, k, precision=exact, preferred_element_type=jnp.float32)
        logits *= scale if k_scale is None else scale * k_scale
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        logits = jnp.where(visible[:, None, None], logits, -jnp.inf)
        m_next = jnp.maximum(m, logits.max(-1))
        p = jnp.exp(logits - m_next[..., None])
        fade = jnp.exp(m - m_next)
        pv = jnp.einsum("thgk,thkd->thgd", p.astype(dtype), v, precision=exact, preferred_element_type=jnp.float32)
        return m_next, total * fade + p.sum(-1), acc * fade[..., None] + pv

    stats = jnp.full(grouped.shape[:3], jnp.finfo(jnp.float32).min)
    carry = stats, jnp.zeros_like(stats), jnp.zeros(grouped.shape, jnp.float32)
    m, total, acc = jax.lax.fori_loop(0, chunks.max(), body, carry)
    if v_scale is not None:
        acc *= v_scale
    lse = jnp.where(total > 0, m + jnp.log(total), -jnp.inf).reshape(tokens, heads)
    out = (acc / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]).reshape(q.shape)
    if sinks is not None:
        with_sink = jnp.where((position >= 0)[:, None], jnp.logaddexp(lse, sinks.astype(jnp.float32)), -jnp.inf)
        out *= jnp.exp(lse - jnp.where(position[:, None] >= 0, with_sink, 0))[..., None]
        lse = with_sink
    return out.astype(q.dtype), lse
