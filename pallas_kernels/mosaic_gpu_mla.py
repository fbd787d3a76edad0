"""Latent attention for NVIDIA Hopper, absorbed: queries of up to 128 heads against one row of latent and RoPE key per token.

The schedule and the merge are those of grouped-query attention (mosaic_gpu_schedule.py, mosaic_gpu_merge.py), with one item
per tile: the rows of its tokens' heads, row r being head r % heads of token r // heads. A thread block computes up to 64
rows, wgmma's least, and fills a multiprocessor. Tiles of up to 128 rows are *halves* for two thread blocks with the same
share of the work, a cluster: each copies half of every page into the shared memory of both.

    warpgroup  left       S = Q K^T; mask; online softmax in base 2; P and the factor that fades what was summed before it
                          to shared memory; left half of the output += P V. V is the latent part of K's rows
               right      right half of the output += P V, with left's P and factors
               producer   block by block of 64 keys TMA copies, one per unit, a page or 64 tokens of a longer one
    memory     kv_smem    two blocks of keys
               q_smem     the item's query rows; then its output, in 16 bits, or a float32 piece of it by halves of a side
               p_smem, row_smem    P, the factors, the rows' log-sum-exps
    barriers   *_full and *_empty, one pair per buffer: the consumers begin by saying that all are empty

The producer runs ahead of the consumers, into the next item's keys too. int8 and fp8 blocks are copied into the first half of
their place and widened there by the producer: it holds half a block in registers, so it gets more of them and the
consumers fewer. Maxima are rounded to integers, as in mosaic_gpu.py.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int, Num

from paxserve.pallas_kernels.layout import MLASizes, Scale, keys_before
from paxserve.pallas_kernels.mosaic_gpu_merge import LOWEST, collect, kernel_options
from paxserve.pallas_kernels.mosaic_gpu_schedule import BLOCK, make_schedule

ROWS = 64  # query rows of a thread block
STAGES = 2  # blocks of keys in shared memory
MAX_WIDTH = 576  # values of a row for which three blocks, P and little else fill shared memory
MAX_RANK = 512  # 256 columns of float32 are half of a warpgroup's registers
LOG2E = math.log2(math.e)
LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT = LAYOUT.reduce(1)
LEFT, RIGHT, PRODUCER = range(3)


def why_not(sizes: MLASizes) -> str | None:
    """Why the kernel cannot compute attention of these sizes; None if it can."""
    if sizes.heads > 2 * ROWS:
        return f"it computes latent attention of up to {2 * ROWS} query heads, not {sizes.heads}"
    if sizes.kv_lora_rank % 128 or sizes.kv_lora_rank > MAX_RANK:
        return f"it computes a kv_lora_rank of 128, 256, 384 or 512, not {sizes.kv_lora_rank}"
    if sizes.qk_rope_head_dim % 64 or sizes.kv_lora_rank + sizes.qk_rope_head_dim > MAX_WIDTH:
        return (
            f"it computes a qk_rope_head_dim in multiples of 64, of up to {MAX_WIDTH} with the kv_lora_rank, "
            f"not {sizes.qk_rope_head_dim}"
        )
    return None


def attend(
    q_latent: Float[Array, "tokens heads kv_lora_rank"],
    q_rope: Float[Array, "tokens heads qk_rope_head_dim"],
    latent_pages: Num[Array, "pages page_size cached_dim"],
    block_tables: Int[Array, "seqs max_pages"],
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    *,
    scale: float,
    soft_cap: float | None = None,
    k_scale: Scale | None = None,
    max_query_len: int | None = None,
    page_stride: int = 1,
    page_offset: Int[Array, "seqs"] | None = None,
    ctas: int,
    interpret: Any = None,
) -> tuple[Float[Array, "tokens heads kv_lora_rank"], Float32[Array, "tokens heads"]]:
    """`mla_paged_attention` with up to `ctas` thread blocks; `interpret` is `plgpu.InterpretGPUParams` or None, to compile."""
    tokens, heads, rank = q_latent.shape
    num_pages, page_size, width = latent_pages.shape
    dtype, stored = q_latent.dtype, latent_pages.dtype
    tile_tokens = min(2 * ROWS // heads, max_query_len or tokens, tokens)
    halves = -(-tile_tokens * heads // ROWS)
    rows = -(-tile_tokens * heads // halves // 8) * 8  # of a half; a TMA copy moves whole tiles of 8 rows
    unit = min(page_size, BLOCK)
    clusters = ctas // halves
    schedule = make_schedule(
        context_lens,
        query_starts,
        tokens=tokens,
        tile_tokens=tile_tokens,
        kv_heads=1,
        page_size=page_size,
        unit=unit,
        window=None,
        page_stride=page_stride,
        page_offset=page_offset,
        ctas=clusters,
    )
    num_tiles = len(schedule.tiles)
    row = jnp.arange(halves * rows).reshape(halves, rows)
    token = jnp.minimum(schedule.first_token[:, None, None] + row // heads, tokens - 1)  # [tiles, halves, rows]
    q = jnp.concatenate([q_latent, q_rope], axis=-1)[token, row % heads]  # [tiles, halves, rows, width]
    # Keys are counted in the order of the block table: a row sees the first of them.
    position, end_key, offset = (schedule.tiles[:, i, None, None] for i in (5, 6, 8))
    visible = keys_before(jnp.minimum(position + row // heads + 1, end_key), page_size, page_stride, offset)
    visible = jnp.pad(visible, ((0, 0), (0, 0), (0, ROWS - rows)), mode="edge").astype(jnp.int32)

    def swizzled(shape: tuple[int, ...], dtype: jax.typing.DTypeLike = dtype, columns: int = 64) -> Any:
        swizzle = plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), swizzle))

    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    copied = plgpu.Barrier(num_arrivals=BLOCK // unit, num_barriers=STAGES)
    kv_smem = [swizzled((STAGES, BLOCK, width))]
    if is_quantised := stored != dtype:
        kv_smem.append(swizzled((2 * STAGES, BLOCK, width), stored))
    kv_empty: Any = plgpu.Barrier(num_arrivals=2, num_barriers=STAGES)
    grid: dict[str, Any] = {"grid": (clusters, halves), "grid_names": ("cluster", "half")}
    is_multicast = halves == 2 and unit > 8  # a copy for two is cut in two between tiles of 8 rows
    if is_multicast:
        kv_empty = plgpu.ClusterBarrier(collective_axes=("half",), num_arrivals=2, num_barriers=STAGES)
        grid = {"grid": (clusters,), "grid_names": ("cluster",), "cluster": (halves,), "cluster_names": ("half",)}
    out, lse, parts, parts_lse = plgpu.kernel(
        functools.partial(
            _kernel,
            scale=scale,
            soft_cap=soft_cap,
            multicast_axis="half" if is_multicast else None,
            interpret=interpret is not None,
        ),
        out_type=(
            jax.ShapeDtypeStruct((num_tiles, halves, rows, rank), dtype),
            float32((num_tiles, halves, ROWS)),
            float32((2 * clusters, halves, rows, rank)),
            float32((2 * clusters, halves, ROWS)),
        ),
        scratch_types={
            # Of a union the interpreter would take the two places for one.
            "kv_union": plgpu.RefUnion(*kv_smem) if interpret is None else kv_smem,
            "q_union": plgpu.RefUnion(
                swizzled((1, ROWS, width)),
                swizzled((2, ROWS, rank // 2)),
                swizzled((2, ROWS, rank // 4), jnp.float32, columns=32),
            ),
            "p_smem": swizzled((ROWS, BLOCK)),
            "visible_smem": plgpu.SMEM((ROWS,), jnp.int32),
            "row_smem": plgpu.SMEM((2, ROWS), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=2),
            "q_empty": plgpu.Barrier(num_arrivals=2),
            "kv_full": plgpu.Barrier(num_barriers=STAGES) if is_quantised else copied,
            "kv_empty": kv_empty,
            "p_full": plgpu.Barrier(),
            "p_empty": plgpu.Barrier(),
        }
        | ({"raw_full": copied} if is_quantised else {}),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="mla_paged_attention",
        **grid,
        **kernel_options(interpret, reduction_scratch_bytes=0),
    )(
        schedule.tiles,
        schedule.ctas,
        block_tables,
        jnp.full((1,), 1 if k_scale is None else k_scale, jnp.float32),
        visible,
        q,
        latent_pages.reshape(num_pages, -1, unit, width),
    )
    return collect(
        schedule,
        out.reshape(num_tiles, 1, -1, rank),
        lse[:, :, :rows].reshape(num_tiles, 1, -1),
        parts.reshape(2 * clusters, -1, rank),
        parts_lse[:, :, :rows].reshape(2 * clusters, -1),
        group=heads,
        interpret=interpret,
    )


def _kernel(*arrays: Any, kv_union: Any, q_union: Any, row_smem: Any, **rest: Any) -> None:
    kv_smem, *raw_smem = kv_union
    q_smem, out_smem, part_smem = q_union
    buffers = {
        "kv_smem": kv_smem,
        "raw_smem": raw_smem[0] if raw_smem else None,
        "q_smem": q_smem,
        "out_smem": out_smem,
        "part_smem": part_smem,
        "factor_smem": row_smem.at[0],
        "lse_smem": row_smem.at[1],
    }
    block = _ThreadBlock(_GlobalMemory(*arrays), **buffers, **rest)
    # A switch, not three conditions in a row: through each the compiler would keep registers for the next.
    lax.switch(lax.axis_index("warpgroup"), (block.left, block.right, block.produce))


class _GlobalMemory(NamedTuple):
    tiles: Any  # [tiles, 9]
    ctas: Any  # [clusters, 5]
    tables: Any  # [seqs, max_pages]
    k_scale: Any  # [1]
    visible: Any  # [tiles, halves, ROWS], how many keys each row sees
    q: Any  # [tiles, halves, rows, width]
    kv: Any  # [pages, units, unit, width]
    out: Any  # [tiles, halves, rows, rank]
    lse: Any  # [tiles, halves, ROWS]
    parts: Any  # [2 * clusters, halves, rows, rank]
    parts_lse: Any  # [2 * clusters, halves, ROWS]


class _Item(NamedTuple):
    """What a thread block computes of a tile of `keys` keys: blocks `begin` to `end`, `before` + i being i's in the share."""

    tile: Array
    keys: Array
    before: Array
    begin: Array
    end: Array
    is_whole: Array

    def place_of(self, i: Array) -> Array:
        """Where in shared memory block i lies."""
        return lax.rem(self.before + i, jnp.int32(STAGES))


@dataclass(frozen=True)
class _ThreadBlock:
    """A thread block's memories and barriers, and what its three warpgroups do with them: `left`, `right`, `produce`."""

    gmem: _GlobalMemory
    kv_smem: Any  # [STAGES, BLOCK, width]
    raw_smem: Any  # [2 * STAGES, BLOCK, width] or None: of quantised pages
    q_smem: Any  # [1, ROWS, width]
    out_smem: Any  # [2, ROWS, rank / 2]
    part_smem: Any  # [2, ROWS, rank / 4]
    p_smem: Any  # [ROWS, BLOCK]
    visible_smem: Any  # [ROWS]
    factor_smem: Any  # [ROWS]
    lse_smem: Any  # [ROWS]
    q_full: Any
    q_empty: Any
    kv_full: Any
    kv_empty: Any
    p_full: Any
    p_empty: Any
    scale: float
    soft_cap: float | None
    multicast_axis: str | None
    interpret: bool
    raw_full: Any = None

    def each_item(self, body: Callable[[_Item], None]) -> None:
        cluster = lax.axis_index("cluster")
        share_begin, share_end = self.gmem.ctas[cluster, 0], self.gmem.ctas[cluster, 1]

        @pl.loop(self.gmem.ctas[cluster, 2], self.gmem.ctas[cluster, 3])
        def _item(tile: Array) -> None:
            first_block, blocks = self.gmem.tiles[tile, 1], self.gmem.tiles[tile, 2]
            before = first_block - share_begin
            begin, end = jnp.maximum(-before, 0), jnp.minimum(share_end - first_block, blocks)
            keys = self.gmem.visible[tile, self.gmem.visible.shape[1] - 1, ROWS - 1]
            item = _Item(tile, keys, before, begin, end, end - begin == blocks)
            pl.when(begin < end)(lambda: body(item))  # there are tiles without keys between others, of dealt pages

    def set_registers(self, role: int) -> None:
        """Gives a thread its registers: of 168 at first the producer leaves some to the two consumers, or waits for ever."""
        consumer, producer = (232, 40) if self.raw_smem is None else (216, 72)
        if role == PRODUCER:
            plgpu.set_max_registers(producer, action="decrease")
        else:
            plgpu.set_max_registers(consumer, action="increase")

    def produce(self) -> None:
        self.set_registers(PRODUCER)
        half, rows = lax.axis_index("half"), self.gmem.q.shape[2]
        units, unit = self.gmem.kv.shape[1:3]  # of a page
        copies = BLOCK // unit

        @self.each_item
        def _item(item: _Item) -> None:
            seq, last_unit = self.gmem.tiles[item.tile, 0], self.gmem.tiles[item.tile, 4]

            def fetch(i: Array) -> None:
                index = [jnp.minimum(i * copies + j, last_unit) for j in range(copies)]  # past it that again, masked
                pages = [self.gmem.tables[seq, lax.div(x, jnp.int32(units))] for x in index]
                place = item.place_of(i)
                plgpu.barrier_wait(self.kv_empty.at[place])
                to, full = self.kv_smem.at[place], self.kv_full.at[place]
                if self.raw_smem is not None:
                    to, full = self.raw_smem.at[2 * place], self.raw_full.at[place]
                for j in range(copies):
                    plgpu.copy_gmem_to_smem(
                        self.gmem.kv.at[pages[j], lax.rem(index[j], jnp.int32(units))],
                        to.at[pl.ds(j * unit, unit)],
                        full,
                        collective_axes=self.multicast_axis,
                    )

            fetch(item.begin)
            plgpu.barrier_wait(self.q_empty)
            plgpu.copy_gmem_to_smem(self.gmem.q.at[item.tile, half], self.q_smem.at[0, pl.ds(0, rows)], self.q_full)
            plgpu.copy_gmem_to_smem(self.gmem.visible.at[item.tile, half], self.visible_smem, self.q_full)

            @pl.loop(item.begin, item.end)
            def _block(i: Array) -> None:
                if self.raw_smem is not None:
                    self.widen(item.place_of(i))

                @pl.when(i + 1 < item.end)
                def _next() -> None:
                    fetch(i + 1)

        plgpu.barrier_wait(self.q_empty)
        for place in range(STAGES):
            plgpu.barrier_wait(self.kv_empty.at[place])

    def widen(self, place: Array) -> None:
        """Replaces the quantised block at a place by its values in 16 bits: the second 32 keys, then the first.

        The second go where nothing is; the first go over the quantised values of both, and a store waits for all threads'
        loads. A thread holds runs of 8 values, which it loads and stores without bank conflicts.
        """
        wide, keys = self.kv_smem.at[place], BLOCK // 2
        layout = plgpu.Layout.SMEM_GMEM_COPY((keys, wide.shape[1]), wide.dtype, 128)
        plgpu.barrier_wait(self.raw_full.at[place])
        for rows in (pl.ds(keys, keys), pl.ds(0, keys)):
            values = plgpu.layout_cast(self.raw_smem.at[2 * place, rows][...], layout)
            if values.dtype != jnp.int8:  # there is no way from fp8 to bfloat16 but by these two
                values = values.astype(jnp.float16).astype(jnp.float32)
            wide.at[rows][...] = values.astype(wide.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.kv_full.at[place])

    def begin_consumer(self, side: int) -> None:
        self.set_registers(side)
        plgpu.barrier_arrive(self.q_empty)
        for place in range(STAGES):
            plgpu.barrier_arrive(self.kv_empty.at[place])

    def left(self) -> None:
        self.begin_consumer(LEFT)
        half = lax.axis_index("half")
        k_scale = self.gmem.k_scale[0]

        @self.each_item
        def _item(item: _Item) -> None:
            least_visible = self.gmem.visible[item.tile, half, 0]
            plgpu.barrier_wait(self.q_full)
            visible = plgpu.layout_cast(self.visible_smem[...], ROW_LAYOUT)

            def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                acc, top, total = carry
                place = item.place_of(i)
                plgpu.barrier_wait(self.kv_full.at[place])
                s = self.logits(place, k_scale)

                def mask(s: Array) -> Array:
                    key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=LAYOUT)
                    # Not all 16 of a thread's keys, which the compiler would hold in registers through the loop
                    in_eight, eights = key & 7, key & ~7
                    return jnp.where(in_eight < _over_rows(visible - i * BLOCK, s.shape) - eights, s, -jnp.inf)

                s = lax.cond((i + 1) * BLOCK > least_visible, mask, lambda s: s, s)
                new_top = jnp.maximum(top, jnp.round(s.max(axis=1)))
                fade = jnp.exp2(top - new_top)
                p = jnp.exp2(s - _over_rows(new_top, s.shape))
                total = total * fade + p.sum(axis=1)
                plgpu.barrier_wait(self.p_empty)
                self.p_smem[...] = p.astype(self.p_smem.dtype)
                self.factor_smem[...] = fade
                plgpu.commit_smem()
                plgpu.barrier_arrive(self.p_full)
                acc = self.add_weighted(acc, fade, item, i, LEFT)
                plgpu.barrier_arrive(self.kv_empty.at[place])
                return acc, new_top, total

            top = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW_LAYOUT)
            total = plgpu.layout_cast(jnp.full((ROWS,), 0.0, jnp.float32), ROW_LAYOUT)
            acc, top, total = lax.fori_loop(item.begin, item.end, step, (self.zeros(), top, total))
            factor = k_scale / jnp.where(total > 0, total, 1.0)
            plgpu.barrier_wait(self.p_empty)
            self.factor_smem[...] = factor
            self.lse_smem[...] = (top + jnp.log2(total)) / LOG2E
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.p_full)
            self.store(acc * _over_rows(factor, acc.shape), item, LEFT)

        plgpu.barrier_wait(self.p_empty)

    def right(self) -> None:
        self.begin_consumer(RIGHT)
        plgpu.barrier_arrive(self.p_empty)

        @self.each_item
        def _item(item: _Item) -> None:
            def step(i: Array, acc: Array) -> Array:
                place = item.place_of(i)
                plgpu.barrier_wait(self.kv_full.at[place])
                plgpu.barrier_wait(self.p_full)
                fade = plgpu.layout_cast(self.factor_smem[...], ROW_LAYOUT)
                acc = self.add_weighted(acc, fade, item, i, RIGHT)
                plgpu.barrier_arrive(self.p_empty)
                plgpu.barrier_arrive(self.kv_empty.at[place])
                return acc

            acc = lax.fori_loop(item.begin, item.end, step, self.zeros())
            plgpu.barrier_wait(self.p_full)
            factor = plgpu.layout_cast(self.factor_smem[...], ROW_LAYOUT)
            plgpu.barrier_arrive(self.p_empty)
            self.store(acc * _over_rows(factor, acc.shape), item, RIGHT)

    def zeros(self) -> Array:
        """The output of a side before the first block."""
        return plgpu.layout_cast(jnp.full((ROWS, self.gmem.out.shape[-1] // 2), 0.0, jnp.float32), LAYOUT)

    def logits(self, place: Array, k_scale: Array) -> Array:
        """Of the block of keys at a place, in base 2."""
        k = self.kv_smem.at[place]
        # The index is 0, but ptxas does not know: it would keep the descriptors of all of q_smem, and spill them.
        q = self.q_smem.at[jnp.minimum(place, 0)]
        self.show_reads(self.q_smem.at[0, pl.ds(0, self.gmem.q.shape[2])], k)

        def product(acc: Any) -> Array:
            plgpu.wgmma(acc, q, k.transpose((1, 0)))
            return acc[...]

        s = pl.run_scoped(product, plgpu.ACC((ROWS, BLOCK), jnp.float32))
        scale = self.scale * k_scale
        if self.soft_cap is None:
            return s * (scale * LOG2E)
        # tanh by exp2: the hardware's own is good to 11 bits
        return self.soft_cap * LOG2E * (1 - 2 / (jnp.exp2(s * (scale * (2 * LOG2E / self.soft_cap))) + 1))

    def add_weighted(self, acc: Array, fade: Array, item: _Item, i: Array, side: int) -> Array:
        """`fade * acc + P V` of a side's columns and block i, whose slots past the tile's last key are cleared first."""
        _, columns = acc.shape
        place = item.place_of(i)
        keys = item.keys - i * BLOCK

        @pl.when(keys < BLOCK)
        def _clear_past_end() -> None:
            @pl.loop(0, columns // 64)  # few at a time, for want of registers
            def _columns(j: Array) -> None:
                v = self.kv_smem.at[place, :, pl.ds(side * columns + j * 64, 64)]
                key = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=LAYOUT)
                values = plgpu.layout_cast(v[...], LAYOUT)
                v[...] = jnp.where(key < keys, values, jnp.zeros_like(values))

            plgpu.commit_smem()

        v = self.kv_smem.at[place, :, pl.ds(side * columns, columns)]
        acc *= _over_rows(fade, acc.shape)
        if not self.interpret:
            return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, self.p_smem, v))(plgpu.ACC.init(acc))
        self.show_reads(self.p_smem, v)  # nor does the interpreter know an accumulator that is not empty at first

        def product(product_acc: Any) -> Array:
            plgpu.wgmma(product_acc, self.p_smem, v)
            return product_acc[...]

        return acc + pl.run_scoped(product, plgpu.ACC((ROWS, columns), jnp.float32))

    def show_reads(self, *operands: Any) -> None:
        """Lets the interpreter see what wgmma reads: it does not look for races there by itself."""
        if self.interpret:
            for operand in operands:
                _ = operand[...]
            plgpu.commit_smem()

    def store(self, acc: Array, item: _Item, side: int) -> None:
        """A side of the item's output, if it is the whole item, or of a piece; left's log-sum-exps with it."""
        cluster, half = lax.axis_index("cluster"), lax.axis_index("half")
        rows, columns = self.gmem.q.shape[2], acc.shape[1]

        @pl.when(item.is_whole)
        def _final() -> None:
            self.out_smem.at[side][...] = acc.astype(self.out_smem.dtype)
            plgpu.commit_smem()
            out = self.gmem.out.at[item.tile, half, :, pl.ds(side * columns, columns)]
            plgpu.copy_smem_to_gmem(self.out_smem.at[side, pl.ds(0, rows)], out)
            if side == LEFT:
                plgpu.copy_smem_to_gmem(self.lse_smem, self.gmem.lse.at[item.tile, half])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(jnp.logical_not(item.is_whole))
        def _piece() -> None:
            part = 2 * cluster + (item.begin == 0)
            if side == LEFT:
                plgpu.copy_smem_to_gmem(self.lse_smem, self.gmem.parts_lse.at[part, half])
            for at in (0, columns // 2):
                self.part_smem.at[side][...] = acc[:, at : at + columns // 2]
                plgpu.commit_smem()
                out = self.gmem.parts.at[part, half, :, pl.ds(side * columns + at, columns // 2)]
                plgpu.copy_smem_to_gmem(self.part_smem.at[side, pl.ds(0, rows)], out)
                plgpu.wait_smem_to_gmem(0)

        plgpu.barrier_arrive(self.q_empty)


def _over_rows(x: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(x, shape, [0])
