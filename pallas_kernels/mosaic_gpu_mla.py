"""Latent attention for NVIDIA Hopper."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int, Num

from paxserve.pallas_kernels.layout import Scale
from paxserve.pallas_kernels.mosaic_gpu_merge import LOWEST, collect, kernel_options
from paxserve.pallas_kernels.mosaic_gpu_schedule import BLOCK, make_schedule

ROWS = 64  # query rows of a thread block
STAGES = 2  # blocks of keys in shared memory
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 208, 96
LOG2E = math.log2(math.e)
LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT = LAYOUT.reduce(1)
LEFT, RIGHT, PRODUCER = range(3)


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
    ctas: int,
    interpret: Any = None,
) -> tuple[Float[Array, "tokens heads kv_lora_rank"], Float32[Array, "tokens heads"]]:
    tokens, heads, rank = q_latent.shape
    num_pages, page_size, width = latent_pages.shape
    dtype = q_latent.dtype
    tile_tokens = min(max(2 * ROWS // heads, 1), max_query_len or tokens, tokens)
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
        unit=unit,
        window=None,
        ctas=clusters,
    )
    num_tiles = len(schedule.tiles)
    token = jnp.arange(halves * rows).reshape(halves, rows) // heads  # of a tile
    q = jnp.concatenate([q_latent, q_rope], axis=-1)
    q_rows = q[
        jnp.minimum(schedule.first_token[:, None, None] + token, tokens - 1), jnp.arange(halves * rows).reshape(halves, rows) % heads
    ]
    position, end_key = schedule.tiles[:, 4], schedule.tiles[:, 5]
    visible = jnp.minimum((position + 1)[:, None, None] + jnp.pad(token, ((0, 0), (0, ROWS - rows)), mode="edge"), end_key[:, None, None])

    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)

    def swizzled(shape: tuple[int, ...], dtype: jax.typing.DTypeLike = dtype, columns: int = 64) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)))

    cluster: dict[str, Any] = {}
    empty_barrier = plgpu.Barrier(num_arrivals=2, num_barriers=STAGES)
    if halves == 2:
        cluster = {"cluster": (2,), "cluster_names": ("half",)}
        empty_barrier = plgpu.ClusterBarrier(collective_axes=("half",), num_arrivals=2, num_barriers=STAGES)
    scales = jnp.stack([jnp.float32(1 if k_scale is None else k_scale)])
    out, lse, parts, parts_lse = plgpu.kernel(
        functools.partial(_kernel, scale=scale, soft_cap=soft_cap, interpret=interpret is not None),
        out_type=(
            jax.ShapeDtypeStruct((num_tiles, halves, rows, rank), dtype),
            float32((num_tiles, halves, ROWS)),
            float32((2 * clusters, halves, rows, rank)),
            float32((2 * clusters, halves, ROWS)),
        ),
        scratch_types=dict(
            kv_or_raw_smem=plgpu.RefUnion(
                swizzled((STAGES, BLOCK, width)),
                *(() if latent_pages.dtype == dtype else (plgpu.SMEM((2 * STAGES, BLOCK, width), latent_pages.dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64))),)),
            ),
            q_or_out_smem=plgpu.RefUnion(
                swizzled((1, ROWS, width)),
                swizzled((2, ROWS, rank // 2)),
                swizzled((2, ROWS, rank // 4), dtype=jnp.float32, columns=32),
            ),
            p_smem=swizzled((ROWS, BLOCK)),
            visible_smem=plgpu.SMEM((ROWS,), jnp.int32),
            row_smem=plgpu.SMEM((2, ROWS), jnp.float32),
            q_full=plgpu.Barrier(num_arrivals=2),
            q_empty=plgpu.Barrier(num_arrivals=2),
            kv_full=plgpu.Barrier(num_arrivals=BLOCK // unit if latent_pages.dtype == dtype else 1, num_barriers=STAGES),
            raw_full=None if latent_pages.dtype == dtype else plgpu.Barrier(num_arrivals=BLOCK // unit, num_barriers=STAGES),
            kv_empty=empty_barrier,
            p_full=plgpu.Barrier(),
            p_empty=plgpu.Barrier(),
        ),
        grid=(clusters,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="mla_paged_attention",
        **kernel_options(interpret, reduction_scratch_bytes=0),
        **cluster,
    )(
        schedule.tiles,
        schedule.ctas,
        block_tables,
        scales,
        visible.astype(jnp.int32),
        q_rows,
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


def _kernel(
    tiles_ref: Any,  # [tiles, 7]
    ctas_ref: Any,  # [clusters, 5]
    tables_ref: Any,  # [seqs, max_pages]
    scales_ref: Any,  # [1]
    visible_ref: Any,  # [tiles, halves, ROWS]
    q_ref: Any,  # [tiles, halves, rows, width]
    kv_ref: Any,  # [pages, units, unit, width]
    out_ref: Any,  # [tiles, halves, rows, rank]
    lse_ref: Any,  # [tiles, halves, ROWS]
    parts_ref: Any,  # [2 * clusters, halves, rows, rank]
    parts_lse_ref: Any,  # [2 * clusters, halves, ROWS]
    *,
    kv_or_raw_smem: Any,
    q_or_out_smem: Any,
    p_smem: Any,
    visible_smem: Any,
    row_smem: Any,
    q_full: Any,
    q_empty: Any,
    kv_full: Any,
    raw_full: Any,
    kv_empty: Any,
    p_full: Any,
    p_empty: Any,
    scale: float,
    soft_cap: float | None,
    interpret: bool,
) -> None:
    _, halves, rows, rank = out_ref.shape
    units, unit = kv_ref.shape[1:3]
    columns = rank // 2
    kv_smem, *raw = kv_or_raw_smem
    raw_smem = raw[0] if raw else None
    q_smem, out_smem, part_smem = q_or_out_smem
    fade_smem, lse_smem = row_smem.at[0], row_smem.at[1]
    cta, role = lax.axis_index("cta"), lax.axis_index("warpgroup")
    half = lax.axis_index("half") if halves == 2 else 0
    share_begin, share_end = ctas_ref[cta, 0], ctas_ref[cta, 1]

    def range_of(tile: Array) -> tuple[Array, Array]:
        first_block, blocks = tiles_ref[tile, 1], tiles_ref[tile, 2]
        return jnp.maximum(share_begin - first_block, 0), jnp.minimum(share_end - first_block, blocks)

    def slot_of(tile: Array, i: Array) -> Array:
        return lax.rem(tiles_ref[tile, 1] + i - share_begin, jnp.int32(STAGES))

    items = functools.partial(pl.loop, ctas_ref[cta, 2], ctas_ref[cta, 3])

    @pl.when(role == PRODUCER)
    def _produce() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        @items()
        def _item(tile: Array) -> None:
            begin, end = range_of(tile)
            seq, first_unit, end_key = tiles_ref[tile, 0], tiles_ref[tile, 3], tiles_ref[tile, 5]
            last_unit = lax.div(end_key - 1, jnp.int32(unit))

            def fetch(i: Array) -> None:
                slot = slot_of(tile, i)
                plgpu.barrier_wait(kv_empty.at[slot])
                for j in range(BLOCK // unit):
                    index = jnp.minimum(first_unit + i * (BLOCK // unit) + j, last_unit)
                    page, place = tables_ref[seq, lax.div(index, jnp.int32(units))], lax.rem(index, jnp.int32(units))
                    plgpu.copy_gmem_to_smem(
                        kv_ref.at[page, place],
                        kv_smem.at[slot, pl.ds(j * unit, unit)] if raw_smem is None else raw_smem.at[2 * slot, pl.ds(j * unit, unit)],
                        (kv_full if raw_smem is None else raw_full).at[slot],
                        collective_axes="half" if halves == 2 else None,
                    )

            def convert(i: Array) -> None:
                slot = slot_of(tile, i)
                plgpu.barrier_wait(raw_full.at[slot])
                x = plgpu.layout_cast(raw_smem.at[2 * slot][...], plgpu.Layout.WGMMA_UPCAST_2X)
                if x.dtype != jnp.int8:
                    x = x.astype(jnp.float16)
                    if kv_smem.dtype == jnp.bfloat16:
                        x = x.astype(jnp.float32)
                x = plgpu.layout_cast(x.astype(kv_smem.dtype), LAYOUT)
                kv_smem.at[slot][...] = x
                plgpu.commit_smem()
                plgpu.barrier_arrive(kv_full.at[slot])

            fetch(begin)
            plgpu.barrier_wait(q_empty)
            plgpu.copy_gmem_to_smem(q_ref.at[tile, half], q_smem.at[0, pl.ds(0, rows)], q_full)
            plgpu.copy_gmem_to_smem(visible_ref.at[tile, half], visible_smem, q_full)

            @pl.loop(begin, end)
            def _block(i: Array) -> None:
                if raw_smem is not None:
                    convert(i)

                @pl.when(i + 1 < end)
                def _next() -> None:
                    fetch(i + 1)

        plgpu.barrier_wait(q_empty)
        for slot in range(STAGES):
            plgpu.barrier_wait(kv_empty.at[slot])

    def begin_consumer() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        plgpu.barrier_arrive(q_empty)
        for slot in range(STAGES):
            plgpu.barrier_arrive(kv_empty.at[slot])

    def over_rows(x: Array, shape: tuple[int, ...]) -> Array:
        return lax.broadcast_in_dim(x, shape, [0])

    def show_reads(*refs: Any) -> None:
        """The interpreter does not look for races of wgmma's operands: reads them for it."""
        if interpret:
            for ref in refs:
                _ = ref[...]
            plgpu.commit_smem()

    def add_weighted(acc: Array, fade: Array, v: Any) -> Array:
        acc *= over_rows(fade, acc.shape)
        if not interpret:
            return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p_smem, v))(plgpu.ACC.init(acc))
        show_reads(p_smem, v)

        def product(product_acc: Any) -> Array:
            plgpu.wgmma(product_acc, p_smem, v)
            return product_acc[...]

        return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))

    def clear_past_end(slot: Array, side: int, keys: Array) -> None:
        @pl.when(keys < BLOCK)
        def _clear() -> None:
            @pl.loop(0, columns // 64)
            def _columns(i: Array) -> None:
                v = kv_smem.at[slot, :, pl.ds(side * columns + i * 64, 64)]
                key = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=LAYOUT)
                values = plgpu.layout_cast(v[...], LAYOUT)
                v[...] = jnp.where(key < keys, values, jnp.zeros_like(values))

            plgpu.commit_smem()

    def store(tile: Array, side: int, acc: Array) -> None:
        begin, end = range_of(tile)
        is_whole = end - begin == tiles_ref[tile, 2]
        at = pl.ds(side * columns, columns)

        @pl.when(is_whole)
        def _final() -> None:
            out_smem.at[side][...] = acc.astype(out_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[side, pl.ds(0, rows)], out_ref.at[tile, half, :, at])
            if side == LEFT:
                plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[tile, half])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(jnp.logical_not(is_whole))
        def _piece() -> None:
            part = 2 * cta + (begin == 0)
            for quarter in range(2):
                at = quarter * columns // 2
                part_smem.at[side][...] = acc[:, at : at + columns // 2]
                plgpu.commit_smem()
                to = parts_ref.at[part, half, :, pl.ds(side * columns + at, columns // 2)]
                plgpu.copy_smem_to_gmem(part_smem.at[side, pl.ds(0, rows)], to)
                if side == LEFT and quarter == 0:
                    plgpu.copy_smem_to_gmem(lse_smem, parts_lse_ref.at[part, half])
                plgpu.wait_smem_to_gmem(0)

        plgpu.barrier_arrive(q_empty)

    @pl.when(role == LEFT)
    def _left() -> None:
        begin_consumer()
        logit_scale = scale * scales_ref[0]

        @items()
        def _item(tile: Array) -> None:
            begin, end = range_of(tile)
            first_unit, end_key = tiles_ref[tile, 3], tiles_ref[tile, 5]
            least_visible = visible_ref[tile, half, 0]
            plgpu.barrier_wait(q_full)
            visible = plgpu.layout_cast(visible_smem[...], ROW_LAYOUT)

            def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                acc, top, total = carry
                slot = slot_of(tile, i)
                block_key = first_unit * unit + i * BLOCK
                plgpu.barrier_wait(kv_full.at[slot])
                show_reads(q_smem.at[0, pl.ds(0, rows)], kv_smem.at[slot])

                def scores(s_acc: Any) -> Array:
                    plgpu.wgmma(s_acc, q_smem.at[jnp.minimum(slot, 0)], kv_smem.at[slot].transpose((1, 0)))
                    return s_acc[...]

                s = pl.run_scoped(scores, plgpu.ACC((ROWS, BLOCK), jnp.float32))
                if soft_cap is None:
                    s *= logit_scale * LOG2E
                else:
                    s = soft_cap * LOG2E * (1 - 2 / (jnp.exp2(s * (2 * LOG2E / soft_cap * logit_scale)) + 1))

                def mask(s: Array) -> Array:
                    column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=LAYOUT)
                    return jnp.where(column < over_rows(visible - block_key, s.shape), s, -jnp.inf)

                s = lax.cond(block_key + BLOCK > least_visible, mask, lambda s: s, s)
                new_top = jnp.maximum(top, jnp.round(s.max(axis=1)))
                fade = jnp.exp2(top - new_top)
                p = jnp.exp2(s - over_rows(new_top, s.shape))
                total = total * fade + p.sum(axis=1)
                plgpu.barrier_wait(p_empty)
                p_smem[...] = p.astype(p_smem.dtype)
                fade_smem[...] = fade
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_full)
                v = kv_smem.at[slot, :, pl.ds(0, columns)]
                clear_past_end(slot, LEFT, end_key - block_key)
                acc = add_weighted(acc, fade, v)
                plgpu.barrier_arrive(kv_empty.at[slot])
                return acc, new_top, total

            top = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW_LAYOUT)
            total = plgpu.layout_cast(jnp.full((ROWS,), 0.0, jnp.float32), ROW_LAYOUT)
            acc = plgpu.layout_cast(jnp.full((ROWS, columns), 0.0, jnp.float32), LAYOUT)
            acc, top, total = lax.fori_loop(begin, end, step, (acc, top, total))
            factor = scales_ref[0] / jnp.where(total > 0, total, 1.0)
            plgpu.barrier_wait(p_empty)
            fade_smem[...] = factor
            lse_smem[...] = (top + jnp.log2(total)) / LOG2E
            plgpu.commit_smem()
            plgpu.barrier_arrive(p_full)
            store(tile, LEFT, acc * over_rows(factor, acc.shape))

        plgpu.barrier_wait(p_empty)

    @pl.when(role == RIGHT)
    def _right() -> None:
        begin_consumer()
        plgpu.barrier_arrive(p_empty)

        @items()
        def _item(tile: Array) -> None:
            begin, end = range_of(tile)
            first_unit, end_key = tiles_ref[tile, 3], tiles_ref[tile, 5]

            def step(i: Array, acc: Array) -> Array:
                slot = slot_of(tile, i)
                block_key = first_unit * unit + i * BLOCK
                plgpu.barrier_wait(kv_full.at[slot])
                plgpu.barrier_wait(p_full)
                fade = plgpu.layout_cast(fade_smem[...], ROW_LAYOUT)
                v = kv_smem.at[slot, :, pl.ds(columns, columns)]
                clear_past_end(slot, RIGHT, end_key - block_key)
                acc = add_weighted(acc, fade, v)
                plgpu.barrier_arrive(p_empty)
                plgpu.barrier_arrive(kv_empty.at[slot])
                return acc

            acc = plgpu.layout_cast(jnp.full((ROWS, columns), 0.0, jnp.float32), LAYOUT)
            acc = lax.fori_loop(begin, end, step, acc)
            plgpu.barrier_wait(p_full)
            acc *= over_rows(plgpu.layout_cast(fade_smem[...], ROW_LAYOUT), acc.shape)
            plgpu.barrier_arrive(p_empty)
            store(tile, RIGHT, acc)
