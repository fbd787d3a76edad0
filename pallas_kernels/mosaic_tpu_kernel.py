"""The Pallas kernel (Mosaic TPU) behind `mosaic_tpu`: attention of tiles of query rows over paged KV.

Grid. A *tile* is `rows` query rows of every KV head that belong to one sequence: the query heads of a decode's only token,
or those of a run of a prompt's tokens. A grid step computes `Shape.tiles` of them side by side, each over its own sequence,
so that the chains matmul - maximum - exp - matmul of tiles and heads, which depend on nothing of each other, overlap.
Steps are as many as have work: the grid's size is a value of the batch. Where a device has two cores, each takes the steps
of one half of the blocks, with buffers of its own; steps that write the same rows stay together.

Loop. A step walks over blocks of `block_pages` pages, aligned in the block table, from each tile's first page (a sliding
window's) to its last: as many as its longest tile has. Running maximum, sum and output of the online softmax
(arXiv:1805.02867) lie in VMEM scratch; `heads` KV heads are computed at a time.

Pipeline. The chain of a tile of many rows is long enough to keep all units busy, but only one after the other. It is cut
into three stages, logits - maxima and weights - output, with VMEM buffers between them, and the work into *units*, one KV
head's `keys` keys. While a unit is at one stage, the unit before it is at the next and the unit after it at the one before;
that goes on across blocks, so that a block is in use until the next one's first two units are begun. A turn is `turn` units,
in two versions: only one of them looks where keys are hidden from rows, which takes more than a tenth of its time.
Buffers are cut into parts of a few rows, each an array of its own: a part is waited for, not all of a unit.

Dealt pages. If only every `stride`-th page of a sequence is in its block table, positions are counted from the first of
them: entry `i` holds the keys from `i * stride * page_size` on. A tile may see none of them, its row's sums are then 0.

Buffers. A page is one contiguous copy from HBM into `kv[slot, tile, page]`, cut into HBM's memory tiles there too: in VMEM
TPU7x has larger ones for bfloat16, and would copy a page tile by tile. `slot` counts blocks over the whole grid: a cursor in
SMEM runs `slots - 1` blocks ahead of the computation, into the following steps. A semaphore per slot counts the bytes of its
pages, those of all tiles. Page ids are copied from HBM into SMEM, two rows of lanes of a tile's block table at a time, a
block before its pages are asked for: tables may be of any width.

What was not read, because it lies outside the context or the window, is cleared before its block is used: a weight of 0
does not hide a NaN.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int, Num

from paxserve.pallas_kernels.mosaic_tpu_compiler import compiler_params
from paxserve.pallas_kernels.mosaic_tpu_plan import (
    END_KEY,
    END_PAGE,
    END_ROW,
    FIRST_PAGE,
    FIRST_ROW,
    POSITION,
    SEQ,
    Plan,
    own_block,
    own_step,
)

TABLE_ROW = 128  # entries of a block table that lie in a row of lanes
ISSUE = 8  # page copies started per turn of a loop
MASKED = -1e30  # a hidden logit
LOWEST = -1e29  # where running maxima start, above MASKED: the exponential of their distance is 0
TINY = 1e-30
PIPELINE_ROWS = 32  # of a part of the buffers between the stages of the pipeline
LANES = 128
HBM_ROWS = {4: 8, 2: 8, 1: 32}  # of a memory tile in HBM, by the bytes of a number
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Shape:
    """The sizes a kernel is made for; all of them are static.

    rows: query rows of a tile and KV head, a multiple of 8.
    group: consecutive rows at one position; row `r` stands at the tile's position plus `r // group`.
    tiles: tiles per grid step.
    heads: KV heads that are computed at a time, a divisor of their number.
    block_pages: pages per block, a power of two.
    keys: keys that are computed at a time, a divisor of a block's.
    slots: blocks in VMEM.
    stride: which pages of a sequence the block tables hold, the first and every `stride`-th after it.
    turn: units of a pipeline's turn, an even divisor of a block's KV heads times pieces; 0 computes without a pipeline.
    hoisting: of a pipeline, see `compiler_params`.
    """

    rows: int
    group: int
    tiles: int
    heads: int
    block_pages: int
    keys: int
    slots: int
    stride: int = 1
    turn: int = 0
    hoisting: int = 0


def attend(
    q: Float[Array, "tiles kv_heads rows key_dim"],
    kv_pages: Num[Array, "pages kv_heads page_size width"],
    block_tables: Int[Array, "seqs max_pages"],
    plan: Plan,
    *,
    head_dim: int,
    scale: Float[Array, ""],
    window: Int[Array, ""] | None,
    soft_cap: float | None,
    interpret: Any = False,
) -> tuple[Float[Array, "tiles kv_heads rows value_dim"], Float32[Array, "tiles kv_heads rows 128"]]:
    """Attention of a plan's tiles; rows that belong to no tile are left undefined.

    Of pages, rows of K|V are used as they lie, by whole lanes: key_dim is head_dim up to a multiple of 128, or the width if
    that is less, and zeros in `q` leave V out of the logits; the result is the end of the output.
    Returns the output in q's dtype and the log-sum-exp of the logits, repeated over the lanes.
    """
    _, kv_heads, page_size, width = kv_pages.shape
    shape, cores = plan.shape, plan.cores
    key_dim = q.shape[-1]
    values = slice(head_dim // LANES * LANES, width)
    value_dim = width - values.start
    block_pages, tiles, rows, group = shape.block_pages, shape.tiles, shape.rows, shape.group
    page_step = page_size * shape.stride  # from a page's first key to the next page's
    pieces = block_pages * page_size // shape.keys
    piece_pages = block_pages // pieces
    blocks_per_refill = TABLE_ROW // block_pages
    parts = [slice(start, min(start + PIPELINE_ROWS, rows)) for start in range(0, rows, PIPELINE_ROWS)]
    page_tiles = page_size // HBM_ROWS[kv_pages.dtype.itemsize], HBM_ROWS[kv_pages.dtype.itemsize]
    key_lanes = LANES if shape.keys % LANES == 0 else shape.keys
    dtype = q.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None

    def kernel(
        items: Any, counts: Any, bounds: Any, query_block: Any, limit: Any, factor: Any, tables: Any, q_ref: Any, pages: Any,
        out: Any, lse: Any, ids: Any, kv: Any, top: Any, total: Any, acc: Any, cursor: Any, first_page: Any, end_page: Any,
        full: Any, ids_sem: Any, kv_sem: Any, *stages: Any,
    ) -> None:  # fmt: skip
        del query_block  # for the block specs
        step, steps_end = own_step(bounds, cores)

        def field(number: int, item: Array) -> Array:
            return items[number * (items.shape[0] // 7) + item]

        def first_block(item: Array) -> Array:
            return _divide(field(FIRST_PAGE, item), block_pages)

        def refills(number: Array) -> Array:
            """Whether the page ids of the blocks from `number` on are copied before it."""
            return number & (blocks_per_refill - 1) == 0

        def ids_copy(item: Array, number: Array, tile: int) -> Any:
            row = jnp.minimum(_divide(first_block(item) + number, blocks_per_refill), tables.shape[1] // TABLE_ROW - 2)
            source = tables.at[field(SEQ, item), pl.ds(pl.multiple_of(row * TABLE_ROW, TABLE_ROW), 2 * TABLE_ROW)]
            return pltpu.make_async_copy(source, ids.at[pl.ds(tile * 2 * TABLE_ROW, 2 * TABLE_ROW)], ids_sem)

        def start_pages(item: Array, number: Array, slot: Array, tile: int) -> Array:
            """Start the copies of a tile's block, note which pages they are; whether all of it is to be used."""
            block = first_block(item) + number
            start = block * block_pages
            first = jnp.maximum(field(FIRST_PAGE, item) - start, 0)
            end = jnp.clip(field(END_PAGE, item) - start, 0, block_pages)
            first_page[slot * tiles + tile], end_page[slot * tiles + tile] = first, end
            since_refill = number & (blocks_per_refill - 1)
            in_row = (block - since_refill) & (blocks_per_refill - 1)  # where the copied ids begin
            offset = (in_row + since_refill) * block_pages + tile * 2 * TABLE_ROW

            def start_page(page: Array) -> None:
                source = pages.at[ids[offset + page]]
                pltpu.make_async_copy(source, kv.at[slot, tile, page], kv_sem.at[slot]).start()

            def start_turn(turn: Array | int, unrolled: int = min(ISSUE, block_pages)) -> None:
                for k in range(unrolled):
                    start_page(first + turn * unrolled + k)

            is_whole = end - first == block_pages
            pl.when(is_whole)(lambda: _loop(-(-block_pages // ISSUE), start_turn))

            @pl.when(jnp.logical_not(is_whole))
            def _() -> None:
                turns = _divide(end - first, ISSUE)
                pl.loop(0, turns)(start_turn)
                pl.loop(first + turns * ISSUE, end)(start_page)

            last_key = ((block + 1) * block_pages - 1) * page_step + page_size - 1
            return (first == 0) & (field(END_KEY, item) > last_key)

        def fetch() -> None:
            """Start the copies of the block at the cursor, and move the cursor on."""
            at, number, slot = cursor[0], cursor[1], cursor[2]

            @pl.when(at < steps_end)
            def _() -> None:
                pl.when(refills(number))(pltpu.make_async_copy(ids, ids, ids_sem).wait)
                is_full = [start_pages(at * tiles + tile, number, slot, tile) for tile in range(tiles)]
                full[slot] = functools.reduce(jnp.logical_and, is_full).astype(jnp.int32)
                is_last = number + 1 >= counts[at]
                seek(jnp.where(is_last, at + 1, at), jnp.where(is_last, 0, number + 1), next_slot(slot))

        def seek(at: Array, number: Array, slot: Array) -> None:
            cursor[0], cursor[1], cursor[2] = at, number, slot

            @pl.when((at < steps_end) & refills(number))
            def _() -> None:
                for tile in range(tiles):
                    ids_copy(at * tiles + tile, number, tile).start()

        def next_slot(slot: Array) -> Array:
            return jnp.where(slot + 1 == shape.slots, 0, slot + 1)

        def wait(slot: Array, tile: int) -> None:
            """Wait for as many pages as a tile's block has, by the binary digits of their number."""
            pages_read = end_page[slot * tiles + tile] - first_page[slot * tiles + tile]
            for digit in range(block_pages.bit_length()):
                some = kv.at[slot, tile, pl.ds(0, 2**digit)]
                pl.when(pages_read & 2**digit != 0)(pltpu.make_async_copy(some, some, kv_sem.at[slot]).wait)

        def clear(item: Array, number: Array, slot: Array, tile: int) -> None:
            """Zero the V of the part of a tile's block that was not read or is not used."""
            first, end = first_page[slot * tiles + tile], end_page[slot * tiles + tile]

            def clear_page(page: Array) -> None:
                kv[slot, tile, page, :, :, :, values] = jnp.zeros((kv_heads, *page_tiles, value_dim), kv.dtype)

            @pl.when((end > 0) | bool(shape.turn))
            def _() -> None:
                pl.loop(0, first)(clear_page)
                pl.loop(end, block_pages)(clear_page)

            @pl.when(end > 0)
            def _() -> None:
                used = field(END_KEY, item) - ((first_block(item) + number) * block_pages + end - 1) * page_step
                tile_number, row_in_tile = (
                    lax.broadcasted_iota(jnp.int32, (kv_heads, *page_tiles, value_dim), axis) for axis in (1, 2)
                )
                row = tile_number * page_tiles[1] + row_in_tile
                last = kv[slot, tile, end - 1, :, :, :, values]
                kv[slot, tile, end - 1, :, :, :, values] = jnp.where(row < used, last, jnp.zeros_like(last))

        def enter(number: Array, slot: Array) -> None:
            """Ask for a block ahead, wait for this one, and clear what was not read of it."""
            fetch()
            pl.when(full[slot] == 1)(pltpu.make_async_copy(kv.at[slot], kv.at[slot], kv_sem.at[slot]).wait)

            @pl.when(full[slot] == 0)
            def _() -> None:
                for tile in range(tiles):  # all of them first: they share a semaphore
                    wait(slot, tile)
                for tile in range(tiles):
                    clear(step * tiles + tile, number, slot, tile)

        # Logits are compared as they are, before `factor`: the exponential takes their distances in these units.
        unit_log2 = LOG2_E * (factor[0] if soft_cap is None else soft_cap)

        row_number = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        key_number = lax.broadcasted_iota(jnp.int32, (1, shape.keys), 1)
        if shape.stride > 1:
            key_number += key_number // page_size * (page_step - page_size)
        distance = key_number * group - row_number  # [rows, keys]

        def load(slot: Array, tile: int, h: Array | int, piece: Array | int, columns: slice) -> Array:
            part = pl.ds(piece * piece_pages, piece_pages)
            return kv[slot, tile, part, h, :, :, columns].reshape(shape.keys, -1).astype(dtype)

        def reload(ref: Any, times: int = 0) -> Array:
            """What was stored, from an address the compiler does not know: else it keeps, and spills, what it stored.

            times: that it was loaded before, for another address.
            """
            nothing = jnp.minimum(counts[step] + times, 0) * 16
            return ref[pl.ds(pl.multiple_of(nothing, 16), ref.shape[0])]

        def find_logits(slot: Array, tile: int, h: Array | int, piece: Array | int) -> Array:
            dims = (((1,), (1,)), ((), ()))
            k = load(slot, tile, h, piece, slice(0, key_dim))
            x = lax.dot_general(q_ref[tile, h], k, dims, precision, preferred_element_type=jnp.float32)
            return x if soft_cap is None else jnp.tanh(x * (factor[0] / soft_cap))

        def find_products(w: Array, slot: Array, tile: int, h: Array | int, piece: Array | int) -> Array:
            v = load(slot, tile, h, piece, values)
            return jnp.dot(w, v, precision=precision, preferred_element_type=jnp.float32)

        def is_visible(number: Array, tile: int, piece: Array | int) -> Array:
            """Row r stands at position + r // group and sees key k if group * k - r <= group * position."""
            item = step * tiles + tile
            last = (
                field(POSITION, item) - ((first_block(item) + number) * block_pages + piece * piece_pages) * page_step
            )
            visible = distance <= last * group
            return visible if window is None else visible & (distance > (last - limit[0]) * group)

        def by_lane(w: Array) -> Array:
            """Sums that add up to the rows' sums: adding up lanes is left for the end."""
            if shape.keys % LANES:
                return jnp.broadcast_to(w.sum(1, keepdims=True) * (1 / LANES), (len(w), LANES))
            return functools.reduce(jnp.add, [w[:, i : i + LANES] for i in range(0, shape.keys, LANES)])

        def compute(number: Array, slot: Array, head: Array | int, piece: Array | int) -> None:
            """A turn of the online softmax: one piece of a block, for `shape.heads` heads of every tile.

            It goes stage by stage, loads before stores, so that the chains of all tiles and heads overlap.
            """
            (fades,) = stages
            chains = [(tile, head + h) for tile in range(tiles) for h in range(shape.heads)]
            visible = [is_visible(number, tile, piece) for tile in range(tiles)]
            logits = [jnp.where(visible[tile], find_logits(slot, tile, h, piece), MASKED) for tile, h in chains]
            old = [top[tile, h] for tile, h in chains]
            new = [jnp.maximum(o, x.max(1, keepdims=True)) for o, x in zip(old, logits, strict=True)]
            fade = [jnp.exp2((o - n) * unit_log2) for o, n in zip(old, new, strict=True)]
            weights = [jnp.exp2((x - _repeat(n, shape.keys)) * unit_log2) for x, n in zip(logits, new, strict=True)]
            for (tile, h), f, n, w in zip(chains, fade, new, weights, strict=True):
                top[tile, h] = n
                total[tile, h] = total[tile, h] * f + by_lane(w)
                fades[tile, h] = f
            products = [
                find_products(w.astype(dtype), slot, tile, h, piece)
                for (tile, h), w in zip(chains, weights, strict=True)
            ]
            for (tile, h), y in zip(chains, products, strict=True):
                y += acc[tile, h] * _repeat(reload(fades.at[tile, h]), value_dim)
                if tiles > 1:  # this tile's sequence may have ended: what lies in its buffer was never cleared
                    y = jnp.where(end_page[slot * tiles + tile] > 0, y, acc[tile, h])
                acc[tile, h] = y

        def run_pipeline() -> None:
            """All of a step's blocks, by units of one KV head's piece: three of them at a time, each at its stage."""
            hidden, hides_some, logits, weights, fades = stages
            units = kv_heads * pieces

            def first_stage(slot: Array, unit: Array | int, buffer: int, sees_all: bool) -> None:
                x = find_logits(slot, 0, unit // pieces, unit % pieces)
                for i, part in enumerate(parts):
                    y = x[part] if sees_all else jnp.where(hidden[unit % pieces, part] > 0, MASKED, x[part])
                    logits[buffer][i][...] = y

            def second_stage(unit: Array | int, buffer: int) -> None:
                h = unit // pieces
                for i, part in enumerate(parts):
                    x = reload(logits[buffer][i])
                    by_lane_max = [x[:, k : k + key_lanes] for k in range(0, shape.keys, key_lanes)]
                    highest = functools.reduce(jnp.maximum, by_lane_max).max(1, keepdims=True)
                    old = top[0, h, part]
                    new = jnp.maximum(old, highest)
                    fade = jnp.exp2((old - new) * unit_log2)
                    w = jnp.exp2((reload(logits[buffer][i], 1) - _repeat(new, shape.keys)) * unit_log2)
                    weights[buffer][i][...] = w.astype(dtype)
                    fades[buffer][i][...] = fade
                    top[0, h, part] = new
                    total[0, h, part] = total[0, h, part] * fade + by_lane(w)

            def third_stage(slot: Array, unit: Array | int, buffer: int) -> None:
                h = unit // pieces
                w = jnp.concatenate([reload(ref) for ref in weights[buffer]])
                y = find_products(w, slot, 0, h, unit % pieces)
                for i, part in enumerate(parts):
                    acc[0, h, part] = acc[0, h, part] * _repeat(reload(fades[buffer][i]), value_dim) + y[part]

            def hide(number: Array) -> None:
                """Note which of a block's keys are hidden from which rows, if there are such keys."""
                first_key = (first_block(step) + number) * block_pages * page_step
                sees_all = field(POSITION, step) >= first_key + block_pages * page_step - 1
                if window is not None:
                    sees_all &= field(POSITION, step) + (rows - 1) // group - limit[0] < first_key

                hides_some[0] = jnp.logical_not(sees_all).astype(jnp.int32)

                @pl.when(jnp.logical_not(sees_all))
                def _() -> None:
                    for piece in range(pieces):
                        hidden[piece] = jnp.where(is_visible(number, 0, piece), 0.0, 1.0)

            def turn(_turn: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
                slot_before, unit_before, number, slot, unit = carry

                @pl.when(unit == 0)
                def _() -> None:
                    enter(number, slot)
                    hide(number)

                def go_on(sees_all: bool) -> None:
                    for i in range(shape.turn):
                        if i < 2:
                            third_stage(slot_before, unit_before + i - 1, i)
                        else:
                            third_stage(slot, unit + i - 2, i % 2)
                        second_stage(unit + i - 1 if i else unit_before, (i + 1) % 2)
                        first_stage(slot, unit + i, i % 2, sees_all)

                lax.cond(hides_some[0] == 0, lambda: go_on(True), lambda: go_on(False))
                last = unit + shape.turn - 1
                is_last = last + 1 == units
                next_block = jnp.where(is_last, number + 1, number), jnp.where(is_last, next_slot(slot), slot)
                return slot, last, *next_block, jnp.where(is_last, 0, last + 1)

            # Before the first unit there are two that add nothing.
            neutral = (logits[1], MASKED), (weights[0], 0), (fades[0], 1)
            for ref, value in ((ref, value) for refs, value in neutral for ref in refs):
                ref[...] = jnp.full_like(ref, value)
            zero, slot = jnp.int32(0), cursor[3]
            carry = slot, jnp.int32(1), zero, slot, zero
            slot, unit, _, cursor[3], _ = lax.fori_loop(0, counts[step] * (units // shape.turn), turn, carry)
            third_stage(slot, unit - 1, 0)
            second_stage(unit, 1)
            third_stage(slot, unit, 1)

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            cursor[3] = 0
            seek(step, jnp.int32(0), jnp.int32(0))
            for _ in range(shape.slots - (2 if shape.turn else 1)):  # a pipeline is still at the block before
                fetch()

        @pl.when(cores == 1 or step < steps_end)
        def _() -> None:
            top[...] = jnp.full_like(top, LOWEST)
            total[...] = jnp.zeros_like(total)
            acc[...] = jnp.zeros_like(acc)

            if shape.turn:
                run_pipeline()
            else:

                @pl.loop(0, counts[step])
                def _(number: Array) -> None:
                    slot = cursor[3]
                    cursor[3] = next_slot(slot)
                    enter(number, slot)
                    _loop(kv_heads // shape.heads, lambda i: _loop(
                        pieces, lambda piece: compute(number, slot, i * shape.heads, piece)
                    ))  # fmt: skip

            for tile in range(tiles):
                item = step * tiles + tile
                is_own = (row_number >= field(FIRST_ROW, item)) & (row_number < field(END_ROW, item))
                for h in range(kv_heads):
                    weight = total[tile, h].sum(1, keepdims=True)
                    y = acc[tile, h] / jnp.maximum(weight, TINY)  # of a row that saw no key
                    log = top[tile, h] * (unit_log2 / LOG2_E) + jnp.log(weight)
                    if group < rows:  # the other rows are those of tiles before and after
                        y = jnp.where(is_own, y, out[tile, h].astype(jnp.float32))
                        log = jnp.where(is_own, log, lse[tile, h])
                    out[tile, h], lse[tile, h] = y.astype(dtype), log

    spare = -block_tables.shape[1] % TABLE_ROW + TABLE_ROW
    scalars = (
        plan.items,
        plan.counts,
        plan.bounds,
        plan.query_block,
        jnp.reshape(jnp.int32(0) if window is None else window, 1),
        jnp.reshape(scale, 1),
    )

    spare_tiles = tiles * (cores > 1)  # tiles that a core without steps writes
    idle = len(q) // tiles * (cores > 1)

    def per_step(last: int, idle: int) -> pl.BlockSpec:
        def index(core: Array, i: Array, _items: Any, _counts: Any, bounds: Any, query_block: Any, *_: Any) -> Any:
            return own_block(core, i, bounds, query_block, cores, idle), 0, 0, 0

        return pl.BlockSpec((tiles, kv_heads, rows, last), index)

    def in_parts(width: int, dtype: Any = jnp.float32) -> list[Any]:
        """A stage's two buffers, of the parts of the rows."""
        return [[pltpu.VMEM((part.stop - part.start, width), dtype) for part in parts]] * 2

    buffers = [
        pltpu.VMEM((pieces, rows, shape.keys), jnp.float32),
        pltpu.SMEM((1,), jnp.int32),
        in_parts(shape.keys),
        in_parts(shape.keys, dtype),
        in_parts(LANES),
    ]
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, plan.grid_steps),
            in_specs=[in_hbm, per_step(key_dim, 0), in_hbm],
            out_specs=[per_step(value_dim, idle), per_step(LANES, idle)],
            scratch_shapes=[
                pltpu.SMEM((tiles * 2 * TABLE_ROW,), jnp.int32),
                pltpu.VMEM((shape.slots, tiles, block_pages, kv_heads, *page_tiles, width), kv_pages.dtype),
                pltpu.VMEM((tiles, kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((tiles, kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((tiles, kv_heads, rows, value_dim), jnp.float32),
                pltpu.SMEM((4,), jnp.int32),
                pltpu.SMEM((shape.slots * tiles,), jnp.int32),
                pltpu.SMEM((shape.slots * tiles,), jnp.int32),
                pltpu.SMEM((shape.slots,), jnp.int32),
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA((shape.slots,)),
                *(buffers if shape.turn else [pltpu.VMEM((tiles, kv_heads, rows, LANES), jnp.float32)]),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((len(q) + spare_tiles, *q.shape[1:3], value_dim), dtype),
            jax.ShapeDtypeStruct((len(q) + spare_tiles, *q.shape[1:3], LANES), jnp.float32),
        ],
        compiler_params=compiler_params(shape.hoisting),
        interpret=interpret,
        name=f"paged_attention_{rows}_rows_{tiles}_tiles_{block_pages}_pages_{shape.heads}_heads_{shape.keys}_keys"
        + f"_{shape.turn}_units" * bool(shape.turn),
    )(
        *scalars,
        jnp.pad(block_tables.astype(jnp.int32), ((0, 0), (0, spare))),
        q,
        kv_pages.reshape(-1, kv_heads, *page_tiles, width),
    )


def _loop(count: int, body: Any) -> None:
    """`body(i)` for i in range(count), which is unrolled if there is only one."""
    if count == 1:
        body(0)
    else:
        pl.loop(0, count)(body)


def _divide(number: Array, power_of_two: int) -> Array:
    """The quotient of a number that is not negative."""
    return lax.shift_right_logical(number, power_of_two.bit_length() - 1)


def _repeat(x: Float32[Array, "rows 128"], width: int) -> Float32[Array, "rows width"]:
    """A value per row, in all of its lanes, in `width` lanes."""
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]
