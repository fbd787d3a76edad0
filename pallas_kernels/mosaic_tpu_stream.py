"""Copies of pages from HBM, ahead of the computation, for the TPU kernels that walk over them block by block.

A *tile* is a run of query rows of one sequence. A grid step computes `tiles` of them side by side, each over blocks of
`block_pages` pages, aligned in its own sequence: as many blocks as the longest of them has. A page is one contiguous copy
into `buffer[slot, tile, page]`, where `slot` counts blocks over the whole grid: a cursor in scalar memory runs
`slots - 1` blocks ahead, into the following steps. A semaphore per slot counts the bytes of its pages, those of all tiles.
Page ids are copied from HBM into scalar memory too, two rows of lanes of a tile's block table at a time, a block before
its pages are asked for: tables may be of any width.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Int32

from paxserve.pallas_kernels.mosaic_tpu_kernel import ISSUE, TABLE_ROW
from paxserve.pallas_kernels.mosaic_tpu_plan import END_KEY, END_PAGE, FIRST_PAGE, SEQ

Clear = Callable[[Array, int, Array, Array | int], None]


@dataclass(frozen=True)
class Stream:
    """The blocks of a kernel's tiles, and where they are kept. All but the sizes are references into the kernel's memory.

    end: of this core's steps. items, counts: a `Plan`'s. tables: block tables, padded by `pad_tables`. The rest is
    scratch, as listed by `scratch`.
    """

    tiles: int
    page_size: int
    block_pages: int
    slots: int
    end: Array | int
    items: Any
    counts: Any
    tables: Any
    pages: Any
    buffer: Any
    ids: Any
    cursor: Any
    first_page: Any
    end_page: Any
    full: Any
    ids_sem: Any
    sem: Any

    def field(self, number: int, item: Array) -> Array:
        return self.items[number * (self.items.shape[0] // 7) + item]

    def first_block(self, item: Array) -> Array:
        return divide(self.field(FIRST_PAGE, item), self.block_pages)

    def start(self, step: Array) -> None:
        """Begin to copy, in a core's first step."""
        self.cursor[3] = 0
        self._seek(step, jnp.int32(0), jnp.int32(0))
        for _ in range(self.slots - 1):
            self._fetch()

    def take(self, step: Array, number: Array, clear: Clear) -> Array:
        """Wait for block `number` of a step's tiles; its slot. Starts to copy the block `slots - 1` later.

        clear(slot, tile, page, keys) is called for the pages of which only the first `keys` keys, or none, were asked for:
        what lies in the rest of them is no part of the sequence. Tiles whose sequence has ended are left as they are.
        """
        self._fetch()
        slot = self.cursor[3]
        self.cursor[3] = self._after(slot)
        buffer, sem = self.buffer.at[slot], self.sem.at[slot]
        pl.when(self.full[slot] == 1)(pltpu.make_async_copy(buffer, buffer, sem).wait)

        @pl.when(self.full[slot] == 0)
        def _() -> None:
            for tile in range(self.tiles):  # all of them first: they share a semaphore
                self._wait(slot, tile)
            for tile in range(self.tiles):
                self._clear(step * self.tiles + tile, number, slot, tile, clear)

        return slot

    def _clear(self, item: Array, number: Array, slot: Array, tile: int, clear: Clear) -> None:
        first, end = self.copied(slot, tile)

        @pl.when(end > 0)
        def _() -> None:
            pl.loop(0, first)(lambda page: clear(slot, tile, page, 0))
            pl.loop(end, self.block_pages)(lambda page: clear(slot, tile, page, 0))
            last_page = (self.first_block(item) + number) * self.block_pages + end - 1
            clear(slot, tile, end - 1, self.field(END_KEY, item) - last_page * self.page_size)

    def copied(self, slot: Array, tile: int) -> tuple[Array, Array]:
        """The range of pages of a tile's block that are in a slot."""
        return self.first_page[slot * self.tiles + tile], self.end_page[slot * self.tiles + tile]

    def _seek(self, at: Array, number: Array, slot: Array) -> None:
        """Move the cursor to block `number` of step `at`."""
        self.cursor[0], self.cursor[1], self.cursor[2] = at, number, slot

        @pl.when((at < self.end) & self._refills(number))
        def _() -> None:
            for tile in range(self.tiles):
                self._ids_copy(at * self.tiles + tile, number, tile).start()

    def _fetch(self) -> None:
        """Start the copies of the block at the cursor, and move the cursor on."""
        at, number, slot = self.cursor[0], self.cursor[1], self.cursor[2]

        @pl.when(at < self.end)
        def _() -> None:
            pl.when(self._refills(number))(pltpu.make_async_copy(self.ids, self.ids, self.ids_sem).wait)
            is_full = [self._start_pages(at * self.tiles + tile, number, slot, tile) for tile in range(self.tiles)]
            self.full[slot] = functools.reduce(jnp.logical_and, is_full).astype(jnp.int32)
            is_last = number + 1 >= self.counts[at]
            self._seek(jnp.where(is_last, at + 1, at), jnp.where(is_last, 0, number + 1), self._after(slot))

    def _start_pages(self, item: Array, number: Array, slot: Array, tile: int) -> Array:
        """Start the copies of a tile's block, note which pages they are; whether all of it is to be used."""
        block_pages = self.block_pages
        block = self.first_block(item) + number
        start = block * block_pages
        first = jnp.maximum(self.field(FIRST_PAGE, item) - start, 0)
        end = jnp.clip(self.field(END_PAGE, item) - start, 0, block_pages)
        self.first_page[slot * self.tiles + tile], self.end_page[slot * self.tiles + tile] = first, end
        blocks_per_refill = TABLE_ROW // block_pages
        since_refill = number & (blocks_per_refill - 1)
        in_row = (block - since_refill) & (blocks_per_refill - 1)  # where the copied ids begin
        offset = (in_row + since_refill) * block_pages + tile * 2 * TABLE_ROW

        def start_page(page: Array) -> None:
            source = self.pages.at[self.ids[offset + page]]
            pltpu.make_async_copy(source, self.buffer.at[slot, tile, page], self.sem.at[slot]).start()

        def start_turn(turn: Array | int, unrolled: int = min(ISSUE, block_pages)) -> None:
            for k in range(unrolled):
                start_page(first + turn * unrolled + k)

        is_whole = end - first == block_pages
        pl.when(is_whole)(lambda: loop(-(-block_pages // ISSUE), start_turn))

        @pl.when(jnp.logical_not(is_whole))
        def _() -> None:
            turns = divide(end - first, ISSUE)
            pl.loop(0, turns)(start_turn)
            pl.loop(first + turns * ISSUE, end)(start_page)

        return (first == 0) & (self.field(END_KEY, item) >= (block + 1) * block_pages * self.page_size)

    def _refills(self, number: Array) -> Array:
        """Whether the page ids of the blocks from `number` on are copied before it."""
        return number & (TABLE_ROW // self.block_pages - 1) == 0

    def _ids_copy(self, item: Array, number: Array, tile: int) -> Any:
        row = divide(self.first_block(item) + number, TABLE_ROW // self.block_pages)
        row = jnp.minimum(row, self.tables.shape[1] // TABLE_ROW - 2)
        source = self.tables.at[self.field(SEQ, item), pl.ds(pl.multiple_of(row * TABLE_ROW, TABLE_ROW), 2 * TABLE_ROW)]
        target = self.ids.at[pl.ds(tile * 2 * TABLE_ROW, 2 * TABLE_ROW)]
        return pltpu.make_async_copy(source, target, self.ids_sem)

    def _after(self, slot: Array) -> Array:
        return jnp.where(slot + 1 == self.slots, 0, slot + 1)

    def _wait(self, slot: Array, tile: int) -> None:
        """Wait for as many pages as a tile's block has, by the binary digits of their number."""
        first, end = self.copied(slot, tile)
        for digit in range(self.block_pages.bit_length()):
            some = self.buffer.at[slot, tile, pl.ds(0, 2**digit)]
            wait = pltpu.make_async_copy(some, some, self.sem.at[slot]).wait
            pl.when((end - first) & 2**digit != 0)(wait)


def scratch(tiles: int, block_pages: int, slots: int, page_shape: tuple[int, ...], dtype: jnp.dtype) -> tuple[Any, ...]:
    """What a stream keeps in the kernel's memory, from `Stream.buffer` on."""
    return (
        pltpu.VMEM((slots, tiles, block_pages, *page_shape), dtype),
        pltpu.SMEM((tiles * 2 * TABLE_ROW,), jnp.int32),
        pltpu.SMEM((4,), jnp.int32),
        pltpu.SMEM((slots * tiles,), jnp.int32),
        pltpu.SMEM((slots * tiles,), jnp.int32),
        pltpu.SMEM((slots,), jnp.int32),
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA((slots,)),
    )


def pad_tables(block_tables: Int[Array, "seqs max_pages"]) -> Int32[Array, "seqs rows_of_128"]:
    spare = -block_tables.shape[1] % TABLE_ROW + TABLE_ROW
    return jnp.pad(block_tables.astype(jnp.int32), ((0, 0), (0, spare)))


def loop(count: int, body: Any) -> None:
    """`body(i)` for i in range(count), which is unrolled if there is only one."""
    if count == 1:
        body(0)
    else:
        pl.loop(0, count)(body)


def divide(number: Array, power_of_two: int) -> Array:
    """The quotient of a number that is not negative."""
    return lax.shift_right_logical(number, power_of_two.bit_length() - 1)
