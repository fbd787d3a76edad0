"""Paged attention on TPU, in Pallas: arranges a ragged batch into the tiles that `mosaic_tpu_kernel` computes.

Sequences with one query token are tiles of their own, in descending order of context, so that those computed side by side
are of like length. The tokens of longer queries stay where they are: they are cut into blocks of about `query_rows` rows,
and a tile is what one sequence has of one block. A block that several sequences share is several tiles, each of which
writes its own rows. A batch that mixes both kinds is two calls of the kernel; `max_query_len=1` leaves out the second.

Block sizes are tuned (`tuning.py`). Of decodes: block_keys of a tile's block, at most; chains, of 8 rows: tiles times heads
that are computed side by side. Of longer queries: query_rows of a tile and KV head; query_keys that these are computed with
at a time; turn, units of the pipeline in a turn, at most. Of both: slots, blocks in VMEM; a pipeline uses two at a time.

On CPU the kernel is simulated, slowly: its copies, semaphores and memories as on the chip.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice
from jaxtyping import Array, Float, Float32, Int, Num

from paxserve.pallas_kernels.layout import MLASizes, Scale, Sizes, load, split_kv
from paxserve.pallas_kernels.mosaic_tpu_kernel import (
    LANES,
    TABLE_ROW,
    Shape,
    Work,
    attend,
    cores_per_device,
    entries,
)
from paxserve.pallas_kernels.mosaic_tpu_mla import mla_paged_attention
from paxserve.pallas_kernels.target import target
from paxserve.pallas_kernels.tuning import block_sizes
from paxserve.pallas_kernels.xla import Window, finish

__all__ = ["mla_paged_attention", "paged_attention", "why_not"]

DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "uint16")
"""Of queries and pages; uint16 is how bfloat16 pages are stored on CPU."""

SLOTS_BYTES = 32 * 2**20  # of VMEM for blocks, at most
STATE_BYTES = 12 * 2**20  # of VMEM for a tile's queries, output and softmax, about


def why_not(device: AbstractDevice, dtypes: tuple[jax.typing.DTypeLike, ...], sizes: Sizes) -> str | None:
    """Why attention of these dtypes and sizes cannot be computed on a device; None if it can."""
    if device.platform not in ("tpu", "cpu"):
        return f"it runs on TPU and is simulated on CPU, it does not run on {device.platform}"
    for dtype in dtypes:
        if jnp.dtype(dtype).name not in DTYPES:
            return f"it does not read {jnp.dtype(dtype).name}"
    rows = 32 // jnp.dtype(dtypes[-1]).itemsize  # of a memory tile, which copies cannot cut
    if isinstance(sizes, MLASizes):
        rows = 16  # pairs of tokens in 8 rows
    if sizes.page_size % rows:
        return f"{jnp.dtype(dtypes[-1]).name} pages must hold a multiple of {rows} tokens, not {sizes.page_size}"
    return None


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
    """See `paxserve.pallas_kernels.paged_attention`. Stacked pages, a CPU's, are laid side by side first."""
    tokens, heads, head_dim = q.shape
    kv_pages = load(kv_pages)
    if kv_pages.shape[-1] == head_dim:
        kv_pages = jnp.concatenate(split_kv(kv_pages, head_dim), axis=-1)
    _, kv_heads, page_size, width = kv_pages.shape
    if window is not None:
        window = jnp.minimum(window, block_tables.shape[1] * page_size * page_stride).astype(jnp.int32)
    has_whole_lanes = head_dim % LANES == 0

    def compute(shape: Shape, rows: Float[Array, "tiles kv_heads rows head_dim"], work: Work) -> tuple[Array, Array]:
        rows = rows if has_whole_lanes else jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, width - head_dim)))
        out, lse = attend(
            rows,
            kv_pages,
            block_tables.astype(jnp.int32),
            work,
            shape=shape,
            scale=jnp.float32(scale if k_scale is None else scale * k_scale),
            window=window,
            soft_cap=soft_cap,
            cores=cores_per_device(),
            interpret=False if pltpu.is_tpu_device() else pltpu.InterpretParams(),
        )
        return out[: len(rows), ..., -head_dim:], lse[: len(rows), ..., 0]

    pages = Pages(
        page_size,
        block_tables.shape[1],
        -(-width // LANES) * LANES * kv_pages.dtype.itemsize,
        page_stride,
        jnp.zeros_like(context_lens) if page_offset is None else page_offset * page_size,
    )
    batch = context_lens.astype(jnp.int32), query_starts.astype(jnp.int32), window, pages
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    out, lse = jnp.zeros_like(q), jnp.full((tokens, heads), -jnp.inf)
    tuned = functools.partial(
        block_sizes,
        device_kind=target().device_kind,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        itemsize=kv_pages.dtype.itemsize,
    )
    if max_query_len != 1:
        out, lse = _prefill(compute, grouped, *batch, tuned("mosaic_tpu prefill"))
    row, row_out, row_lse = _decode(compute, grouped, *batch, tuned("mosaic_tpu decode"))
    out, lse = out.at[row].set(row_out, mode="drop"), lse.at[row].set(row_lse, mode="drop")
    out, lse = finish(out.astype(jnp.float32), lse, v_scale, sinks)
    return out.astype(q.dtype), lse


@dataclass(frozen=True)
class Pages:
    """What the arrangement depends on: sizes, the widths of tables and of a token's row, and which pages are there.

    origins: where the first of a sequence's own pages begins, from which its keys are counted.
    """

    page_size: int
    max_pages: int
    row_bytes: int
    stride: int
    origins: Int[Array, "seqs"]

    def block_pages(self, most_keys: int, key_bytes: int, slots: int) -> int:
        """Pages of a block of the tiles of a step, whose keys and values take `key_bytes` of VMEM per position."""
        keys = min(most_keys, SLOTS_BYTES // (slots * key_bytes))
        return _power_of_two(max(min(keys // self.page_size, TABLE_ROW, 2 * self.max_pages - 1), 1))


def _decode(
    compute: Any,
    q: Float[Array, "tokens kv_heads group head_dim"],
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    window: Window,
    pages: Pages,
    sizes: dict[str, int],
) -> tuple[Int[Array, "tiles"], Float[Array, "tiles heads head_dim"], Float32[Array, "tiles heads"]]:
    """Output and log-sum-exp of the sequences with one query token, and which tokens these are; past the last if none."""
    tokens, kv_heads, group, head_dim = q.shape
    rows = -(-group // 8) * 8
    key_bytes = kv_heads * pages.row_bytes
    # Of more tiles the blocks were shorter.
    fitting = max(SLOTS_BYTES // (sizes["slots"] * sizes["block_keys"] * key_bytes), 1)
    chains = max(sizes["chains"] * 8 // rows, 1)
    heads, tiles = _side_by_side(kv_heads, min(fitting, len(context_lens)), chains)
    block_pages = pages.block_pages(sizes["block_keys"], tiles * key_bytes, sizes["slots"])
    shape = Shape(rows, rows, tiles, heads, block_pages, block_pages * pages.page_size, sizes["slots"], pages.stride)

    end = jnp.where(jnp.diff(query_starts) == 1, context_lens - pages.origins, 0)
    first = jnp.zeros_like(end) if window is None else jnp.maximum(end - window, 0)
    first_entry, end_entry = entries(first, end, pages.page_size, pages.stride)
    end = jnp.where(end_entry > first_entry, end, 0)  # without keys here it is no work
    end, first = (jnp.pad(x, (0, -len(x) % tiles)) for x in (end, first))
    seq = jnp.argsort(-end).astype(jnp.int32)
    end, first = end[seq], first[seq]
    work = Work(
        seq=jnp.where(end > 0, seq, 0),
        position=end - 1,
        first_key=first,
        end_key=end,
        first_row=jnp.zeros_like(seq),
        end_row=jnp.full_like(seq, rows),
        query_block=jnp.arange(len(seq) // tiles, dtype=jnp.int32),
        steps=-(-jnp.sum(end > 0) // tiles),
    )
    token = query_starts[work.seq]
    out, lse = compute(shape, jnp.pad(q[token], ((0, 0), (0, 0), (0, rows - group), (0, 0))), work)
    out = out[:, :, :group].reshape(len(seq), kv_heads * group, head_dim)
    return jnp.where(end > 0, token, tokens), out, lse[:, :, :group].reshape(len(seq), kv_heads * group)


def _prefill(
    compute: Any,
    q: Float[Array, "tokens kv_heads group head_dim"],
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    window: Window,
    pages: Pages,
    sizes: dict[str, int],
) -> tuple[Float[Array, "tokens heads head_dim"], Float32[Array, "tokens heads"]]:
    """Output and log-sum-exp of the sequences with two or more query tokens; 0 and -inf for the others' tokens."""
    tokens, kv_heads, group, head_dim = q.shape
    most_rows = min(sizes["query_rows"], STATE_BYTES // (kv_heads * (2 * pages.row_bytes + 4 * head_dim + 16 * LANES)))
    block = min(max(most_rows // group // 16, 1), -(-tokens // 16)) * 16  # of tokens
    blocks, rows = -(-tokens // block), block * group
    # An even number of units, so that their buffers alternate: an odd number of KV heads needs two pieces.
    pieces = 1 + kv_heads % 2
    block_pages = max(
        pages.block_pages(pieces * sizes["query_keys"], kv_heads * pages.row_bytes, sizes["slots"]), pieces
    )
    keys = block_pages * pages.page_size // pieces
    turn = max(n for n in range(2, sizes["turn"] + 1, 2) if kv_heads * pieces % n == 0)
    shape = Shape(rows, group, 1, 1, block_pages, keys, sizes["slots"], pages.stride, turn)

    starts, ends = query_starts[:-1], query_starts[1:]
    is_long = (ends - starts > 1) & (context_lens > 0)
    first_block = starts // block
    seq_tiles = jnp.where(is_long, -(-ends // block) - first_block, 0)
    tile_ends = jnp.cumsum(seq_tiles)
    tile = jnp.arange(blocks + min(len(starts), tokens // 2), dtype=jnp.int32)
    seq = jnp.minimum(
        jnp.searchsorted(tile_ends, tile, side="right", method="compare_all").astype(jnp.int32), len(starts) - 1
    )
    query_block = first_block[seq] + tile - (tile_ends - seq_tiles)[seq]
    first_token, context = query_block * block, (context_lens - pages.origins)[seq]
    position = context - ends[seq] + first_token
    first_position = jnp.maximum(position, context - (ends - starts)[seq])
    is_tile = tile < tile_ends[-1]
    work = Work(
        seq=seq,
        position=position,
        first_key=jnp.zeros_like(seq) if window is None else jnp.maximum(first_position - window + 1, 0),
        end_key=jnp.where(is_tile, jnp.minimum(position + block, context), 0),
        first_row=(starts[seq] - first_token) * group,
        end_row=(ends[seq] - first_token) * group,
        query_block=jnp.where(is_tile, query_block, 0),
        steps=tile_ends[-1],
    )
    padded = jnp.pad(q, ((0, blocks * block - tokens), (0, 0), (0, 0), (0, 0)))
    out, lse = compute(
        shape,
        padded.reshape(blocks, block, kv_heads, group, head_dim).swapaxes(1, 2).reshape(blocks, kv_heads, rows, -1),
        work,
    )

    def by_token(x: Array) -> Array:
        x = x.reshape(blocks, kv_heads, block, group, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(blocks * block, kv_heads * group, *x.shape[4:])[:tokens]

    token = jnp.arange(tokens)
    owner = jnp.clip(jnp.searchsorted(query_starts, token, side="right", method="compare_all") - 1, 0, len(starts) - 1)
    is_written = is_long[owner] & (token < ends[-1])
    return (
        jnp.where(is_written[:, None, None], by_token(out), 0),
        jnp.where(is_written[:, None], by_token(lse), -jnp.inf),
    )


def _power_of_two(most: int) -> int:
    return 2 ** (most.bit_length() - 1)


def _side_by_side(kv_heads: int, most_tiles: int, chains: int) -> tuple[int, int]:
    """Heads and tiles whose product is nearest to `chains`, not above it; of equals those with more heads."""
    divisors = (n for n in range(1, chains + 1) if kv_heads % n == 0)
    return max(((n, min(chains // n, most_tiles)) for n in divisors), key=lambda each: (each[0] * each[1], each[0]))
