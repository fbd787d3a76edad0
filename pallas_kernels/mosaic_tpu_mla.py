"""Paged latent attention on TPU, in Pallas: arranges a ragged batch into the tiles that `mosaic_tpu_mla_kernel` computes.

As for grouped-query attention (`mosaic_tpu`), sequences with one query token are tiles of their own, in descending order
of context, and longer queries stay where they are, cut into blocks of about `query_rows` rows: a tile is what one sequence
has of one block. All heads read the same keys, so a tile's rows are all heads of its tokens.

Block sizes are tuned (`tuning.py`). Of decodes: decodes that are computed side by side; decode_keys of a block of all of them.
Of longer queries: query_rows of a tile, at least one token's; query_keys of a block; parts of a tile's rows that are
computed side by side. Of both: slots, blocks in VMEM.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int, Num

from paxserve.pallas_kernels.layout import Scale, keys_before, latent_page_size, load, pair
from paxserve.pallas_kernels.mosaic_tpu_kernel import TABLE_ROW, Work, cores_per_device
from paxserve.pallas_kernels.mosaic_tpu_mla_kernel import Shape, attend, matrix_columns
from paxserve.pallas_kernels.target import target
from paxserve.pallas_kernels.tuning import block_sizes

Compute = Callable[[Shape, Array, Work], tuple[Array, Array]]
"""Of `Shape.rank` values per row and a log-sum-exp, from the rows of tiles, all as `attend` says."""


@dataclass(frozen=True)
class Batch:
    """What is asked of the pages: as in `paged_attention`, but that page_offset is always there. max_pages: of a table."""

    context_lens: Int[Array, "seqs"]
    query_starts: Int[Array, "seqs_plus_1"]
    page_offset: Int[Array, "seqs"]
    page_size: int
    page_stride: int
    max_pages: int

    def keys_before(self, position: Int[Array, "tiles"], seq: Int[Array, "tiles"]) -> Int[Array, "tiles"]:
        """How many keys of sequence `seq` before `position` are here."""
        return keys_before(position, self.page_size, self.page_stride, self.page_offset[seq])

    def block_pages(self, keys: int) -> int:
        """Pages of a block of about `keys` keys; blocks much longer than a block table are of no use."""
        return _power_of_two(max(min(keys // self.page_size, TABLE_ROW, 2 * self.max_pages - 1), 1))


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
    """See `paxserve.pallas_kernels.mla_paged_attention`. Pages with a row per token, a CPU's, are paired first."""
    tokens, heads, rank = q_latent.shape
    page_size = latent_page_size(latent_pages, rank + q_rope.shape[2])
    latent_pages = load(latent_pages)
    if latent_pages.ndim == 3:
        latent_pages = pair(latent_pages, rank)
    q = jnp.concatenate([q_latent, q_rope, q_rope], axis=-1)
    offset = jnp.zeros(len(block_tables), jnp.int32) if page_offset is None else page_offset
    batch = Batch(
        context_lens.astype(jnp.int32),
        query_starts.astype(jnp.int32),
        offset,
        page_size,
        page_stride,
        block_tables.shape[1],
    )

    def compute(shape: Shape, rows: Array, work: Work) -> tuple[Array, Array]:
        out, lse = attend(
            rows,
            latent_pages,
            block_tables,
            work,
            shape=shape,
            scale=jnp.float32(scale if k_scale is None else scale * k_scale),
            soft_cap=soft_cap,
            cores=cores_per_device(),
            columns=matrix_columns(shape.rows // shape.parts),
            interpret=False if pltpu.is_tpu_device() else pltpu.InterpretParams(),
        )
        return out[: len(rows)], lse[: len(rows), :, 0]

    tuned = functools.partial(
        block_sizes,
        device_kind=target().device_kind,
        heads=heads,
        kv_lora_rank=rank,
        page_size=page_size,
        itemsize=latent_pages.dtype.itemsize,
    )
    out, lse = jnp.zeros_like(q_latent), jnp.full((tokens, heads), -jnp.inf)
    if max_query_len != 1:
        out, lse = _prefill(compute, q, rank, batch, tuned("mosaic_tpu mla prefill"))
    token, token_out, token_lse = _decode(compute, q, rank, batch, tuned("mosaic_tpu mla decode"))
    out, lse = out.at[token].set(token_out, mode="drop"), lse.at[token].set(token_lse, mode="drop")
    return (out if k_scale is None else (out * k_scale).astype(out.dtype)), lse


def _decode(
    compute: Compute, q: Float[Array, "tokens heads query_dim"], rank: int, batch: Batch, sizes: dict[str, int]
) -> tuple[Int[Array, "tiles"], Float[Array, "tiles heads rank"], Float32[Array, "tiles heads"]]:
    """Output and log-sum-exp of the sequences with one query token, and which tokens these are; past the last if none."""
    tokens, heads, _ = q.shape
    seqs = len(batch.context_lens)
    rows = -(-heads // 8) * 8
    tiles = min(sizes["decodes"], seqs)
    block_pages = batch.block_pages(sizes["decode_keys"] // tiles)
    shape = Shape(rank, rows, rows, tiles, 1, block_pages, sizes["slots"], batch.page_stride)

    context = jnp.where(jnp.diff(batch.query_starts) == 1, batch.context_lens, 0)
    keys = jnp.pad(batch.keys_before(context, jnp.arange(seqs)), (0, -seqs % tiles))
    order = jnp.argsort(-keys).astype(jnp.int32)
    keys = keys[order]
    seq = jnp.where(keys > 0, order, 0)
    work = Work(
        seq=seq,
        position=context[seq] - 1 - batch.page_offset[seq] * batch.page_size,
        first_key=jnp.zeros_like(seq),
        end_key=keys,
        first_row=jnp.zeros_like(seq),
        end_row=jnp.full_like(seq, rows),
        query_block=jnp.arange(len(seq) // tiles, dtype=jnp.int32),
        steps=-(-jnp.sum(keys > 0) // tiles),
    )
    token = batch.query_starts[seq]
    out, lse = compute(shape, jnp.pad(q[token], ((0, 0), (0, rows - heads), (0, 0))), work)
    return jnp.where(keys > 0, token, tokens), out[:, :heads], lse[:, :heads]


def _prefill(
    compute: Compute, q: Float[Array, "tokens heads query_dim"], rank: int, batch: Batch, sizes: dict[str, int]
) -> tuple[Float[Array, "tokens heads rank"], Float32[Array, "tokens heads"]]:
    """Output and log-sum-exp of the sequences with two or more query tokens; 0 and -inf for the others' tokens."""
    tokens, heads, query_dim = q.shape
    parts = sizes["parts"]
    unit = 16 * parts // math.gcd(16 * parts, heads)  # of tokens, so that parts begin at memory tiles
    block = min(max(sizes["query_rows"] // heads // unit, 1), -(-tokens // unit)) * unit  # of tokens
    blocks, rows = -(-tokens // block), block * heads
    block_pages = batch.block_pages(sizes["query_keys"])
    shape = Shape(rank, rows, heads, 1, parts, block_pages, sizes["slots"], batch.page_stride)

    starts, ends = batch.query_starts[:-1], batch.query_starts[1:]
    is_long = ends - starts > 1
    # Tokens before the first that sees a key of the pages here are in no tile.
    starts = jnp.clip(ends - batch.context_lens + batch.page_offset * batch.page_size, starts, ends)
    first_block = starts // block
    seq_tiles = jnp.where(is_long & (starts < ends), -(-ends // block) - first_block, 0)
    tile_ends = jnp.cumsum(seq_tiles)
    tile = jnp.arange(blocks + min(len(starts), tokens // 2), dtype=jnp.int32)
    seq = jnp.minimum(
        jnp.searchsorted(tile_ends, tile, side="right", method="compare_all").astype(jnp.int32), len(starts) - 1
    )
    query_block = first_block[seq] + tile - (tile_ends - seq_tiles)[seq]
    first_token, context = query_block * block, batch.context_lens[seq]
    position = context - ends[seq] + first_token
    is_tile = tile < tile_ends[-1]
    work = Work(
        seq=seq,
        position=position - batch.page_offset[seq] * batch.page_size,
        first_key=jnp.zeros_like(seq),
        end_key=jnp.where(is_tile, batch.keys_before(jnp.minimum(position + block, context), seq), 0),
        first_row=(starts[seq] - first_token) * heads,
        end_row=(ends[seq] - first_token) * heads,
        query_block=jnp.where(is_tile, query_block, 0),
        steps=tile_ends[-1],
    )
    padded = jnp.pad(q, ((0, blocks * block - tokens), (0, 0), (0, 0)))
    out, lse = compute(shape, padded.reshape(blocks, rows, query_dim), work)
    out, lse = out.reshape(-1, heads, rank)[:tokens], lse.reshape(-1, heads)[:tokens]

    token = jnp.arange(tokens)
    owner = jnp.clip(
        jnp.searchsorted(batch.query_starts, token, side="right", method="compare_all") - 1, 0, len(starts) - 1
    )
    is_written = is_long[owner] & (token >= starts[owner]) & (token < ends[-1])
    return jnp.where(is_written[:, None, None], out, 0), jnp.where(is_written[:, None], lse, -jnp.inf)


def _power_of_two(most: int) -> int:
    return 2 ** (most.bit_length() - 1)
