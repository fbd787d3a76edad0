"""Paged latent attention on TPU, in Pallas: arranges a ragged batch into the tiles that `mosaic_tpu_mla_kernel` computes.

All heads read the same keys, so a tile's rows are all heads of some tokens. Sequences with one query token are tiles of
their own, in descending order of context, so that those computed side by side are of like length. Longer queries are cut
into blocks of about `query_rows` rows: a tile is what one sequence has of one block. Queries and outputs stay where they
are, whatever the order of tiles: the kernel copies each tile's rows itself.

Block sizes are tuned (`tuning.py`). Of decodes: decodes that are computed side by side; decode_keys of a block of all of them.
Of longer queries: query_rows of a tile, at least one token's; query_keys of a block; parts of a tile's rows that are
computed side by side. Of both: slots, blocks in VMEM.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int, Num

from paxserve.pallas_kernels.layout import MLASizes, Scale, keys_before, load, pair
from paxserve.pallas_kernels.mosaic_tpu_kernel import TABLE_ROW
from paxserve.pallas_kernels.mosaic_tpu_mla_kernel import Shape, attend, matrix_columns
from paxserve.pallas_kernels.mosaic_tpu_plan import Plan, Work, cores_per_device, make_plan
from paxserve.pallas_kernels.target import target
from paxserve.pallas_kernels.tuning import block_sizes


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

    def first_computed(self) -> Int[Array, "seqs"]:
        """Of each sequence's tokens the first that sees a key of the pages here; its end if none does."""
        starts, ends = self.query_starts[:-1], self.query_starts[1:]
        return jnp.clip(ends - self.context_lens + self.page_offset * self.page_size, starts, ends)

    def computed(self, tokens: int) -> tuple[Bool[Array, "tokens"], Bool[Array, "tokens"]]:
        """(which tokens are their sequence's only one, which are in a tile: those that see keys)."""
        token = jnp.arange(tokens)
        owner = jnp.searchsorted(self.query_starts, token, side="right", method="compare_all") - 1
        owner = jnp.clip(owner, 0, len(self.context_lens) - 1)
        is_computed = (token >= self.first_computed()[owner]) & (token < self.query_starts[-1])
        return jnp.diff(self.query_starts)[owner] == 1, is_computed

    def block_pages(self, keys: int) -> int:
        """Pages of a block of about `keys` keys; blocks much longer than a block table are of no use."""
        return _power_of_two(max(min(keys // self.page_size, TABLE_ROW, 2 * self.max_pages - 1), 1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLASchedule:
    """What is made of a batch before its pages are read.

    decodes, prefills: of the sequences with one query token and with more; the latter None if there are none.
    is_decode: which tokens are their sequence's only one. is_computed: which are in a tile, those that see keys here.
    """

    decodes: Plan
    prefills: Plan | None
    is_decode: Bool[Array, "tokens"]
    is_computed: Bool[Array, "tokens"]


def make_mla_schedule(
    sizes: MLASizes,
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    *,
    tokens: int,
    max_pages: int,
    itemsize: int,
    max_query_len: int | None,
    page_stride: int,
    page_offset: Int[Array, "seqs"] | None,
) -> MLASchedule:
    """itemsize: of what pages hold. The rest is as in `schedule_attention`."""
    offset = jnp.zeros_like(context_lens) if page_offset is None else page_offset
    context_lens, query_starts, offset = (x.astype(jnp.int32) for x in (context_lens, query_starts, offset))
    batch = Batch(context_lens, query_starts, offset, sizes.page_size, page_stride, max_pages)
    tuned = functools.partial(
        block_sizes,
        device_kind=target().device_kind,
        heads=sizes.heads,
        kv_lora_rank=sizes.kv_lora_rank,
        page_size=sizes.page_size,
        itemsize=itemsize,
    )
    rows = _rows(sizes.heads)
    decodes = _plan_decodes(rows, sizes.kv_lora_rank, batch, tuned("mosaic_tpu mla decode"))
    prefills = None
    if max_query_len != 1:
        prefills = _plan_prefills(tokens, rows, sizes.kv_lora_rank, batch, tuned("mosaic_tpu mla prefill"))
    return MLASchedule(decodes, prefills, *batch.computed(tokens))


def mla_paged_attention(
    q_latent: Float[Array, "tokens heads kv_lora_rank"],
    q_rope: Float[Array, "tokens heads qk_rope_head_dim"],
    latent_pages: Num[Array, "pages *slots width"],
    block_tables: Int[Array, "seqs max_pages"],
    schedule: MLASchedule,
    *,
    scale: float,
    soft_cap: float | None,
    k_scale: Scale | None,
) -> tuple[Float[Array, "tokens heads kv_lora_rank"], Float32[Array, "tokens heads"]]:
    """See `paxserve.pallas_kernels.mla_paged_attention`. Pages with a row per token, a CPU's, are paired first."""
    tokens, heads, rank = q_latent.shape
    latent_pages = load(latent_pages)
    if latent_pages.ndim == 3:
        latent_pages = pair(latent_pages, rank)
    rows = _rows(heads)
    block = 1 if schedule.prefills is None else schedule.prefills.shape.rows // rows  # of tokens
    q = jnp.concatenate([q_latent, q_rope], axis=-1)
    q = jnp.pad(q, ((0, -tokens % block), (0, rows - heads), (0, 0)))

    def compute(plan: Plan, out: Array | None = None) -> tuple[Array, Array]:
        """By token; of those that are in no tile outputs are those in `out`, or undefined."""
        shape: Shape = plan.shape

        def in_blocks(x: Array) -> Array:
            return x.reshape(-1, shape.rows, x.shape[-1])

        out, lse = attend(
            in_blocks(q),
            latent_pages,
            block_tables,
            plan,
            None if out is None else in_blocks(out),
            scale=jnp.float32(scale if k_scale is None else scale * k_scale),
            soft_cap=soft_cap,
            columns=matrix_columns(shape.rows // shape.parts),
            interpret=False if pltpu.is_tpu_device() else pltpu.InterpretParams(),
        )
        lse = lse.reshape(len(lse), -1)[:, : shape.rows]
        return out.reshape(-1, rows, rank), lse.reshape(-1, rows)[:tokens, :heads]

    if schedule.prefills is None:
        out, lse = compute(schedule.decodes)
    else:
        out, lse = compute(schedule.prefills)
        out, decode_lse = compute(schedule.decodes, out)
        lse = jnp.where(schedule.is_decode[:, None], decode_lse, lse)
    out = out if k_scale is None else (out * k_scale).astype(out.dtype)
    is_computed = schedule.is_computed[:, None]
    return jnp.where(is_computed[..., None], out[:tokens, :heads], 0), jnp.where(is_computed, lse, -jnp.inf)


def _rows(heads: int) -> int:
    """Of a token: its heads, filled up to memory tiles."""
    return -(-heads // 8) * 8


def _plan_decodes(rows: int, rank: int, batch: Batch, sizes: dict[str, int]) -> Plan:
    """Of the sequences with one query token."""
    seqs = len(batch.context_lens)
    tiles = min(sizes["decodes"], seqs)
    block_pages = batch.block_pages(sizes["decode_keys"] // tiles)
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
        query_block=batch.query_starts[seq],
        steps=-(-jnp.sum(keys > 0) // tiles),
    )
    return _plan(work, Shape(rank, rows, rows, tiles, 1, block_pages, sizes["slots"], batch.page_stride), batch)


def _plan_prefills(tokens: int, heads: int, rank: int, batch: Batch, sizes: dict[str, int]) -> Plan:
    """Of the sequences with two or more query tokens."""
    unit = 16 * sizes["parts"] // math.gcd(16 * sizes["parts"], heads)  # of tokens, so that parts begin at memory tiles
    block = min(max(sizes["query_rows"] // heads // unit, 1), -(-tokens // unit)) * unit  # of tokens
    blocks, rows = -(-tokens // block), block * heads
    block_pages = batch.block_pages(sizes["query_keys"])
    shape = Shape(
        rank, rows, heads, 1, sizes["parts"], block_pages, sizes["slots"], batch.page_stride, sizes["hoisting"]
    )

    starts, ends = batch.first_computed(), batch.query_starts[1:]
    first_block = starts // block
    is_long = jnp.diff(batch.query_starts) > 1
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
    return _plan(work, shape, batch)


def _plan(work: Work, shape: Shape, batch: Batch) -> Plan:
    pages = work.first_key // batch.page_size, -(-work.end_key // batch.page_size)
    return make_plan(work, pages, shape, cores_per_device())


def _power_of_two(most: int) -> int:
    return 2 ** (most.bit_length() - 1)
