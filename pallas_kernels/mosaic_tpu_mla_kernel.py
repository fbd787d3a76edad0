"""The Pallas kernel (Mosaic TPU) behind `mosaic_tpu_mla`: latent attention of tiles of query rows over paged latents.

Grid. A *tile* is `rows` query rows of one sequence: the heads of a decode's only token, or those of a run of a prompt's
tokens. A grid step computes `Shape.tiles` of them side by side, each over its own sequence, so that their chains
matmul - maximum - exp - matmul overlap; a prompt's rows are cut into `Shape.parts` for the same end. Steps are as many as
have work: the grid's size is a value of the batch. Two cores share them as in `mosaic_tpu_kernel`.

Rows. A tile's queries are a block of `q`, wherever it lies, and its output goes to the same block: the tiles of a step are
inputs with index maps of their own, and `mosaic_tpu_results` copies outputs. So nothing is gathered or scattered outside,
and two calls can fill one output.

Buffers. Pages are *paired* (`layout`): a row holds the latents of tokens `t` and `t + 8`, then their RoPE parts, in whole
lanes and without padding. `mosaic_tpu_stream` copies them into `buffer[slot, tile, page]`, ahead of their use. The same
rows are keys and values, and both matmuls read them as they lie: `load` takes the lanes of one half's latents. One matmul
gives the RoPE logits of both halves, as the queries' RoPE parts are beside zeros for the other half.

Loop. A step walks over the blocks of its longest tile: a turn of the online softmax (arXiv:1805.02867) each, whose
running maximum and sum lie in VMEM scratch, as do the output and what is kept from stage to stage. Logits are in units of
log 2 there, which saves a multiplication per exponential.

Registers. All that is in flight must fit into 64 of them, or the compiler spills. Results go to VMEM a few rows at a time
(`*_ROWS`), as they leave the matrix units, and a stage reads them back from `hidden` addresses: else the compiler keeps what
was stored or read before, and moves reads forward. Chains go in pairs, RoPE logits first, as these fill one matrix unit
per chain: after them, the two parts of a sum of latent logits leave both units at a time.

What was not read, because it lies outside the context, is cleared before its block is used: a weight of 0 does not hide
a NaN, and neither does a 0 in the RoPE parts of queries.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int, Num

from paxserve.pallas_kernels.layout import is_second
from paxserve.pallas_kernels.mosaic_tpu_compiler import compiler_params
from paxserve.pallas_kernels.mosaic_tpu_kernel import LANES, LOWEST, MASKED
from paxserve.pallas_kernels.mosaic_tpu_plan import END_KEY, END_ROW, FIRST_ROW, POSITION, Plan, own_index, own_step
from paxserve.pallas_kernels.mosaic_tpu_results import Results
from paxserve.pallas_kernels.mosaic_tpu_results import scratch as results_scratch
from paxserve.pallas_kernels.mosaic_tpu_stream import Stream, pad_tables, scratch

LOGIT_ROWS, WEIGHT_ROWS, VALUE_ROWS = 32, 16, 64  # that are computed at a time


@dataclass(frozen=True)
class Shape:
    """The sizes a kernel is made for; all of them are static.

    rank: kv_lora_rank.
    rows: query rows of a tile, a multiple of 8.
    heads: consecutive rows at one position; row `r` stands at the tile's position plus `r // heads`.
    tiles: tiles per grid step.
    parts: equal parts of a tile's rows, computed side by side.
    block_pages: pages per block, which is computed at a time; a power of two.
    slots: blocks in VMEM.
    page_stride: of the pages in a block table, as in `paged_attention`.
    hoisting: see `compiler_params`.
    """

    rank: int
    rows: int
    heads: int
    tiles: int
    parts: int
    block_pages: int
    slots: int
    page_stride: int
    hoisting: int = 0


def attend(
    q: Float[Array, "blocks rows cached_dim"],
    latent_pages: Num[Array, "pages groups 8 two_cached_dim"],
    block_tables: Int[Array, "seqs max_pages"],
    plan: Plan,
    into: Float[Array, "blocks rows rank"] | None,
    *,
    scale: Float[Array, ""],
    soft_cap: float | None,
    columns: int = 256,
    interpret: Any = False,
) -> tuple[Float[Array, "blocks rows rank"], Float32[Array, "blocks n 128"]]:
    """Attention of a plan's tiles. In a block without tiles the output is what `into` has there, or undefined.

    A row of `q` is a head's latent query and its RoPE part. Of the plan, position is counted from the first token of the
    page that is the first in the sequence's block table, end_key is how many keys of these pages a tile sees.
    Returns the output in q's dtype and the log-sum-exp of the logits, row `r`'s in [r // 128, r % 128]. Undefined are rows
    of a block that are no tile's, and the latter in blocks without tiles. Of keys and of the output, `columns` are
    computed at a time.
    """
    _, groups, group_rows, width = latent_pages.shape
    page_size = 2 * groups * group_rows
    shape: Shape = plan.shape
    cores = plan.cores
    rank, rows, tiles, block_pages = shape.rank, shape.rows, shape.tiles, shape.block_pages
    rope = width // 2 - rank
    part_rows = rows // shape.parts
    half = block_pages * page_size // 2  # keys of a block in the first halves of rows, and as many in the second
    key_step = page_size * shape.page_stride  # from a key to the one in its place in the next page
    key_columns, value_columns = (columns if size % columns == 0 else size for size in (half, rank))
    lanes = LANES if key_columns % LANES == 0 else key_columns
    dtype = q.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None

    def kernel(
        items: Any, counts: Any, bounds: Any, query_block: Any, factor: Any, tables: Any, q_refs: Any, key: Any,
        pages_ref: Any, _into: Any, outputs: Any, log_sums: Any, top: Any, total: Any, acc: Any, position: Any,
        q_ropes: Any, logits: Any, maxima: Any, fades: Any, weights: Any, results: Any, buffer: Any, *scratch: Any,
    ) -> None:  # fmt: skip
        step, end = own_step(bounds, cores)
        sizes = tiles, page_size, block_pages, shape.slots, end
        stream = Stream(*sizes, items, counts, tables, pages_ref, buffer, *scratch)
        out, lse = results[0]
        copies = Results(tiles, query_block, (outputs, log_sums), *results)

        def clear(slot: Array, tile: int, page: Array, keys: Array | int) -> None:
            """Zero a page but for its first `keys` keys."""
            group, row, column = (lax.broadcasted_iota(jnp.int32, (groups, group_rows, width), i) for i in range(3))
            stored = buffer[slot, tile, page]
            is_used = 2 * group_rows * group + row + jnp.where(is_second(column, rank, width), group_rows, 0) < keys
            buffer[slot, tile, page] = jnp.where(is_used, stored, jnp.zeros_like(stored))

        def compute(number: Array, slot: Array) -> None:
            """A turn of the online softmax, stage by stage, so that the chains of all tiles and parts overlap."""
            chains = [(tile, pl.ds(first, part_rows)) for tile in range(tiles) for first in range(0, rows, part_rows)]
            order = range(len(chains))

            def load(tile: int, first: int, columns: int) -> Array:
                stored = buffer[slot, tile, :, :, :, first : first + columns]
                return stored.reshape(half, columns).astype(dtype)

            def dot(a: Array, b: Array, contracted: int) -> Array:
                dims = (((1,), (contracted,)), ((), ()))
                return lax.dot_general(a, b, dims, precision, preferred_element_type=jnp.float32)

            def hidden(first: Any, n: int, alias: int = 0) -> Any:
                """The rows from `first` on, at an address that the compiler does not know, and another for each `alias`."""
                return pl.ds(pl.multiple_of(jnp.minimum(number + alias, 0) * n + first, n), n)

            def find_rope_logits(chain: int) -> None:
                tile, part = chains[chain]
                q_rope = jnp.concatenate([q_ropes[h, tile, part] for h in range(2)])
                y = dot(q_rope, load(tile, 2 * rank, 2 * rope), 1)
                for h in range(2):
                    logits[chain][h][...] = y[h * part_rows : (h + 1) * part_rows]

            def find_logits(chain: int) -> None:
                """Stores those of the keys in the first and in the second halves of rows; returns maxima by lane."""
                tile, part = chains[chain]
                first_page = (stream.first_block(step * tiles + tile) + number) * block_pages
                runs = [(h, c) for h in range(2) for c in range(0, half, key_columns)]
                for i, (h, c) in enumerate(runs):
                    q = q_refs[tile][0, hidden(part.start, part_rows, c // key_columns) if c else part, :rank]
                    y = dot(q, load(tile, h * rank, rank)[c : c + key_columns], 1)
                    keys = pl.ds(c, key_columns)
                    for k, (first, n) in enumerate(_cut(part_rows, LOGIT_ROWS)):
                        x = (y[first : first + n] + logits[chain][h][hidden(first, n), keys]) * factor[0]
                        if soft_cap is not None:
                            x = jnp.tanh(x) * (soft_cap * math.log2(math.e))
                        last = position[tile, pl.ds(part.start + first, n)] - first_page * key_step
                        x = jnp.where(key[h : h + 1, keys] <= _repeat(last, key_columns), x, MASKED)
                        logits[chain][h][first : first + n, keys] = x
                        x = functools.reduce(jnp.maximum, [x[:, j : j + lanes] for j in range(0, key_columns, lanes)])
                        if i > 0:
                            x = jnp.maximum(maxima[chain][k][hidden(0, n)], x)
                        maxima[chain][k][...] = x

            def find_weights(chain: int) -> None:
                tile, part = chains[chain]
                old = top[tile, part]
                highest = jnp.concatenate([x[hidden(0, x.shape[0])] for x in maxima[chain]])
                new = jnp.maximum(old, highest.max(1, keepdims=True))
                fade = jnp.exp2(old - new)
                top[tile, part], fades[chain][...] = new, fade
                for first, n in _cut(part_rows, WEIGHT_ROWS):
                    here, some = pl.ds(part.start + first, n), slice(first, first + n)
                    w = [jnp.exp2(x[hidden(first, n)] - _repeat(new[some], half)) for x in logits[chain]]
                    for ref, x in zip(weights[chain], w, strict=True):
                        ref[some] = x.astype(dtype)
                    total[tile, here] = total[tile, here] * fade[some] + _by_lane(w[0] + w[1])

            def find_values(chain: int) -> None:
                tile, part = chains[chain]
                for i, c in enumerate(range(0, rank, value_columns)):
                    w = [ref[hidden(0, part_rows, i)] for ref in weights[chain]]
                    first, second = (dot(w[h], load(tile, h * rank + c, value_columns), 0) for h in range(2))
                    y = first + second
                    if tiles > 1:  # this tile's sequence may have ended: what lies in its buffer was never cleared
                        y = jnp.where(stream.copied(slot, tile)[1] > 0, y, 0.0)
                    for row, n in _cut(part_rows, VALUE_ROWS):
                        here = tile, hidden(part.start + row, n), pl.ds(c, value_columns)
                        fade = _repeat(fades[chain][hidden(row, n)], value_columns)
                        acc[here] = acc[here] * fade + y[row : row + n]

            for pair in (order[i : i + 2] for i in order[::2]):
                for chain in pair:
                    find_rope_logits(chain)
                for chain in pair:
                    find_logits(chain)
            for chain in order:
                find_weights(chain)
            for chain in order:
                find_values(chain)

        def attend_step() -> None:
            top[...] = jnp.full_like(top, LOWEST)
            total[...] = jnp.zeros_like(total)
            acc[...] = jnp.zeros_like(acc)
            row_number = lax.broadcasted_iota(jnp.int32, (rows, LANES), 0)
            for tile in range(tiles):
                q_rope = q_refs[tile][0, :, rank:]
                q_ropes[0, tile] = jnp.concatenate([q_rope, jnp.zeros_like(q_rope)], axis=1)
                q_ropes[1, tile] = jnp.concatenate([jnp.zeros_like(q_rope), q_rope], axis=1)
                position[tile] = stream.field(POSITION, step * tiles + tile) + row_number // shape.heads

            @pl.loop(0, counts[step])
            def _(number: Array) -> None:
                compute(number, stream.take(step, number, clear))

            mine = copies.open(step, pl.program_id(1) == 0)
            for tile in range(tiles):
                item = step * tiles + tile
                weight = total[tile].sum(1, keepdims=True)
                y = acc[tile] / weight
                log = (top[tile] + jnp.log2(weight)) * math.log(2)

                def is_own(row: Array, item: Array = item) -> Array:
                    return (row >= stream.field(FIRST_ROW, item)) & (row < stream.field(END_ROW, item))

                if shape.heads < rows:  # the other rows are those of tiles before and after
                    y = jnp.where(is_own(row_number[:, :1]), y, out[mine, tile].astype(jnp.float32))
                out[mine, tile] = y.astype(dtype)
                for i, first in enumerate(range(0, rows, LANES)):
                    some = log[first : first + LANES]
                    row, lane = (lax.broadcasted_iota(jnp.int32, some.shape, axis) for axis in range(2))
                    in_lanes = jnp.where(row == lane, some, 0.0).sum(0, keepdims=True)
                    if shape.heads < rows:
                        in_lanes = jnp.where(is_own(first + lane[:1]), in_lanes, lse[mine, tile, i : i + 1])
                    lse[mine, tile, i : i + 1] = in_lanes
            has_work = [stream.field(END_KEY, step * tiles + tile) > 0 for tile in range(tiles)]
            live = functools.reduce(jnp.add, [x.astype(jnp.int32) for x in has_work])
            copies.close(step, step == end - 1, live)

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            stream.start(step)
            copies.start()

        pl.when(cores == 1 or step < end)(attend_step)

    factor = scale * math.log2(math.e) if soft_cap is None else scale / soft_cap
    scalars = plan.items, plan.counts, plan.bounds, plan.query_block, jnp.reshape(factor, 1)
    # Positions of a block's keys, from that of the first; those in second halves in the second row.
    keys = np.arange(block_pages, dtype=np.int32)[:, None] * key_step + np.arange(page_size, dtype=np.int32)
    keys = np.moveaxis(keys.reshape(-1, 2, group_rows), 1, 0).reshape(2, half)

    def queries(tile: int) -> pl.BlockSpec:
        def index(core: Array, i: Array, _items: Any, _counts: Any, bounds: Any, query_block: Any, *_: Any) -> Any:
            return query_block[own_index(core, i, bounds, cores) * tiles + tile], 0, 0

        return pl.BlockSpec((1, rows, q.shape[2]), index)

    results = ((rows, rank), dtype), ((-(-rows // LANES), LANES), jnp.float32)
    chains = tiles * shape.parts
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, plan.grid_steps),
            in_specs=[
                in_hbm,
                [queries(tile) for tile in range(tiles)],
                pl.BlockSpec((2, half), lambda *_: (0, 0)),
                in_hbm,
                None if into is None else in_hbm,
            ],
            out_specs=[in_hbm, in_hbm],
            scratch_shapes=[
                pltpu.VMEM((tiles, rows, LANES), jnp.float32),
                pltpu.VMEM((tiles, rows, LANES), jnp.float32),
                pltpu.VMEM((tiles, rows, rank), jnp.float32),
                pltpu.VMEM((tiles, rows, LANES), jnp.int32),
                pltpu.VMEM((2, tiles, rows, 2 * rope), dtype),
                [[pltpu.VMEM((part_rows, half), jnp.float32)] * 2] * chains,
                [[pltpu.VMEM((n, lanes), jnp.float32) for _, n in _cut(part_rows, LOGIT_ROWS)]] * chains,
                [pltpu.VMEM((part_rows, LANES), jnp.float32)] * chains,
                [[pltpu.VMEM((part_rows, half), dtype)] * 2] * chains,
                [
                    [pltpu.VMEM((2, tiles, *size), kind) for size, kind in results],
                    *results_scratch(),
                ],
                *scratch(tiles, block_pages, shape.slots, latent_pages.shape[1:], latent_pages.dtype),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((len(q), *size), kind) for size, kind in results],
        input_output_aliases={} if into is None else {len(scalars) + 1 + tiles + 2: 0},
        compiler_params=compiler_params(shape.hoisting),
        interpret=interpret,
        name=f"mla_paged_attention_{rows}_rows_{tiles}_tiles_{block_pages}_pages",
    )(*scalars, pad_tables(block_tables), [q] * tiles, keys, latent_pages, into)


def matrix_columns(rows: int) -> int:
    """Columns that are computed at a time: a matrix unit's, so that sums fit into registers; with few rows 256 always do."""
    return pltpu.get_tpu_info().mxu_column_size if rows >= 64 and pltpu.is_tpu_device() else 256


def _cut(rows: int, at_most: int) -> list[tuple[int, int]]:
    """First row and number of rows of equal parts."""
    n = math.gcd(rows, at_most)
    return [(first, n) for first in range(0, rows, n)]


def _by_lane(w: Float32[Array, "rows keys"]) -> Float32[Array, "rows 128"]:
    """Sums that add up to the rows' sums: adding up lanes is left for the end."""
    if w.shape[1] % LANES:
        return jnp.broadcast_to(w.sum(1, keepdims=True) * (1 / LANES), (w.shape[0], LANES))
    return functools.reduce(jnp.add, [w[:, i : i + LANES] for i in range(0, w.shape[1], LANES)])


def _repeat(x: Num[Array, "rows 128"], width: int) -> Num[Array, "rows width"]:
    """A value per row, in all of its lanes, in `width` lanes."""
    return x[:, :1] if width % LANES else jnp.concatenate([x] * (width // LANES), axis=1)
