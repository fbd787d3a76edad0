"""Which thread block of `mosaic_gpu` computes what: the batch's work cut into one equal share per thread block.

A *tile* is up to `tile_tokens` query tokens of one sequence, an *item* one KV head of a tile, a *block* BLOCK keys of an
item. All blocks of all items, in a row, are divided evenly, wherever that cuts an item: no thread block waits for another,
whatever the contexts. An item that was cut is merged afterwards from its pieces, at most two per thread block: the end of
an item that began before (slot 0), and the beginning of one that goes on after (slot 1).

A *unit* is what one copy reads: `unit` tokens of one page, at most a block. Where pages of a sequence are dealt over chips,
units are counted in the row of the pages that are here, and keys are positions in the sequence.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from paxserve.pallas_kernels.layout import keys_before

BLOCK = 64  # keys


class Schedule(NamedTuple):
    """The work of a batch, as the kernels read it.

    tiles: of each tile its sequence, its first block in the row of all, the blocks of each of its items, the first unit
        of its sequence that it reads and the last, its first token's position, the end of the keys that it
        sees, the position before which its first token sees none, and its sequence's page_offset.
    ctas: of each thread block the first block and the end of its share, its first item and the end of its items, and
        the pieces of the item that begins in its share and ends in another's; 0 if there is none.
    first_token: of each tile.
    tile, row: of each token its tile, -1 if it sees nothing here, and its place in it.
    cut_by: of each item the thread block with the beginning, if it was cut, else -1.
    """

    tiles: Int32[Array, "tiles 9"]
    ctas: Int32[Array, "ctas 5"]
    first_token: Int32[Array, "tiles"]
    tile: Int32[Array, "tokens"]
    row: Int32[Array, "tokens"]
    cut_by: Int32[Array, "items"]


def make_schedule(
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    *,
    tokens: int,
    tile_tokens: int,
    kv_heads: int,
    page_size: int,
    unit: int,
    window: int | Int[Array, ""] | None,
    page_stride: int = 1,
    page_offset: Int[Array, "seqs"] | None = None,
    ctas: int,
) -> Schedule:
    """The schedule of a batch for `ctas` thread blocks that read keys in units of `unit` tokens.

    A tile reads whole units, from the first that its window shows. Entry i of a sequence's block table is its page
    `page_offset + i * page_stride`. `unit` divides `page_size` and BLOCK.
    """
    seqs = len(context_lens)
    query_lens = jnp.diff(query_starts)
    seq_tiles = jnp.where(context_lens > 0, -(-query_lens // tile_tokens), 0)
    seq_tile_ends = jnp.cumsum(seq_tiles)
    seqs_with_tokens = min(seqs, tokens)
    num_tiles = seqs_with_tokens + (tokens - seqs_with_tokens) // tile_tokens

    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    seq = _find(seq_tile_ends, tile)
    first_token = query_starts[seq] + (tile - seq_tile_ends[seq] + seq_tiles[seq]) * tile_tokens
    position = context_lens[seq] - query_starts[seq + 1] + first_token
    end_key = jnp.minimum(position + tile_tokens, context_lens[seq])
    first_key = jnp.zeros_like(position) if window is None else position - window + 1
    offset = jnp.zeros_like(seq) if page_offset is None else page_offset[seq]

    keys_here = functools.partial(keys_before, page_size=page_size, page_stride=page_stride, page_offset=offset)
    first_unit, end_unit = keys_here(jnp.maximum(first_key, 0)) // unit, -(-keys_here(end_key) // unit)
    blocks = jnp.where(tile < seq_tile_ends[-1], -(-(end_unit - first_unit) // (BLOCK // unit)), 0)
    block_ends = jnp.cumsum(blocks * kv_heads)
    first_block = block_ends - blocks * kv_heads

    total = block_ends[-1]
    share = jnp.maximum(-(-total // ctas), 1)
    begin = jnp.minimum(jnp.arange(ctas) * share, total)
    end = jnp.minimum(begin + share, total)

    def item_at(block: Int[Array, "ctas"]) -> Int[Array, "ctas"]:
        of = _find(block_ends, block)
        return of * kv_heads + (block - first_block[of]) // jnp.maximum(blocks[of], 1)

    item_begin = first_block[:, None] + jnp.arange(kv_heads) * blocks[:, None]  # [tiles, kv_heads]
    cut_by, ends_in = (item_begin // share).reshape(-1), ((item_begin + blocks[:, None] - 1) // share).reshape(-1)
    last_item = item_at(end - 1)
    pieces = jnp.where(
        (begin < end) & (cut_by[last_item] == jnp.arange(ctas)), ends_in[last_item] - jnp.arange(ctas) + 1, 0
    )

    token = jnp.arange(tokens)
    token_seq = _find(query_starts[1:], token)
    in_seq = token - query_starts[token_seq]
    is_real = (token < query_starts[-1]) & (context_lens[token_seq] > 0)
    token_tile = seq_tile_ends[token_seq] - seq_tiles[token_seq] + in_seq // tile_tokens
    is_real &= blocks[token_tile] > 0
    last_unit = jnp.maximum(end_unit - 1, 0)
    of_tiles = seq, first_block, blocks, first_unit, last_unit, position, end_key, first_key, offset
    return Schedule(
        jnp.stack(of_tiles, axis=1).astype(jnp.int32),
        jnp.stack(
            [begin, end, item_at(begin), jnp.where(begin < end, last_item + 1, 0), jnp.where(pieces > 1, pieces, 0)],
            axis=1,
        ).astype(jnp.int32),
        first_token,
        jnp.where(is_real, token_tile, -1),
        in_seq % tile_tokens,
        jnp.where(cut_by < ends_in, cut_by, -1),
    )


def _find(ends: Int[Array, "n"], x: Int[Array, "*m"]) -> Int32[Array, "*m"]:
    """The first i with `x < ends[i]`; the last i if there is none."""
    found = jnp.searchsorted(ends, x, side="right", method="compare_all")
    return jnp.minimum(found, len(ends) - 1).astype(jnp.int32)
