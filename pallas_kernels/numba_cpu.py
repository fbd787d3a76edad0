"""Paged attention for CPUs, in Python that Numba compiles: pages are read where they lie, nothing is gathered.

An item of work is one KV head of one query tile: a decode's single token, or some tokens of a prefill, with all the query
heads that share the KV head. Keys are taken in blocks with an online softmax (arXiv:1805.02867), in float32 throughout.
"""

import inspect
import math
import threading
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice
from jaxtyping import Array, Float, Int, Num
from numba import cfunc, types

from paxserve.pallas_kernels import numba_ffi, numba_math
from paxserve.pallas_kernels.layout import Scale, Sizes, latent_rows, page_size_of
from paxserve.pallas_kernels.numba_ffi import FRAME_ARGS, data, dim, load_word
from paxserve.pallas_kernels.numba_math import (
    FAST,
    ROWS,
    VECTOR,
    as_float,
    capped,
    dot,
    exp,
    float_at,
    inlined,
    multiply_add,
    prefetch,
    rounded,
)

TILE_ROWS = 96  # query rows (tokens x heads of the group) of a tile at most: with a block's logits they fit an L1 cache
TILE_BLOCK = 64  # keys that a tile takes at a time
FEW_ROWS = 8  # up to which rows are not worth a tile
ROW_BLOCK = 256  # keys that they take at a time
CACHE_LINE = 64  # bytes
NO_WINDOW = 2**30
LOWEST = np.float32(np.finfo(np.float32).min)  # the logit of a key that is not seen
START = np.float32(-1e30)  # the running maximum before any key: above LOWEST, so that unseen keys weigh nothing

DTYPES = {"float32": np.float32, "bfloat16": np.uint16, "uint16": np.uint16, "int8": np.int8}
"""The dtypes of q and of pages that this can read, and as what; bfloat16 is read by its bits."""


@inlined
def attend_rows(
    query: np.ndarray,
    kv: np.ndarray,
    page_rows: np.ndarray,
    page_size: int,
    value_row: int,
    value_column: int,
    first: int,
    last: int,
    cap: float,
    logits: np.ndarray,
    top: np.ndarray,
    total: np.ndarray,
    acc: np.ndarray,
) -> None:
    """Goes over keys first .. last for a few query rows.

    query [rows, key_dim] float32; kv [pages * kv_heads, slots, width]; page_rows: the first axis' index of each page of the
    sequence; values start at value_row, value_column of what a page holds. logits [rows, ROW_BLOCK] is scratch; top and
    total [rows] and acc [rows, value_dim] are the online softmax.
    """
    rows, key_dim = query.shape
    value_dim, page_width, size, like, one = acc.shape[1], kv.shape[2], kv.itemsize, kv[0, 0, 0], np.float32(1.0)
    vector_keys, vector_values = key_dim // VECTOR * VECTOR, value_dim // ROWS * ROWS
    key = first
    while key <= last:
        stop = min(key + ROW_BLOCK, last + 1)
        n = stop - key
        at = key
        while at < stop:
            end = min(at - at % page_size + page_size, stop)
            k = kv[page_rows[at // page_size]].ctypes.data + size * page_width * (at % page_size)
            following = kv[page_rows[min(end, last) // page_size]].ctypes.data
            per_key = kv[0].nbytes // page_size
            for i in range(at - key, end - key):
                for line in range(0, per_key, CACHE_LINE):
                    prefetch(following + line)
                following += per_key
                for r in range(rows):
                    x = np.float32(0.0)
                    if vector_keys:
                        x = dot(query[r].ctypes.data, k, vector_keys, like)
                    for d in range(vector_keys, key_dim):
                        x += query[r, d] * float_at(k, d, like)
                    logits[r, i] = x
                k += size * page_width
            at = end

        for r in range(rows):
            if cap > np.float32(0.0):
                for i in range(n):
                    logits[r, i] = capped(logits[r, i], cap)
            new_top = top[r]
            for i in range(n):
                new_top = max(new_top, logits[r, i])
            fade, weight = exp(top[r] - new_top), np.float32(0.0)
            for i in range(n):
                x = exp(logits[r, i] - new_top)
                logits[r, i] = x
                weight += x
            top[r], total[r] = new_top, total[r] * fade + weight
            for d in range(value_dim):
                acc[r, d] *= fade

        at = key
        while at < stop:
            end = min(at - at % page_size + page_size, stop)
            v = kv[page_rows[at // page_size]].ctypes.data
            v += size * (page_width * (value_row + at % page_size) + value_column)
            weights = logits[:, at - key :]
            multiply_add(
                acc, rows, vector_values, weights.ctypes.data, ROW_BLOCK, 1, v, page_width, end - at, one, like
            )
            for i in range(end - at):
                for r in range(rows):
                    for d in range(vector_values, value_dim):
                        acc[r, d] += weights[r, i] * float_at(v, i * page_width + d, like)
            at = end
        key = stop


@inlined
def attend_tile(
    query: np.ndarray,
    kv: np.ndarray,
    page_rows: np.ndarray,
    page_size: int,
    value_row: int,
    value_column: int,
    first: np.ndarray,
    last: np.ndarray,
    cap: float,
    logits: np.ndarray,
    fade: np.ndarray,
    top: np.ndarray,
    total: np.ndarray,
    acc: np.ndarray,
) -> None:
    """Goes over keys first[0] .. last[-1] for many query rows, each of which sees first .. last, both ascending.

    Everything is transposed, so that all arithmetic is on vectors of rows: query [key_dim, rows], logits [TILE_BLOCK, rows],
    acc [value_dim, rows], first, last, fade, top and total [rows], where ROWS divides rows. The rest is as in `attend_rows`.
    """
    key_dim, value_dim, page_width = query.shape[0], acc.shape[0], kv.shape[2]
    size, like, one = kv.itemsize, kv[0, 0, 0], np.float32(1.0)
    rows = len(last)
    key = first[0]
    while key <= last[-1]:
        page, slot = kv[page_rows[key // page_size]].ctypes.data, key % page_size
        n = min(page_size - slot, TILE_BLOCK, last[-1] + 1 - key)
        logits[:n] = np.float32(0.0)
        k, v = page + size * page_width * slot, page + size * (page_width * (value_row + slot) + value_column)
        multiply_add(logits, n, rows, k, page_width, 1, query.ctypes.data, rows, key_dim, like, one)

        masked = key + n - 1 > last[0] or key < first[-1]
        for r in range(rows):
            fade[r] = top[r]
        for i in range(n):
            if cap > np.float32(0.0):
                for r in range(rows):
                    logits[i, r] = capped(logits[i, r], cap)
            if masked:
                k = np.int32(key + i)
                for r in range(rows):
                    seen = k <= last[r] and k >= first[r]
                    logits[i, r] = logits[i, r] if seen else LOWEST
            for r in range(rows):
                top[r] = max(top[r], logits[i, r])
        for r in range(rows):
            fade[r] = exp(fade[r] - top[r])
            total[r] *= fade[r]
        for i in range(n):
            for r in range(rows):
                x = exp(logits[i, r] - top[r])
                logits[i, r] = x
                total[r] += x

        for d in range(value_dim):
            for r in range(rows):
                acc[d, r] *= fade[r]
        multiply_add(acc, value_dim, rows, v, 1, page_width, logits.ctypes.data, rows, n, like, one)
        key += n


Q, PAGES, TABLES, CONTEXTS, STARTS, OFFSETS, INTEGERS, FLOATS, SINKS = range(9)
"""The arguments of the call. INTEGERS: window, page_size, page_stride, value_row, value_column; FLOATS: scale, soft cap."""


@inlined
def keys_before(position: int, page_size: int, page_stride: int, page_offset: int) -> int:
    """As `layout.keys_before`."""
    page = position // page_size - page_offset
    if page < 0:
        return 0
    whole = (page + page_stride - 1) // page_stride
    return whole * page_size + (position % page_size if page % page_stride == 0 else 0)


@inlined
def log_sum(top: float, total: float) -> float:
    """The log-sum-exp of an online softmax that may have met no key."""
    return top + np.float32(math.log(total)) if total > np.float32(0.0) else -np.float32(np.inf)


@inlined
def mean(weighted: float, total: float) -> float:
    return weighted / total if total > np.float32(0.0) else np.float32(0.0)


@inlined
def tokens_per_tile(group: int) -> int:
    return max(TILE_ROWS // group, 1)


def _kernel(q_dtype: Any, pages_dtype: Any) -> tuple[Any, Any]:
    """(count, work) for `numba_ffi.register`."""

    def count(frame: int) -> int:
        arguments = load_word(frame, FRAME_ARGS)
        seqs, kv_heads = dim(arguments, TABLES, 0), dim(arguments, PAGES, 1)
        starts = data(arguments, STARTS, (seqs + 1,), np.int32)
        tile = tokens_per_tile(dim(arguments, Q, 1) // kv_heads)
        tiles = 0
        for seq in range(seqs):
            tiles += (starts[seq + 1] - starts[seq] + tile - 1) // tile
        return tiles * kv_heads + 1  # and one for the padding

    def work(arguments: int, results: int, item: int) -> None:
        tokens, heads = dim(arguments, Q, 0), dim(arguments, Q, 1)
        pages, kv_heads = dim(arguments, PAGES, 0), dim(arguments, PAGES, 1)
        seqs, group = dim(arguments, TABLES, 0), heads // kv_heads
        key_dim, value_dim = dim(arguments, Q, 2), dim(results, 0, 2)
        q = data(arguments, Q, (tokens, kv_heads, group, key_dim), q_dtype)
        kv_shape = (pages * kv_heads, dim(arguments, PAGES, 2), dim(arguments, PAGES, 3))
        kv = data(arguments, PAGES, kv_shape, pages_dtype)
        tables = data(arguments, TABLES, (seqs, dim(arguments, TABLES, 1)), np.int32)
        contexts = data(arguments, CONTEXTS, (seqs,), np.int32)
        starts = data(arguments, STARTS, (seqs + 1,), np.int32)
        offsets = data(arguments, OFFSETS, (seqs,), np.int32)
        window, page_size, page_stride, value_row, value_column = data(arguments, INTEGERS, (5,), np.int32)
        scale, cap = data(arguments, FLOATS, (2,), np.float32)
        sinks = data(arguments, SINKS, (kv_heads, group), np.float32)
        out = data(results, 0, (tokens, kv_heads, group, value_dim), q_dtype)
        lse = data(results, 1, (tokens, kv_heads, group), np.float32)
        zero = rounded(np.float32(0.0), q[0, 0, 0, 0])

        if item == 0:
            out[starts[seqs] :] = zero
            lse[starts[seqs] :] = -np.inf
            return
        tile = tokens_per_tile(group)
        seq, index, head = 0, (item - 1) // kv_heads, (item - 1) % kv_heads
        while index >= (starts[seq + 1] - starts[seq] + tile - 1) // tile:
            index -= (starts[seq + 1] - starts[seq] + tile - 1) // tile
            seq += 1
        begin = starts[seq] + index * tile
        end = min(begin + tile, starts[seq + 1])
        if contexts[seq] == 0:
            out[begin:end, head] = zero
            lse[begin:end, head] = -np.inf
            return
        position = contexts[seq] - starts[seq + 1] + begin  # of the first token
        offset = offsets[seq]
        # From here on keys are counted in the order of the block table.
        first = keys_before(max(position - window + 1, 0), page_size, page_stride, offset)
        pages = (keys_before(position + end - begin, page_size, page_stride, offset) + page_size - 1) // page_size
        page_rows = np.empty(pages, np.int64)
        for page in range(first // page_size, pages):
            page_rows[page] = np.int64(tables[seq, page]) * kv_heads + head

        rows = (end - begin) * group
        if rows <= FEW_ROWS:
            query = np.empty((group, key_dim), np.float32)
            logits = np.empty((group, ROW_BLOCK), np.float32)
            top, total = np.empty(group, np.float32), np.empty(group, np.float32)
            acc = np.empty((group, value_dim), np.float32)
            for t in range(begin, end):
                for g in range(group):
                    top[g] = max(sinks[head, g], START)
                    total[g] = np.float32(1.0) if sinks[head, g] > START else np.float32(0.0)
                    for d in range(key_dim):
                        query[g, d] = as_float(q[t, head, g, d]) * scale
                acc[:] = np.float32(0.0)
                own = position + t - begin
                first = keys_before(max(own - window + 1, 0), page_size, page_stride, offset)
                last = keys_before(own + 1, page_size, page_stride, offset) - 1
                attend_rows(
                    query, kv, page_rows, page_size, value_row, value_column, first, last, cap, logits, top, total, acc
                )
                for g in range(group):
                    lse[t, head, g] = log_sum(top[g], total[g])
                    for d in range(value_dim):
                        out[t, head, g, d] = rounded(mean(acc[g, d], total[g]), zero)
        else:
            width = (rows + ROWS - 1) // ROWS * ROWS
            query = np.empty((key_dim, width), np.float32)
            logits = np.empty((TILE_BLOCK, width), np.float32)
            fades, tops, totals = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
            firsts, lasts = np.empty(width, np.int32), np.empty(width, np.int32)
            acc = np.zeros((value_dim, width), np.float32)
            for r in range(width):  # those past the last row repeat it
                t, g = min(r, rows - 1) // group, min(r, rows - 1) % group
                own = position + t
                firsts[r] = keys_before(max(own - window + 1, 0), page_size, page_stride, offset)
                lasts[r] = keys_before(own + 1, page_size, page_stride, offset) - 1
                tops[r] = max(sinks[head, g], START)
                totals[r] = np.float32(1.0) if sinks[head, g] > START else np.float32(0.0)
                for d in range(key_dim):
                    query[d, r] = as_float(q[begin + t, head, g, d]) * scale
            attend_tile(
                query, kv, page_rows, page_size, value_row, value_column, firsts, lasts, cap,
                logits, fades, tops, totals, acc,
            )  # fmt: skip
            for r in range(rows):
                t, g = begin + r // group, r % group
                lse[t, head, g] = log_sum(tops[r], totals[r])
                for d in range(value_dim):
                    out[t, head, g, d] = rounded(mean(acc[d, r], totals[r]), zero)

    # Numba finds what it has compiled before by a function's name and file alone: the name stands for all the source in it.
    source = "".join(inspect.getsource(module) for module in (numba_ffi, numba_math))
    for function in (count, work):
        function.__qualname__ += f"_{zlib.crc32(source.encode()):08x}"
    return (
        cfunc(types.intp(types.intp), cache=True)(count),
        cfunc(types.void(*[types.intp] * 3), cache=True, fastmath=FAST, error_model="numpy")(work),
    )


_targets: set[str] = set()
_compiling = threading.Lock()


def _target(q_dtype: Any, pages_dtype: Any) -> str:
    """The name of the call compiled for these dtypes."""
    name = f"paxserve_paged_attention_{q_dtype.__name__}_{pages_dtype.__name__}"
    with _compiling:
        if name not in _targets:
            numba_ffi.register(name, *_kernel(q_dtype, pages_dtype))
            _targets.add(name)
    return name


def why_not(device: AbstractDevice, dtypes: tuple[jax.typing.DTypeLike, ...], sizes: Sizes) -> str | None:
    """Why attention of these dtypes cannot be computed on a device; None if it can. All sizes can."""
    del sizes
    if device.platform != "cpu":
        return f"it runs on CPU, not on {device.platform}"
    for dtype in dtypes:
        if jnp.dtype(dtype).name not in DTYPES:
            return f"it does not read {jnp.dtype(dtype).name}"
    return None


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
    head_dim = q.shape[2]
    page_size = page_size_of(kv_pages, head_dim)
    out, lse = _attend(
        q,
        kv_pages,
        block_tables,
        context_lens,
        query_starts,
        value_dim=head_dim,
        page_size=page_size,
        page_stride=page_stride,
        page_offset=page_offset,
        values_at=(page_size, 0) if kv_pages.shape[3] == head_dim else (0, head_dim),
        window=window,
        scale=scale if k_scale is None else scale * k_scale,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    return (out if v_scale is None else (out * v_scale).astype(q.dtype)), lse


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
    """See `paxserve.pallas_kernels.mla_paged_attention`: one KV head whose K is a whole row and whose V is its latent.

    Paired pages, a TPU's, are unpaired first.
    """
    del max_query_len
    latent_pages = latent_rows(latent_pages, q_latent.shape[-1], q_rope.shape[-1])
    out, lse = _attend(
        jnp.concatenate([q_latent, q_rope], axis=-1),
        latent_pages[:, None],
        block_tables,
        context_lens,
        query_starts,
        value_dim=q_latent.shape[2],
        page_size=latent_pages.shape[1],
        page_stride=page_stride,
        page_offset=page_offset,
        values_at=(0, 0),
        window=None,
        scale=scale if k_scale is None else scale * k_scale,
        soft_cap=soft_cap,
        sinks=None,
    )
    return (out if k_scale is None else (out * k_scale).astype(q_latent.dtype)), lse


def _attend(
    q: Float[Array, "tokens heads key_dim"],
    pages: Num[Array, "pages kv_heads slots width"],
    block_tables: Int[Array, "seqs max_pages"],
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    *,
    value_dim: int,
    page_size: int,
    page_stride: int,
    page_offset: Int[Array, "seqs"] | None,
    values_at: tuple[int, int],
    window: int | Int[Array, ""] | None,
    scale: Scale,
    soft_cap: float | None,
    sinks: Float[Array, "heads"] | None,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"]]:
    """Keys are the first key_dim columns of a page's first page_size slots; values start at slot and column `values_at`."""
    tokens, heads, _ = q.shape
    target = _target(DTYPES[str(q.dtype)], DTYPES[str(pages.dtype)])
    out = jax.ShapeDtypeStruct((tokens, heads, value_dim), q.dtype)
    return jax.ffi.ffi_call(target, (out, jax.ShapeDtypeStruct((tokens, heads), jnp.float32)))(
        q,
        pages,
        block_tables,
        context_lens,
        query_starts,
        jnp.zeros(len(block_tables), jnp.int32) if page_offset is None else page_offset.astype(jnp.int32),
        jnp.array([NO_WINDOW if window is None else window, page_size, page_stride, *values_at], jnp.int32),
        jnp.array([scale, soft_cap or 0.0], jnp.float32),
        jnp.full(heads, LOWEST) if sinks is None else sinks.astype(jnp.float32),
    )
