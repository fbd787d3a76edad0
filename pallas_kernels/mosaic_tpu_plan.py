"""What the TPU kernels are told of a batch: the tiles they compute, in which steps, and on which core.

It depends on the batch alone, so that all layers of a step can share it. How a batch is cut into tiles is each kind of
attention's own matter (`mosaic_tpu`, `mosaic_tpu_mla`).
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Int32


@dataclass(frozen=True)
class Work:
    """What the tiles are, tile `i` being number `i % tiles` of step `i // tiles`. All arrays but the last are [tiles].

    seq: its row of the block tables. position: of its row 0, or where it would be.
    first_key, end_key: the range of keys that its rows see; empty for a tile without work. These three are counted from
        the sequence's first page in the block table, and negative before it.
    first_row, end_row: the range of rows that are its sequence's.
    query_block [steps]: which rows of queries and output a step reads and writes, ascending. Of latents [tiles]: which a tile
        reads and writes, those of one block in a row.
    steps: the number of steps with work; the arrays may be longer.
    """

    seq: Int32[Array, "tiles"]
    position: Int32[Array, "tiles"]
    first_key: Int32[Array, "tiles"]
    end_key: Int32[Array, "tiles"]
    first_row: Int32[Array, "tiles"]
    end_row: Int32[Array, "tiles"]
    query_block: Int32[Array, "steps_or_tiles"]
    steps: Int32[Array, ""]


SEQ, POSITION, FIRST_PAGE, END_PAGE, END_KEY, FIRST_ROW, END_ROW = range(7)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["items", "counts", "bounds", "query_block", "grid_steps"],
    meta_fields=["shape", "cores"],
)
@dataclass(frozen=True)
class Plan:
    """Work as a kernel reads it, from scalar memory: it depends on the batch alone, and all layers can share it.

    items: seq, position, first_page, end_page, end_key, first_row and end_row of all tiles, field by field.
    counts: the blocks that a step walks over. bounds: where each core's steps begin, and the end of the last's.
    query_block: as in Work. grid_steps: of a core, at least 1.
    shape: the kernel's Shape (static). cores: that share the steps (static).
    """

    items: Int32[Array, "fields_x_tiles"]
    counts: Int32[Array, "steps"]
    bounds: Int32[Array, "cores_plus_1"]
    query_block: Int32[Array, "steps_or_tiles"]
    grid_steps: Int32[Array, ""]
    shape: Any
    cores: int


def make_plan(work: Work, pages: tuple[Array, Array], shape: Any, cores: int, *, empty_blocks: int = 0) -> Plan:
    """pages: of each tile, the first page in its block table that it reads and the end; none if that is not above.

    shape: with `tiles` and `block_pages`, and the rest that the kernel needs. empty_blocks: of a tile that reads no page.
    """
    first, end = pages
    blocks = jnp.where(end > first, -(-end // shape.block_pages) - first // shape.block_pages, empty_blocks)
    items = jnp.concatenate([work.seq, work.position, first, end, work.end_key, work.first_row, work.end_row])
    counts = blocks.reshape(-1, shape.tiles).max(1)
    query_block = work.query_block
    bounds = share(counts, query_block[:: len(query_block) // len(counts)], work.steps, cores)
    return Plan(items, counts, bounds, query_block, jnp.maximum(jnp.max(jnp.diff(bounds)), 1), shape, cores)


def share(
    counts: Int32[Array, "steps"], query_block: Int32[Array, "steps"], steps: Int32[Array, ""], cores: int
) -> Int32[Array, "cores_plus_1"]:
    """Where each core's steps begin: with like shares of the blocks, and not between steps of one query block in a row."""
    done = jnp.cumsum(jnp.where(jnp.arange(len(counts)) < steps, counts, 0))
    cuts = jnp.searchsorted(done, done[-1] * jnp.arange(1, cores) // cores, method="compare_all")
    blocks = jnp.cumsum(jnp.diff(query_block, prepend=query_block[:1]) != 0)
    cuts = jnp.minimum(jnp.searchsorted(blocks, blocks[cuts], method="compare_all"), steps)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), cuts.astype(jnp.int32), steps.reshape(1).astype(jnp.int32)])


def own_step(bounds: Any, cores: int) -> tuple[Array, Array | int]:
    """In a kernel whose grid is [cores, steps]: the step, and where the steps of this core end."""
    if cores == 1:
        return pl.program_id(1), pl.num_programs(1)
    return bounds[pl.program_id(0)] + pl.program_id(1), bounds[pl.program_id(0) + 1]


def own_index(core: Array, i: Array, bounds: Any, cores: int) -> Array:
    """A core's `i`-th step, its last if there are fewer; any if there are none."""
    if cores == 1:
        return i
    return jnp.maximum(jnp.minimum(bounds[core] + i, bounds[core + 1] - 1), 0)


def own_block(core: Array, i: Array, bounds: Any, query_block: Any, cores: int, idle: int) -> Array:
    """The rows of queries and output of `own_index`; `idle` if a core has no steps."""
    block = query_block[own_index(core, i, bounds, cores)]
    return block if cores == 1 else jnp.where(bounds[core] < bounds[core + 1], block, idle)


def cores_per_device() -> int:
    """Cores over which a device's parallel grid axes are dealt: two on v5p, one elsewhere."""
    return pltpu.get_tpu_info().num_cores if pltpu.is_tpu_device() else 1


def entries(
    first_key: Int[Array, "tiles"], end_key: Int[Array, "tiles"], page_size: int, stride: int
) -> tuple[Int[Array, "tiles"], Int[Array, "tiles"]]:
    """The range of block-table entries that hold keys of first_key:end_key, counted as in `Work`."""
    first_page, end_page = first_key // page_size, -(-end_key // page_size)
    return jnp.maximum(-(-first_page // stride), 0), jnp.maximum(-(-end_page // stride), 0)
