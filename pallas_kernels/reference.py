"""The reference implementation: dense, float32, one gathered cache per token. It defines what the others compute."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from paxserve.pallas_kernels.layout import Scale, load, split_kv


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    kv_pages: Num[Array, "pages kv_heads slots width"],
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
    """See `paxserve.pallas_kernels.paged_attention`; `max_query_len` is not needed here."""
    del max_query_len
    tokens, heads, head_dim = q.shape
    kv_heads = kv_pages.shape[1]
    token = jnp.arange(tokens)
    seq = jnp.searchsorted(query_starts, token, side="right") - 1  # [tokens]
    is_real = token < query_starts[-1]
    seq = jnp.where(is_real, seq, 0)
    context = jnp.where(is_real, context_lens[seq], 0)
    position = context - (query_starts[seq + 1] - token)

    kv = load(kv_pages[block_tables[seq]]).astype(jnp.float32)  # [tokens, max_pages, kv_heads, slots, width]
    kv = jnp.concatenate(split_kv(kv, head_dim), axis=-1)  # [tokens, max_pages, kv_heads, page_size, 2 * head_dim]
    kv = jnp.moveaxis(kv, 2, 1).reshape(tokens, kv_heads, -1, 2 * head_dim)  # [tokens, kv_heads, keys, 2 * head_dim]
    key = jnp.arange(kv.shape[2])
    visible = (key <= position[:, None]) & (context[:, None] > 0)  # [tokens, keys]
    if window is not None:
        visible &= key > position[:, None] - window
    # Slots that no token sees may hold NaN, and 0 * NaN is NaN: they are cleared in V too.
    kv = jnp.where(visible[:, None, :, None], kv, 0)
    k, v = kv[..., :head_dim], kv[..., head_dim:]
    if k_scale is not None:
        k = k * k_scale
    if v_scale is not None:
        v = v * v_scale

    exact = jax.lax.Precision.HIGHEST
    grouped = q.astype(jnp.float32).reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    logits = jnp.einsum("thgd,thkd->thgk", grouped, k, precision=exact) * scale  # [tokens, kv_heads, group, keys]
    logits = logits.reshape(tokens, heads, -1)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(visible[:, None, :], logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)  # [tokens, heads]
    if sinks is not None:
        lse = jnp.where(context[:, None] > 0, jnp.logaddexp(lse, sinks.astype(jnp.float32)), -jnp.inf)
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
    weights = weights.reshape(tokens, kv_heads, heads // kv_heads, -1)
    out = jnp.einsum("thgk,thkd->thgd", weights, v, precision=exact)
    return out.reshape(q.shape).astype(q.dtype), lse
