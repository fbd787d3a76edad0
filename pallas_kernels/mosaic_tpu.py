"""Paged attention on TPU, in Pallas: arranges a ragged batch into the tiles that `mosaic_tpu_kernel` computes.

Sequences with one query token are tiles of their own, in descending order of context, so that those computed side by side
are of like length. The tokens of longer queries stay where they are: they are cut into blocks of about `query_rows` rows,
and a tile is what one sequence has of one block. A block that several sequences share is several tiles, each of which
writes its own rows. A batch that mixes both kinds is two calls of the kernel; `max_query_len=1` leaves out the second.

Block sizes are tuned (`tuning.py`). Of decodes: block_keys of a tile's block, at most; chains, of 8 rows: tiles times heads
that are computed side by side. Of longer queries: query_rows of a tile and KV head; query_keys that these are computed with
at a time; turn, units of the pipeline in a turn, at most; hoisting, see `compiler_params`. Of both: slots, blocks in VMEM;
a pipeline uses two at a time.

On CPU the kernel is simulated, slowly: its copies, semaphores and memories as on the chip.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice
from jaxtyping import Array, Bool, Float, Float32, Int, Num

from paxserve.pallas_kernels import mosaic_tpu_mla
from paxserve.pallas_kernels.layout import (
    GQASizes,
    MLASizes,
    Scale,
    Sizes,
    latent_page_size,
    load,
    split_kv,
)
from paxserve.pallas_kernels.mosaic_tpu_kernel import LANES, TABLE_ROW, Shape, attend
from paxserve.pallas_kernels.mosaic_tpu_plan import Plan, Work, cores_per_device, entries, make_plan
from paxserve.pallas_kernels.target import target
from paxserve.pallas_kernels.tuning import block_sizes
from paxserve.pallas_kernels.xla import Window, finish

DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "uint16")
"""Of queries and pages; uint16 is how bfloat16 pages are stored on CPU."""

PIPELINE_KEYS = 1024  # of a block of a prefill's, at most: all of them are computed, if only one is there
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


Compute = Callable[[Plan, Array], tuple[Array, Array]]
"""Output and log-sum-exp of a plan's tiles from their queries, [tiles, kv_heads, rows, ...]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """What is made of a batch before its pages are read.

    decodes, prefills: of the sequences with one query token and with more; the latter None if there are none.
    decode_token: of the tiles of `decodes`, past the last for a tile without work.
    is_prefilled: which tokens are in the tiles of `prefills`.
    """

    decodes: Plan
    prefills: Plan | None
    decode_token: Int[Array, "tiles"]
    is_prefilled: Bool[Array, "tokens"]


def make_schedule(
    sizes: Sizes,
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    *,
    window: Window,
    **options: Any,
) -> Schedule | mosaic_tpu_mla.MLASchedule:
    """See `paxserve.pallas_kernels.schedule_attention`. The options are those of both kinds of attention's functions."""
    if isinstance(sizes, MLASizes):
        return mosaic_tpu_mla.make_mla_schedule(sizes, context_lens, query_starts, **options)
    return make_gqa_schedule(sizes, context_lens, query_starts, window=window, **options)


def make_gqa_schedule(
    sizes: GQASizes,
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    *,
    tokens: int,
    max_pages: int,
    itemsize: int,
    window: Window,
    max_query_len: int | None,
    page_stride: int,
    page_offset: Int[Array, "seqs"] | None,
) -> Schedule:
    """itemsize: of what pages hold. The rest is as in `schedule_attention`."""
    pages = Pages(
        sizes.page_size,
        max_pages,
        -(-2 * sizes.head_dim // LANES) * LANES * itemsize,
        page_stride,
        jnp.zeros_like(context_lens) if page_offset is None else page_offset * sizes.page_size,
    )
    window = _narrowed(window, max_pages * sizes.page_size * page_stride)
    batch = context_lens.astype(jnp.int32), query_starts.astype(jnp.int32), window, pages
    tuned = functools.partial(
        block_sizes,
        device_kind=target().device_kind,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        page_size=sizes.page_size,
        itemsize=itemsize,
    )
    decodes, decode_token = _plan_decodes(sizes, tokens, *batch, tuned("mosaic_tpu decode"))
    prefills = None
    if max_query_len != 1:
        prefills = _plan_prefills(sizes, tokens, *batch, tuned("mosaic_tpu prefill"))
    token = jnp.arange(tokens)
    owner = jnp.searchsorted(query_starts, token, side="right", method="compare_all") - 1
    owner = jnp.clip(owner, 0, len(context_lens) - 1)
    is_long = (jnp.diff(query_starts) > 1) & (context_lens > 0)
    return Schedule(decodes, prefills, decode_token, is_long[owner] & (token < query_starts[-1]))


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
    schedule: mosaic_tpu_mla.MLASchedule | None = None,
) -> tuple[Float[Array, "tokens heads kv_lora_rank"], Float32[Array, "tokens heads"]]:
    """See `paxserve.pallas_kernels.mla_paged_attention`."""
    tokens, heads, rank = q_latent.shape
    rope = q_rope.shape[2]
    if schedule is None:
        schedule = mosaic_tpu_mla.make_mla_schedule(
            MLASizes(heads, rank, rope, latent_page_size(latent_pages, rank + rope)),
            context_lens,
            query_starts,
            tokens=tokens,
            max_pages=block_tables.shape[1],
            itemsize=latent_pages.dtype.itemsize,
            max_query_len=max_query_len,
            page_stride=page_stride,
            page_offset=page_offset,
        )
    arrays = q_latent, q_rope, latent_pages, block_tables
    return mosaic_tpu_mla.mla_paged_attention(*arrays, schedule, scale=scale, soft_cap=soft_cap, k_scale=k_scale)


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
    schedule: Schedule | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float32[Array, "tokens heads"]]:
    """See `paxserve.pallas_kernels.paged_attention`. Stacked pages, a CPU's, are laid side by side first."""
    tokens, heads, head_dim = q.shape
    kv_pages = load(kv_pages)
    if kv_pages.shape[-1] == head_dim:
        kv_pages = jnp.concatenate(split_kv(kv_pages, head_dim), axis=-1)
    _, kv_heads, page_size, width = kv_pages.shape
    if schedule is None:
        schedule = make_gqa_schedule(
            GQASizes(heads, kv_heads, head_dim, page_size),
            context_lens,
            query_starts,
            tokens=tokens,
            max_pages=block_tables.shape[1],
            itemsize=kv_pages.dtype.itemsize,
            window=window,
            max_query_len=max_query_len,
            page_stride=page_stride,
            page_offset=page_offset,
        )
    window = _narrowed(window, block_tables.shape[1] * page_size * page_stride)
    key_dim = min(-(-head_dim // LANES) * LANES, width)

    def compute(plan: Plan, rows: Float[Array, "tiles kv_heads rows head_dim"]) -> tuple[Array, Array]:
        out, lse = attend(
            jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, key_dim - head_dim))),
            kv_pages,
            block_tables.astype(jnp.int32),
            plan,
            head_dim=head_dim,
            scale=jnp.float32(scale if k_scale is None else scale * k_scale),
            window=window,
            soft_cap=soft_cap,
            interpret=False if pltpu.is_tpu_device() else pltpu.InterpretParams(),
        )
        return out[: len(rows), ..., -head_dim:], lse[: len(rows), ..., 0]

    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    out, lse = jnp.zeros_like(q), jnp.full((tokens, heads), -jnp.inf)
    if schedule.prefills is not None:
        out, lse = _prefill(compute, grouped, schedule)
    row_out, row_lse = _decode(compute, grouped, schedule)
    row = schedule.decode_token
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


def _narrowed(window: Window, keys: int) -> Int[Array, ""] | None:
    """A window no wider than the keys that there can be."""
    return None if window is None else jnp.minimum(window, keys).astype(jnp.int32)


def _plan_decodes(
    sizes: GQASizes,
    tokens: int,
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    window: Int[Array, ""] | None,
    pages: Pages,
    tuned: dict[str, int],
) -> tuple[Plan, Int[Array, "tiles"]]:
    """The plan of the sequences with one query token, and which tokens these are; past the last for a tile without work."""
    rows = -(-(sizes.heads // sizes.kv_heads) // 8) * 8
    key_bytes = sizes.kv_heads * pages.row_bytes
    # Of more tiles the blocks were shorter.
    fitting = max(SLOTS_BYTES // (tuned["slots"] * tuned["block_keys"] * key_bytes), 1)
    chains = max(tuned["chains"] * 8 // rows, 1)
    heads, tiles = _side_by_side(sizes.kv_heads, min(fitting, len(context_lens)), chains)
    block_pages = pages.block_pages(tuned["block_keys"], tiles * key_bytes, tuned["slots"])
    shape = Shape(rows, rows, tiles, heads, block_pages, block_pages * pages.page_size, tuned["slots"], pages.stride)

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
    return _plan(work, shape, pages), jnp.where(end > 0, query_starts[work.seq], tokens)


def _plan_prefills(
    sizes: GQASizes,
    tokens: int,
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    window: Int[Array, ""] | None,
    pages: Pages,
    tuned: dict[str, int],
) -> Plan:
    """The plan of the sequences with two or more query tokens."""
    kv_heads, group = sizes.kv_heads, sizes.heads // sizes.kv_heads
    state_bytes = kv_heads * (2 * pages.row_bytes + 4 * sizes.head_dim + 16 * LANES)  # of a row of every KV head
    most_rows = min(tuned["query_rows"], STATE_BYTES // state_bytes)
    block = min(max(most_rows // group // 16, 1), -(-tokens // 16)) * 16  # of tokens
    blocks, rows = -(-tokens // block), block * group
    # An even number of units, so that their buffers alternate, and with few KV heads more pieces for longer turns.
    most_pieces = max(min(tuned["turn"] // kv_heads, PIPELINE_KEYS // tuned["query_keys"]), 1 + kv_heads % 2)
    pieces = _power_of_two(most_pieces)
    block_pages = max(
        pages.block_pages(pieces * tuned["query_keys"], kv_heads * pages.row_bytes, tuned["slots"]), pieces
    )
    keys = block_pages * pages.page_size // pieces
    turn = max(n for n in range(2, tuned["turn"] + 1, 2) if kv_heads * pieces % n == 0)
    slots, hoisting = tuned["slots"], tuned["hoisting"]
    shape = Shape(rows, group, 1, 1, block_pages, keys, slots, pages.stride, turn, hoisting)

    starts, ends = query_starts[:-1], query_starts[1:]
    first_block = starts // block
    seq_tiles = jnp.where((ends - starts > 1) & (context_lens > 0), -(-ends // block) - first_block, 0)
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
    return _plan(work, shape, pages)


def _plan(work: Work, shape: Shape, pages: Pages) -> Plan:
    here = entries(work.first_key, work.end_key, pages.page_size, pages.stride)
    return make_plan(work, here, shape, cores_per_device(), empty_blocks=int(shape.turn > 0))


def _decode(
    compute: Compute, q: Float[Array, "tokens kv_heads group head_dim"], schedule: Schedule
) -> tuple[Float[Array, "tiles heads head_dim"], Float32[Array, "tiles heads"]]:
    """Output and log-sum-exp of the tiles of sequences with one query token."""
    tokens, kv_heads, group, head_dim = q.shape
    plan = schedule.decodes
    rows = q[jnp.minimum(schedule.decode_token, tokens - 1)]
    out, lse = compute(plan, jnp.pad(rows, ((0, 0), (0, 0), (0, plan.shape.rows - group), (0, 0))))
    return out[:, :, :group].reshape(-1, kv_heads * group, head_dim), lse[:, :, :group].reshape(-1, kv_heads * group)


def _prefill(
    compute: Compute, q: Float[Array, "tokens kv_heads group head_dim"], schedule: Schedule
) -> tuple[Float[Array, "tokens heads head_dim"], Float32[Array, "tokens heads"]]:
    """Output and log-sum-exp of the sequences with two or more query tokens; 0 and -inf for the others' tokens."""
    tokens, kv_heads, group, head_dim = q.shape
    plan = schedule.prefills
    assert plan is not None
    rows = plan.shape.rows
    block = rows // group  # of tokens
    blocks = -(-tokens // block)
    padded = jnp.pad(q, ((0, blocks * block - tokens), (0, 0), (0, 0), (0, 0)))
    by_head = padded.reshape(blocks, block, kv_heads, group, head_dim).swapaxes(1, 2)
    out, lse = compute(plan, by_head.reshape(blocks, kv_heads, rows, head_dim))

    def by_token(x: Array) -> Array:
        x = x.reshape(blocks, kv_heads, block, group, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(blocks * block, kv_heads * group, *x.shape[4:])[:tokens]

    is_written = schedule.is_prefilled[:, None]
    return jnp.where(is_written[..., None], by_token(out), 0), jnp.where(is_written, by_token(lse), -jnp.inf)


def _power_of_two(most: int) -> int:
    return 2 ** (most.bit_length() - 1)


def _side_by_side(kv_heads: int, most_tiles: int, chains: int) -> tuple[int, int]:
    """Heads and tiles whose product is nearest to `chains`, not above it; of equals those with more heads."""
    divisors = (n for n in range(1, chains + 1) if kv_heads % n == 0)
    return max(((n, min(chains // n, most_tiles)) for n in divisors), key=lambda each: (each[0] * each[1], each[0]))
