"""Paged attention for any device: chunks of pages, an online softmax (arXiv:1805.02867), never the whole gathered cache.

Sequences with one query token are computed in lanes of sequences with like contexts, longer queries in tiles of one
sequence; lanes and tiles are taken one after the other in loops with dynamic trip counts. Either way the cost follows the
contexts that are there, not the width of the block tables or of the pool.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Num

from paxserve.pallas_kernels.layout import (
    PAIR_ROWS,
    Scale,
    keys_before,
    latent_page_size,
    latent_rows,
    load,
    page_size_of,
)

LANE = 8  # sequences with one query token that are computed together: each waits for the longest of its lane
QUERY_TILE = 64  # query tokens of one sequence that are computed together
CHUNK_BYTES = 2**22  # of gathered pages, at most: two cores' L2 caches keep them between the two dots
CHUNK_KEYS = 256  # at most, so that short contexts do not pay for long chunks
FEW_ROWS = 32  # query rows per KV head up to which reading K and V outweighs arithmetic

Window = int | Int[Array, ""] | None
Partial = tuple[Float32[Array, "... heads value_dim"], Float32[Array, "... heads"]]  # output and log-sum-exp
Attend = Callable[[Array, Array, Array, Array], Partial]  # of queries, block tables, page offsets and positions


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    kv_pages: Num[Array, "pages kv_heads slots width"],
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
    page_stride: int,
    page_offset: Int[Array, "seqs"] | None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float32[Array, "tokens heads"]]:
    """See `paxserve.pallas_kernels.paged_attention`."""
    head_dim = q.shape[-1]
    values = None if kv_pages.shape[-1] == head_dim else slice(head_dim, 2 * head_dim)

    def attend(q: Array, tables: Array, offset: Array, position: Array) -> Partial:
        logit_scale = scale if k_scale is None else scale * k_scale
        return _attend(
            q,
            kv_pages,
            tables,
            offset,
            position,
            page_size=page_size_of(kv_pages, head_dim),
            page_stride=page_stride,
            values=values,
            scale=logit_scale,
            window=window,
            soft_cap=soft_cap,
        )

    out, lse = _ragged(attend, q, block_tables, page_offset, context_lens, query_starts, head_dim, max_query_len)
    out, lse = finish(out, lse, v_scale, sinks)
    return out.astype(q.dtype), lse


def finish(
    out: Float32[Array, "tokens heads head_dim"],
    lse: Float32[Array, "tokens heads"],
    v_scale: Scale | None,
    sinks: Float[Array, "heads"] | None,
) -> Partial:
    """Output and log-sum-exp over what the pages hold, with the scale of V and the sinks' logits taken into account."""
    if v_scale is not None:
        out *= v_scale
    if sinks is not None:
        with_sink = jnp.where(jnp.isneginf(lse), lse, jnp.logaddexp(lse, sinks.astype(jnp.float32)))
        out *= jnp.exp(lse - jnp.where(jnp.isneginf(lse), 0, with_sink))[..., None]
        lse = with_sink
    return out, lse


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
) -> tuple[Float[Array, "tokens heads kv_lora_rank"], Float32[Array, "tokens heads"]]:
    """See `paxserve.pallas_kernels.mla_paged_attention`: one KV head whose K is a whole row and whose V is its latent."""
    rank = q_latent.shape[-1]
    page_size = latent_page_size(latent_pages, rank + q_rope.shape[-1])

    def attend(q: Array, tables: Array, offset: Array, position: Array) -> Partial:
        return _attend(
            q,
            latent_pages.reshape(len(latent_pages), 1, -1, latent_pages.shape[-1]),
            tables,
            offset,
            position,
            page_size=page_size,
            page_stride=page_stride,
            values=slice(0, rank),
            pair_rank=None if latent_pages.ndim == 3 else rank,
            scale=scale if k_scale is None else scale * k_scale,
            window=None,
            soft_cap=soft_cap,
        )

    q = jnp.concatenate([q_latent, q_rope], axis=-1)
    out, lse = _ragged(attend, q, block_tables, page_offset, context_lens, query_starts, rank, max_query_len)
    if k_scale is not None:
        out *= k_scale
    return out.astype(q.dtype), lse


def _ragged(
    attend: Attend,
    q: Float[Array, "tokens heads key_dim"],
    block_tables: Int[Array, "seqs max_pages"],
    page_offset: Int[Array, "seqs"] | None,
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    value_dim: int,
    max_query_len: int | None,
) -> Partial:
    """Output [tokens, heads, value_dim] and lse of ragged queries: single ones in lanes, the others in tiles."""
    tokens, heads, _ = q.shape
    page_offset = jnp.zeros(len(block_tables), jnp.int32) if page_offset is None else page_offset
    starts, query_lens = query_starts[:-1], jnp.diff(query_starts)
    is_single = (query_lens == 1) & (context_lens > 0)
    row = jnp.where(is_single, starts, 0)
    position = jnp.where(is_single, context_lens - 1, -1)
    row_out, row_lse = _singles(attend, q[row], block_tables, page_offset, position, value_dim)

    out, lse = _nothing(tokens, heads, value_dim)
    if max_query_len != 1:
        out, lse = _tiles(attend, q, block_tables, page_offset, context_lens, query_starts, value_dim)
    row = jnp.where(is_single, starts, tokens)
    return out.at[row].set(row_out, mode="drop"), lse.at[row].set(row_lse, mode="drop")


def _nothing(tokens: int, heads: int, value_dim: int) -> Partial:
    """What padding tokens get."""
    return jnp.zeros((tokens, heads, value_dim), jnp.float32), jnp.full((tokens, heads), -jnp.inf)


def _singles(
    attend: Attend,
    q: Float[Array, "seqs heads key_dim"],
    block_tables: Int[Array, "seqs max_pages"],
    page_offset: Int[Array, "seqs"],
    position: Int[Array, "seqs"],
    value_dim: int,
) -> Partial:
    """Output and lse of one query per sequence, in lanes of sequences with contexts of like length; -1 is padding."""
    seqs, heads, _ = q.shape
    lane_size = LANE if seqs % LANE == 0 else seqs
    order = jnp.argsort(position)

    def one_lane(i: Array, carry: Partial) -> Partial:
        out, lse = carry
        lane = jax.lax.dynamic_slice_in_dim(order, i * lane_size, lane_size)
        lane_out, lane_lse = attend(q[lane][:, None], block_tables[lane], page_offset[lane], position[lane][:, None])
        return out.at[lane].set(lane_out[:, 0]), lse.at[lane].set(lane_lse[:, 0])

    first_lane = jnp.sum(position < 0) // lane_size
    return jax.lax.fori_loop(first_lane, seqs // lane_size, one_lane, _nothing(seqs, heads, value_dim))


def _tiles(
    attend: Attend,
    q: Float[Array, "tokens heads key_dim"],
    block_tables: Int[Array, "seqs max_pages"],
    page_offset: Int[Array, "seqs"],
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    value_dim: int,
) -> Partial:
    """Output and lse of the sequences with two or more query tokens; 0 and -inf for the others' tokens."""
    tokens, heads, _ = q.shape
    tile = min(QUERY_TILE, tokens)
    query_lens = jnp.diff(query_starts)
    seq_tiles = jnp.where((query_lens > 1) & (context_lens > 0), -(-query_lens // tile), 0)
    tile_ends = jnp.cumsum(seq_tiles)
    # The last tile may reach past its sequence: its spare rows hold 0 and -inf, and tiles go in token order, so they
    # overwrite nothing; one tile of padding lets the slices reach past the last token.
    q = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))

    def one_tile(i: Array, carry: Partial) -> Partial:
        out, lse = carry
        seq = jnp.searchsorted(tile_ends, i, side="right", method="compare_all")
        first = query_starts[seq] + (i - tile_ends[seq] + seq_tiles[seq]) * tile
        token = first + jnp.arange(tile)
        end = query_starts[seq + 1]
        position = jnp.where(token < end, context_lens[seq] - end + token, -1)
        rows = jax.lax.dynamic_slice_in_dim(q, first, tile)
        tile_out, tile_lse = attend(rows[None], block_tables[seq][None], page_offset[seq][None], position[None])
        out = jax.lax.dynamic_update_slice_in_dim(out, tile_out[0], first, 0)
        return out, jax.lax.dynamic_update_slice_in_dim(lse, tile_lse[0], first, 0)

    out, lse = jax.lax.fori_loop(0, tile_ends[-1], one_tile, _nothing(tokens + tile, heads, value_dim))
    return out[:tokens], lse[:tokens]


def _attend(
    q: Float[Array, "seqs queries heads key_dim"],
    kv_pages: Num[Array, "pages kv_heads slots width"],
    tables: Int[Array, "seqs max_pages"],
    page_offset: Int[Array, "seqs"],
    position: Int[Array, "seqs queries"],
    *,
    page_size: int,
    page_stride: int,
    values: slice | None,
    scale: Scale,
    window: Window,
    soft_cap: float | None,
    pair_rank: int | None = None,
) -> Partial:
    """Attention of queries at `position`, ascending in each sequence, -1 for padding, which gets 0 and -inf.

    values: where V lies in a token's stored row, which begins with its K; None if the pages are stacked.
    pair_rank: kv_lora_rank if the pages are paired latents.
    """
    seqs, queries, heads, key_dim = q.shape
    kv_heads, _, width = kv_pages.shape[1:]
    width = width if pair_rank is None else key_dim
    group = heads // kv_heads
    rows = queries * group
    few_rows = rows <= FEW_ROWS
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def dot(spec: str, a: Array, b: Array) -> Float32[Array, "..."]:
        return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)

    q = q.reshape(seqs, queries, kv_heads, group, key_dim).swapaxes(1, 2).reshape(seqs * kv_heads, rows, key_dim)
    whole_rows = few_rows and values is not None
    if whole_rows:
        # Rows are used as they lie in the pages, a slice would copy them: zeros in q leave out what is not K, and of
        # the output only the columns of V are kept.
        q = jnp.pad(q, ((0, 0), (0, 0), (0, width - key_dim)))

    # From here on keys are counted in the order of the block table.
    end = keys_before(position + 1, page_size, page_stride, page_offset[:, None])  # [seqs, queries]
    start = jnp.zeros_like(end)
    if window is not None:
        start = keys_before(jnp.maximum(position - window + 1, 0), page_size, page_stride, page_offset[:, None])
    first, last = jnp.repeat(start, group, axis=1), jnp.repeat(end, group, axis=1) - 1  # [seqs, rows]
    end_key = end.max(1, keepdims=True)
    end_page = -(-end_key[:, 0] // page_size)  # [seqs]
    first_page = jnp.where(position < 0, jnp.iinfo(jnp.int32).max, start).min(1) // page_size
    key_bytes = seqs * math.prod(kv_pages.shape[1:]) // page_size * kv_pages.dtype.itemsize
    chunk_keys = CHUNK_KEYS
    while chunk_keys > 1 and chunk_keys * key_bytes > CHUNK_BYTES:
        chunk_keys //= 2
    chunk_pages = min(max(chunk_keys // page_size, 1), tables.shape[1])
    chunks = -(-jnp.maximum(end_page - first_page, 0).max() // chunk_pages)

    def locate(i: Array) -> tuple[Array, Array, Array]:
        """The pages of chunk i [seqs, chunk_pages], their keys' numbers, and which of these exist [seqs, keys]."""
        page = first_page[:, None] + i * chunk_pages + jnp.arange(chunk_pages)
        ids = jnp.take_along_axis(tables, page, axis=1, mode="clip")
        key = (page[:, :, None] * page_size + jnp.arange(page_size)).reshape(seqs, -1)
        return jnp.where(page < end_page[:, None], ids, 0), key, key < end_key

    def one_chunk(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        top, total, acc, ids, key, exists = carry
        visible = (key[:, None] >= first[..., None]) & (key[:, None] <= last[..., None])  # [seqs, rows, keys]
        visible = jnp.repeat(visible, kv_heads, axis=0)
        keep = jnp.repeat(exists, kv_heads, axis=0)
        if values is not None:
            stored = _gather(kv_pages, ids)
            if pair_rank is not None:
                groups = stored.reshape(seqs, -1, PAIR_ROWS, stored.shape[-1])
                stored = latent_rows(groups, pair_rank, key_dim - pair_rank)
            kv = _clear(stored, keep).astype(q.dtype)
            k, v = (kv, kv) if whole_rows else (kv[..., :key_dim], kv[..., values])
        else:
            halves = kv_pages.reshape(-1, 2 * kv_heads, page_size, width)  # of each head K, then V
            k = load(_gather(halves, ids, 0)).astype(q.dtype)
            v = _clear(_gather(halves, ids, 1), keep).astype(q.dtype)
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
        # Carried, the next chunk's pages are in memory: XLA:CPU would look them up for every value that it gathers.
        return new_top, total * fade + weights.sum(-1), acc, *locate(i + 1)

    top = jnp.full(q.shape[:2], jnp.finfo(jnp.float32).min)
    acc = jnp.zeros((*q.shape[:2], width if whole_rows or values is None else values.stop - values.start), jnp.float32)
    carry = top, jnp.zeros_like(top), acc, *locate(jnp.int32(0))
    top, total, acc, *_ = jax.lax.fori_loop(0, chunks, one_chunk, carry)
    if whole_rows:
        acc = acc[..., values]
    out = acc / jnp.where(total > 0, total, 1)[..., None]
    lse = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)

    def by_query(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
        x = x.reshape(seqs, kv_heads, queries, group, *x.shape[2:]).swapaxes(1, 2)
        return x.reshape(seqs, queries, heads, *x.shape[4:])

    return by_query(out), by_query(lse)


def _gather(
    pages: Num[Array, "pages heads page_size width"], ids: Int[Array, "seqs chunk_pages"], half: int | None = None
) -> Num[Array, "seqs_x_kv_heads keys width"]:
    """The pages `ids` with one KV head's keys in a row, as stored.

    half: of pages whose heads are K, V, K, V and so on, 0 for the Ks and 1 for the Vs.
    """
    _, heads, page_size, width = pages.shape
    head = jnp.arange(heads) if half is None else jnp.arange(half, heads, 2)
    row = ids[:, None, :] * heads + head[:, None]  # [seqs, kv_heads, chunk_pages]
    stored = pages.reshape(-1, page_size, width).at[row.reshape(-1)].get(mode="promise_in_bounds")
    return stored.reshape(ids.shape[0] * len(head), -1, width)


def _clear(
    stored: Num[Array, "seqs_x_kv_heads keys width"], keep: Bool[Array, "seqs_x_kv_heads keys"]
) -> Num[Array, "seqs_x_kv_heads keys width"]:
    """The values, 0 where `keep` is false: what lies there may be NaN, and NaN times a weight of 0 is NaN."""
    return load(jnp.where(keep[..., None], stored, jnp.zeros((), stored.dtype)))
