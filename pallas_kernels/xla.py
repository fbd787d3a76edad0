"""Paged attention for any device: chunks of pages, an online softmax (arXiv:1805.02867), never the whole gathered cache.

Sequences with one query token are one batch over sequences. Longer queries are cut into tiles, taken one after the
other in a loop with a dynamic trip count. Either way the cost follows the contexts that are there, not the width of
the block tables or of the pool.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Num

from paxserve.pallas_kernels.layout import Scale, load

QUERY_TILE = 64  # query tokens of one sequence that are computed together
CHUNK_BYTES = 2**22  # of gathered pages, at most: two cores' L2 caches keep them between the two dots
CHUNK_KEYS = 256  # at most, so that short contexts do not pay for long chunks
FEW_ROWS = 32  # query rows per KV head up to which reading K and V outweighs arithmetic

Window = int | Int[Array, ""] | None
Partial = tuple[Float32[Array, "... heads head_dim"], Float32[Array, "... heads"]]  # output and log-sum-exp
Attend = Callable[[Array, Array, Array], Partial]  # of queries, block tables and positions


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    kv_pages: Num[Array, "pages kv_heads page_size two_head_dim"],
    block_tables: Int[Array, "seqs max_pages"],
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    *,
    scale: float,
    window: Window,
    soft_cap: float | None,
    sinks: Float[Array, "heads"] | None,
    k_scale: Scale | None,
    v_scale: Scale | None,
    max_query_len: int | None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float32[Array, "tokens heads"]]:
    """See `paxserve.pallas_kernels.paged_attention`."""
    tokens, heads, head_dim = q.shape
    starts, query_lens = query_starts[:-1], jnp.diff(query_starts)

    def attend(q: Array, tables: Array, position: Array) -> Partial:
        logit_scale = scale if k_scale is None else scale * k_scale
        return _attend(q, kv_pages, tables, position, scale=logit_scale, window=window, soft_cap=soft_cap)

    is_single = (query_lens == 1) & (context_lens > 0)
    row = jnp.where(is_single, starts, 0)
    position = jnp.where(is_single, context_lens - 1, -1)
    row_out, row_lse = attend(q[row][:, None], block_tables, position[:, None])

    out = jnp.zeros((tokens, heads, head_dim), jnp.float32)
    lse = jnp.full((tokens, heads), -jnp.inf)
    if max_query_len != 1:
        out, lse = _tiles(attend, q, block_tables, context_lens, query_starts)
    row = jnp.where(is_single, starts, tokens)
    out = out.at[row].set(row_out[:, 0], mode="drop")
    lse = lse.at[row].set(row_lse[:, 0], mode="drop")

    if v_scale is not None:
        out *= v_scale
    if sinks is not None:
        with_sink = jnp.where(jnp.isneginf(lse), lse, jnp.logaddexp(lse, sinks.astype(jnp.float32)))
        out *= jnp.exp(lse - jnp.where(jnp.isneginf(lse), 0, with_sink))[..., None]
        lse = with_sink
    return out.astype(q.dtype), lse


def _tiles(
    attend: Attend,
    q: Float[Array, "tokens heads head_dim"],
    block_tables: Int[Array, "seqs max_pages"],
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
) -> Partial:
    """Output and lse of the sequences with two or more query tokens; 0 and -inf for the others' tokens."""
    tokens = q.shape[0]
    tile = min(QUERY_TILE, tokens)
    query_lens = jnp.diff(query_starts)
    seq_tiles = jnp.where((query_lens > 1) & (context_lens > 0), -(-query_lens // tile), 0)
    tile_ends = jnp.cumsum(seq_tiles)
    # The last tile may reach past its sequence: its spare rows hold 0 and -inf, and tiles go in token order, so they
    # overwrite nothing; one tile of padding lets the slices reach past the last token.
    q = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))
    out = jnp.zeros(q.shape, jnp.float32)
    lse = jnp.full(q.shape[:2], -jnp.inf)

    def one_tile(i: Array, carry: Partial) -> Partial:
        out, lse = carry
        seq = jnp.searchsorted(tile_ends, i, side="right", method="compare_all")
        first = query_starts[seq] + (i - tile_ends[seq] + seq_tiles[seq]) * tile
        token = first + jnp.arange(tile)
        end = query_starts[seq + 1]
        position = jnp.where(token < end, context_lens[seq] - end + token, -1)
        rows = jax.lax.dynamic_slice_in_dim(q, first, tile)
        tile_out, tile_lse = attend(rows[None], block_tables[seq][None], position[None])
        out = jax.lax.dynamic_update_slice_in_dim(out, tile_out[0], first, 0)
        return out, jax.lax.dynamic_update_slice_in_dim(lse, tile_lse[0], first, 0)

    out, lse = jax.lax.fori_loop(0, tile_ends[-1], one_tile, (out, lse))
    return out[:tokens], lse[:tokens]


def _attend(
    q: Float[Array, "seqs queries heads head_dim"],
    kv_pages: Num[Array, "pages kv_heads page_size two_head_dim"],
    tables: Int[Array, "seqs max_pages"],
    position: Int[Array, "seqs queries"],
    *,
    scale: Scale,
    window: Window,
    soft_cap: float | None,
) -> Partial:
    """Attention of queries at `position`, ascending in each sequence, -1 for padding, which gets 0 and -inf."""
    seqs, queries, heads, head_dim = q.shape
    kv_heads, page_size = kv_pages.shape[1:3]
    group = heads // kv_heads
    rows = queries * group
    few_rows = rows <= FEW_ROWS
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def dot(spec: str, a: Array, b: Array) -> Float32[Array, "..."]:
        return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)

    q = q.reshape(seqs, queries, kv_heads, group, head_dim).swapaxes(1, 2).reshape(seqs * kv_heads, rows, head_dim)
    if few_rows:
        # A zero half in q makes K|V usable as it lies in the pages: a slice would copy it.
        q = jnp.pad(q, ((0, 0), (0, 0), (0, head_dim)))

    last = jnp.repeat(position, group, axis=1)  # [seqs, rows]
    first = jnp.zeros_like(last) if window is None else jnp.maximum(last - window + 1, 0)
    end_page = position.max(1) // page_size + 1  # [seqs]
    first_page = jnp.where(position < 0, jnp.iinfo(jnp.int32).max, first[:, ::group]).min(1) // page_size
    key_bytes = seqs * kv_heads * kv_pages.shape[3] * kv_pages.dtype.itemsize
    chunk_keys = CHUNK_KEYS
    while chunk_keys > 1 and chunk_keys * key_bytes > CHUNK_BYTES:
        chunk_keys //= 2
    chunk_pages = min(max(chunk_keys // page_size, 1), tables.shape[1])
    chunks = -(-jnp.maximum(end_page - first_page, 0).max() // chunk_pages)

    def one_chunk(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        page = first_page[:, None] + i * chunk_pages + jnp.arange(chunk_pages)  # [seqs, chunk_pages]
        ids = jnp.take_along_axis(tables, page, axis=1, mode="clip")
        ids = jnp.where(page < end_page[:, None], ids, 0)
        key = (page[:, :, None] * page_size + jnp.arange(page_size)).reshape(seqs, 1, -1)
        visible = (key >= first[..., None]) & (key <= last[..., None])  # [seqs, rows, keys]
        visible = jnp.repeat(visible, kv_heads, axis=0)
        kv = _gather(kv_pages, ids, jnp.repeat(key[:, 0] <= position.max(1, keepdims=True), kv_heads, axis=0))
        kv = kv.astype(q.dtype)
        k, v = (kv, kv) if few_rows else (kv[..., :head_dim], kv[..., head_dim:])
        if few_rows:
            # K as the left operand is read as it lies; the barrier keeps XLA from turning the dot around again.
            logits = jax.lax.optimization_barrier(dot("bkd,brd->bkr", k, q)).swapaxes(1, 2)
        else:
            logits = dot("brd,bkd->brk", q, k)
        logits *= scale
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        logits = jnp.where(visible, logits, -jnp.inf)
        new_top = jnp.maximum(top, logits.max(-1))
        weights = jnp.exp(logits - new_top[..., None])
        fade = jnp.exp(top - new_top)
        acc = acc * fade[..., None] + dot("brk,bkd->brd", weights.astype(q.dtype), v)
        return new_top, total * fade + weights.sum(-1), acc

    top = jnp.full(q.shape[:2], jnp.finfo(jnp.float32).min)
    carry = top, jnp.zeros_like(top), jnp.zeros(q.shape, jnp.float32)
    top, total, acc = jax.lax.fori_loop(0, chunks, one_chunk, carry)
    out = acc[..., -head_dim:] / jnp.where(total > 0, total, 1)[..., None]
    lse = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)

    def by_query(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
        x = x.reshape(seqs, kv_heads, queries, group, *x.shape[2:]).swapaxes(1, 2)
        return x.reshape(seqs, queries, heads, *x.shape[4:])

    return by_query(out), by_query(lse)


def _gather(
    kv_pages: Num[Array, "pages kv_heads page_size two_head_dim"],
    ids: Int[Array, "seqs chunk_pages"],
    keep: Bool[Array, "seqs_x_kv_heads keys"],
) -> Num[Array, "seqs_x_kv_heads keys two_head_dim"]:
    """The pages `ids` with one KV head's keys in a row, and 0 where `keep` is false (NaN times 0 would be NaN)."""
    _, kv_heads, page_size, width = kv_pages.shape
    row = ids[:, None, :] * kv_heads + jnp.arange(kv_heads)[:, None]  # [seqs, kv_heads, chunk_pages]
    stored = kv_pages.reshape(-1, page_size, width).at[row.reshape(-1)].get(mode="promise_in_bounds")
    stored = stored.reshape(*keep.shape, width)
    return load(jnp.where(keep[..., None], stored, jnp.zeros((), stored.dtype)))
