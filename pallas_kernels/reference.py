"""The reference implementation: dense, float32, one gathered cache per token. It defines what the others compute."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from paxserve.pallas_kernels.layout import Scale, latent_rows, load, page_size_of, split_kv


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
    page_stride: int,
    page_offset: Int[Array, "seqs"] | None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """See `paxserve.pallas_kernels.paged_attention`; `max_query_len` is not needed here."""
    del max_query_len
    seq, position = _locate(q.shape[0], context_lens, query_starts)
    k, v = split_kv(load(kv_pages[block_tables[seq]]), q.shape[-1])
    return _attend(
        q,
        k,
        v,
        position,
        _key_positions(block_tables, page_size_of(kv_pages, q.shape[-1]), page_stride, page_offset)[seq],
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def mla_paged_attention(
    q_latent: Float[Array, "tokens heads kv_lora_rank"],
    q_rope: Float[Array, "tokens heads qk_rope_head_dim"],
    latent_pages: Num[Array, "pages *slots width"],
    block_tables: Int[Array, "seqs max_pages"],
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    *,
    scale: float,
    soft_cap: float | None,
    k_scale: Scale | None,
    max_query_len: int | None,
    page_stride: int,
    page_offset: Int[Array, "seqs"] | None,
) -> tuple[Float[Array, "tokens heads kv_lora_rank"], Float[Array, "tokens heads"]]:
    """See `paxserve.pallas_kernels.mla_paged_attention`; `max_query_len` is not needed here."""
    del max_query_len
    seq, position = _locate(q_latent.shape[0], context_lens, query_starts)
    q = jnp.concatenate([q_latent, q_rope], axis=-1)
    rank = q_latent.shape[-1]
    k = latent_rows(load(latent_pages[block_tables[seq]]), rank, q_rope.shape[-1])[:, :, None]  # one KV head
    v = k[..., :rank]
    key = _key_positions(block_tables, k.shape[3], page_stride, page_offset)[seq]
    return _attend(q, k, v, position, key, scale=scale, soft_cap=soft_cap, k_scale=k_scale, v_scale=k_scale)


def _locate(
    tokens: int, context_lens: Int[Array, "seqs"], query_starts: Int[Array, "seqs_plus_1"]
) -> tuple[Int[Array, "tokens"], Int[Array, "tokens"]]:
    """Each token's sequence and its position in it; 0 and -1 for padding."""
    token = jnp.arange(tokens)
    is_real = token < query_starts[-1]
    seq = jnp.where(is_real, jnp.searchsorted(query_starts, token, side="right") - 1, 0)
    context = jnp.where(is_real, context_lens[seq], 0)
    return seq, jnp.where(context > 0, context - (query_starts[seq + 1] - token), -1)


def _key_positions(
    block_tables: Int[Array, "seqs max_pages"], page_size: int, page_stride: int, page_offset: Int[Array, "seqs"] | None
) -> Int[Array, "seqs keys"]:
    """The positions of the keys that a sequence's block table leads to."""
    seqs, pages = block_tables.shape
    page = jnp.arange(pages) * page_stride + (0 if page_offset is None else page_offset[:, None])  # [seqs or 1, pages]
    key = page[..., None] * page_size + jnp.arange(page_size)
    return jnp.broadcast_to(key, (seqs, pages, page_size)).reshape(seqs, -1)


def _attend(
    q: Float[Array, "tokens heads key_dim"],
    k: Num[Array, "tokens max_pages kv_heads page_size key_dim"],
    v: Num[Array, "tokens max_pages kv_heads page_size value_dim"],
    position: Int[Array, "tokens"],
    key: Int[Array, "tokens keys"],
    *,
    scale: float,
    soft_cap: float | None,
    k_scale: Scale | None,
    v_scale: Scale | None,
    window: int | Int[Array, ""] | None = None,
    sinks: Float[Array, "heads"] | None = None,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"]]:
    """Attention of each token, at its position, over the pages of its sequence, whose keys stand at those of `key`."""
    tokens, heads, _ = q.shape
    kv_heads = k.shape[2]
    visible = key <= position[:, None]  # [tokens, keys]
    if window is not None:
        visible &= key > position[:, None] - window

    def in_a_row(x: Num[Array, "tokens max_pages kv_heads page_size dim"], x_scale: Scale | None) -> Array:
        """[tokens, kv_heads, keys, dim] in float32; slots that no token sees may hold NaN and are cleared."""
        x = jnp.moveaxis(x.astype(jnp.float32), 2, 1).reshape(tokens, kv_heads, key.shape[1], -1)
        x = jnp.where(visible[:, None, :, None], x, 0)
        return x if x_scale is None else x * x_scale

    exact = jax.lax.Precision.HIGHEST
    grouped = q.astype(jnp.float32).reshape(tokens, kv_heads, heads // kv_heads, -1)
    logits = jnp.einsum("thgd,thkd->thgk", grouped, in_a_row(k, k_scale), precision=exact) * scale
    logits = logits.reshape(tokens, heads, -1)  # [tokens, heads, keys]
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(visible[:, None, :], logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)  # [tokens, heads]
    if sinks is not None:
        lse = jnp.where(position[:, None] >= 0, jnp.logaddexp(lse, sinks.astype(jnp.float32)), -jnp.inf)
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
    weights = weights.reshape(tokens, kv_heads, heads // kv_heads, -1)
    out = jnp.einsum("thgk,thkd->thgd", weights, in_a_row(v, v_scale), precision=exact)
    return out.reshape(tokens, heads, -1).astype(q.dtype), lse
