"""Paged attention for NVIDIA Hopper: TMA page loads and wgmma, in Pallas Mosaic GPU.

One kernel computes decodes and prefills of a ragged batch. The grid is persistent, as many thread blocks as fit
the multiprocessors, each with an equal share of the batch's key blocks (see mosaic_gpu_schedule.py). A thread block is one
warpgroup and goes through its items one after the other:

    q_smem    the item's query rows, row r being head r % group of token r // group
    kv_smem   a ring of blocks of 64 keys, K and V side by side as in the pages; one TMA copy per unit, which is a
              page or 64 tokens of a longer one; in the end the item's output
    wide_smem for 8-bit pages a block in the queries' dtype, since wgmma multiplies like by like
    loop      wait for a block; S = Q K^T; mask; online softmax in base 2 (arXiv:1805.02867); O += P V, P from registers;
              refill the block's place in the ring. The page numbers of the refill are loaded before the wait

64 rows are wgmma's least: a decode fills `group` of them, which by the instructions' count (some 420 a warp for a block)
should still take less time than reading the keys. An item that lies in one share is final; the pieces of others go to
`parts` and a second kernel merges them by their log-sum-exp.

Maxima are rounded to integers, so that every rescaling is by a power of two: P is then rounded to 16 bits alike wherever
an item was cut, and a result does not depend on the rest of the batch but for the order of float32 sums.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice
from jaxtyping import Array, Float, Float32, Int, Num

from paxserve.pallas_kernels import mosaic_gpu_mla
from paxserve.pallas_kernels.layout import MLASizes, Scale, Sizes, latent_rows, load, split_kv, storage_dtype
from paxserve.pallas_kernels.mosaic_gpu_merge import LOWEST, collect, kernel_options
from paxserve.pallas_kernels.mosaic_gpu_schedule import BLOCK, make_schedule
from paxserve.pallas_kernels.target import target
from paxserve.pallas_kernels.xla import finish

HOPPER = re.compile(r"\bG?H(20|[128]00)\b")  # of the names of devices: H100, H200, GH200 and those for China
ROWS = 64  # query rows of an item
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
SHARED_BYTES = 233472  # of a multiprocessor
OTHER_SHARED_BYTES = 5120  # of a thread block, beside its queries and keys: barriers, alignment, what the system takes
EIGHT_BIT = ("int8", "float8_e4m3fn")  # pages that are converted to the queries' dtype, block by block
MAX_STAGES = 4  # blocks of keys in shared memory
INTERPRETED_CTAS = 5
LOG2E = math.log2(math.e)
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    kv_pages: Num[Array, "pages kv_heads slots width"],
    block_tables: Int[Array, "seqs max_pages"],
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    *,
    scale: float,
    window: int | Int[Array, ""] | None,
    soft_cap: float | None,
    sinks: Float[Array, "heads"] | None,
    k_scale: Scale | None,
    v_scale: Scale | None,
    max_query_len: int | None,
    page_stride: int,
    page_offset: Int[Array, "seqs"] | None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float32[Array, "tokens heads"]]:
    """See `paxserve.pallas_kernels.paged_attention`. Stacked pages, a CPU's, are laid side by side first."""
    head_dim = q.shape[-1]
    kv_pages = load(kv_pages)
    if kv_pages.shape[-1] == head_dim:
        kv_pages = jnp.concatenate(split_kv(kv_pages, head_dim), axis=-1)
    return attend(
        q,
        kv_pages,
        block_tables,
        context_lens,
        query_starts,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        max_query_len=max_query_len,
        page_stride=page_stride,
        page_offset=page_offset,
        **_machine(ctas_per_sm(head_dim, kv_pages.dtype)),
    )


def mla_paged_attention(
    q_latent: Float[Array, "tokens heads kv_lora_rank"],
    q_rope: Float[Array, "tokens heads qk_rope_head_dim"],
    latent_pages: Num[Array, "pages *slots width"],
    block_tables: Int[Array, "seqs max_pages"],
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    **options: Any,
) -> tuple[Float[Array, "tokens heads kv_lora_rank"], Float32[Array, "tokens heads"]]:
    """See `paxserve.pallas_kernels.mla_paged_attention`, with all of its options. Paired pages, a TPU's, are unpaired first."""
    return mosaic_gpu_mla.attend(
        q_latent,
        q_rope,
        latent_rows(load(latent_pages), q_latent.shape[-1], q_rope.shape[-1]),
        block_tables,
        context_lens,
        query_starts,
        **options,
        **_machine(1),
    )


def _machine(ctas_per_sm: int) -> dict[str, Any]:
    """What the kernels are to run on: thread blocks that fill the GPU which the program is for; on CPU the interpreter."""
    device = target()
    if device.platform == "cpu":
        return {"ctas": INTERPRETED_CTAS, "interpret": plgpu.InterpretGPUParams()}  # type: ignore[attr-defined]
    assert device.num_cores is not None, f"a {device.device_kind} has multiprocessors"
    return {"ctas": ctas_per_sm * device.num_cores, "interpret": None}


def why_not(device: AbstractDevice, dtypes: tuple[jax.typing.DTypeLike, ...], sizes: Sizes) -> str | None:
    """Why the kernels cannot compute attention on a device, of these dtypes or sizes; None if they can."""
    if device.platform == "cpu":
        if not hasattr(plgpu, "InterpretGPUParams"):
            return f"on CPU it is interpreted, by JAX 0.11 or newer, and this is {jax.__version__}"
    elif not HOPPER.search(device.device_kind):
        return f"it runs on Hopper GPUs, not on {device.device_kind}"
    queries, *pages = (jnp.dtype(dtype) for dtype in dtypes)
    if queries.name not in ("bfloat16", "float16"):
        return f"it does not read {queries}"
    for dtype in pages:
        if dtype.name not in EIGHT_BIT and dtype != storage_dtype(queries, device.platform):
            return f"it does not read {dtype} with {queries} queries"
    if sizes.page_size % 8 or (BLOCK % sizes.page_size and sizes.page_size % BLOCK):
        return f"it reads pages of 8, 16 and 32 tokens and of multiples of {BLOCK}, not of {sizes.page_size}"
    if isinstance(sizes, MLASizes):
        return mosaic_gpu_mla.why_not(sizes)
    if sizes.head_dim not in HEAD_DIMS:
        return f"it computes head_dim {', '.join(map(str, HEAD_DIMS))}, not {sizes.head_dim}"
    if sizes.heads // sizes.kv_heads > ROWS:
        return f"it computes up to {ROWS} query heads per KV head, not {sizes.heads // sizes.kv_heads}"
    return None


def ctas_per_sm(head_dim: int, pages_dtype: jax.typing.DTypeLike) -> int:
    """Thread blocks that run on a multiprocessor together, as their registers allow; shared memory is cut to fit."""
    if head_dim > 128:
        return 1
    return 3 if head_dim == 64 and jnp.dtype(pages_dtype).name not in EIGHT_BIT else 2


def attend(
    q: Float[Array, "tokens heads head_dim"],
    kv_pages: Num[Array, "pages kv_heads page_size two_head_dim"],
    block_tables: Int[Array, "seqs max_pages"],
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    *,
    scale: float,
    window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    max_query_len: int | None = None,
    page_stride: int = 1,
    page_offset: Int[Array, "seqs"] | None = None,
    ctas: int,
    interpret: Any = None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float32[Array, "tokens heads"]]:
    """`paged_attention` with `ctas` thread blocks; `interpret` is `plgpu.InterpretGPUParams` or None, to compile."""
    tokens, heads, head_dim = q.shape
    num_pages, kv_heads, page_size, width = kv_pages.shape
    group = heads // kv_heads
    tile_tokens = min(ROWS // group, max_query_len or tokens, tokens)
    rows = -(-tile_tokens * group // 8) * 8  # a TMA copy moves whole tiles of 8 rows
    unit = min(page_size, BLOCK)
    widens = kv_pages.dtype.name in EIGHT_BIT
    schedule = make_schedule(
        context_lens,
        query_starts,
        tokens=tokens,
        tile_tokens=tile_tokens,
        kv_heads=kv_heads,
        page_size=page_size,
        unit=unit,
        window=window,
        page_stride=page_stride,
        page_offset=page_offset,
        ctas=ctas,
    )
    num_tiles = len(schedule.tiles)
    shared = SHARED_BYTES // ctas_per_sm(head_dim, kv_pages.dtype) - OTHER_SHARED_BYTES
    shared -= (ROWS * head_dim + widens * BLOCK * width) * q.dtype.itemsize
    stages = min(shared // (BLOCK * width * kv_pages.dtype.itemsize), MAX_STAGES)

    token = schedule.first_token[:, None] + jnp.arange(rows) // group  # [tiles, rows]
    by_head = q.reshape(tokens, kv_heads, group, head_dim).swapaxes(0, 1)
    q_rows = by_head[:, jnp.minimum(token, tokens - 1), jnp.arange(rows) % group]  # [kv_heads, tiles, rows, head_dim]
    q_rows = q_rows.swapaxes(0, 1)

    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)

    def swizzled(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, part: int = head_dim) -> Any:
        """Shared memory whose slices of `part` columns TMA, wgmma and registers can reach."""
        itemsize = jnp.dtype(dtype).itemsize
        columns = math.gcd(part, 128 // itemsize)
        transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * itemsize)
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    out, lse, parts, parts_lse = plgpu.kernel(
        functools.partial(
            _attend_kernel,
            group=group,
            scale=scale,
            soft_cap=soft_cap,
            has_window=window is not None,
            page_stride=page_stride,
            interpret=interpret is not None,
        ),
        out_type=(
            float32(q_rows.shape),
            float32((num_tiles, kv_heads, ROWS)),
            float32((2 * ctas, rows, head_dim)),
            float32((2 * ctas, ROWS)),
        ),
        scratch_types=[
            plgpu.RefUnion(
                swizzled((stages, BLOCK, width), kv_pages.dtype, math.gcd(width, 64) if widens else head_dim),
                swizzled((ROWS, head_dim), jnp.float32),
            ),
            swizzled((1, BLOCK, width), q.dtype) if widens else None,
            swizzled((1, ROWS, head_dim), q.dtype),
            plgpu.SMEM((ROWS,), jnp.float32),
            swizzled((ROWS, BLOCK), q.dtype, BLOCK) if interpret is not None else None,
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=BLOCK // unit, num_barriers=stages),
        ],
        grid=(ctas,),
        grid_names=("cta",),
        kernel_name="paged_attention",
        **kernel_options(interpret),
    )(
        schedule.tiles,
        schedule.ctas,
        block_tables,
        None if k_scale is None else jnp.asarray(k_scale, jnp.float32).reshape(1),
        q_rows,
        kv_pages.reshape(num_pages, kv_heads, -1, unit, width),
    )
    out, lse = collect(schedule, out, lse, parts, parts_lse[:, :rows], group=group, interpret=interpret)
    out, lse = finish(out, lse, v_scale, sinks)
    return out.astype(q.dtype), lse


def _attend_kernel(
    tiles_ref: Any,  # [tiles, 9]
    ctas_ref: Any,  # [ctas, 5]
    tables_ref: Any,  # [seqs, max_pages]
    k_scale_ref: Any,  # [1] or None
    q_ref: Any,  # [tiles, kv_heads, rows, head_dim]
    kv_ref: Any,  # [pages, kv_heads, units, unit, 2 * head_dim]
    out_ref: Any,  # [tiles, kv_heads, rows, head_dim]
    lse_ref: Any,  # [tiles, kv_heads, ROWS]
    parts_ref: Any,  # [2 * ctas, rows, head_dim]
    parts_lse_ref: Any,  # [2 * ctas, ROWS]
    kv_or_out_smem: Any,
    wide_smem: Any,
    q_smem: Any,
    row_smem: Any,
    p_smem: Any,
    q_barrier: Any,
    kv_barriers: Any,
    *,
    group: int,
    scale: float,
    soft_cap: float | None,
    has_window: bool,
    page_stride: int,
    interpret: bool,
) -> None:
    _, kv_heads, rows, head_dim = q_ref.shape
    units, unit = kv_ref.shape[2:4]  # of a page
    page_size = units * unit
    kv_smem, out_smem = kv_or_out_smem
    stages = kv_smem.shape[0]
    wgmma_layout = plgpu.Layout.WGMMA
    cta = lax.axis_index("cta")
    span = BLOCK + (BLOCK // unit - 1) * (page_stride - 1) * unit  # from a block's first key to its last

    def keys_of_block(shape: tuple[int, ...], axis: int, layout: plgpu.Layout = wgmma_layout) -> Array:
        """How far each key of a block is from its first: the block's units may be of pages that are far apart."""
        key = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
        return key if page_stride == 1 else key + lax.div(key, jnp.int32(unit)) * ((page_stride - 1) * unit)

    def over_rows(x: Array, shape: tuple[int, ...]) -> Array:
        return lax.broadcast_in_dim(x, shape, [0])

    @pl.loop(ctas_ref[cta, 2], ctas_ref[cta, 3])
    def _item(item: Array) -> None:
        tile, head = lax.div(item, jnp.int32(kv_heads)), lax.rem(item, jnp.int32(kv_heads))
        seq, first_block, blocks, first_unit, last_unit, position, end_key, first_key, page_offset = (
            tiles_ref[tile, i] for i in range(9)
        )
        item_begin = first_block + head * blocks
        begin = jnp.maximum(ctas_ref[cta, 0] - item_begin, 0)
        end = jnp.minimum(ctas_ref[cta, 1] - item_begin, blocks)

        def locate(i: Array) -> tuple[tuple[Array, Array], ...]:
            """The page of each unit of block i and its place there; past the last unit that one again, masked."""
            index = [jnp.minimum(first_unit + i * (BLOCK // unit) + j, last_unit) for j in range(BLOCK // unit)]
            return tuple((tables_ref[seq, lax.div(x, jnp.int32(units))], lax.rem(x, jnp.int32(units))) for x in index)

        def first_key_of(i: Array) -> Array:
            """The position of block i's first key."""
            x = first_unit + i * (BLOCK // unit)
            if page_stride == 1:
                return x * unit
            page, place = lax.div(x, jnp.int32(units)), lax.rem(x, jnp.int32(units))
            return (page_offset + page * page_stride) * page_size + place * unit

        def fetch(i: Array, places: tuple[tuple[Array, Array], ...]) -> None:
            slot = lax.rem(i, jnp.int32(stages))
            for j, (page, place) in enumerate(places):
                block = kv_smem.at[slot, pl.ds(j * unit, unit)]
                plgpu.copy_gmem_to_smem(kv_ref.at[page, head, place], block, kv_barriers.at[slot])

        plgpu.copy_gmem_to_smem(q_ref.at[tile, head], q_smem.at[0, pl.ds(0, rows)], q_barrier)

        @pl.loop(begin, jnp.minimum(begin + stages, end))
        def _fill(i: Array) -> None:
            fetch(i, locate(i))

        plgpu.barrier_wait(q_barrier)

        def step(i: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            acc, top, total = carry
            refill = locate(i + stages)
            slot = lax.rem(i, jnp.int32(stages))
            block_key = first_key_of(i)
            plgpu.barrier_wait(kv_barriers.at[slot])
            nought = jnp.minimum(slot, 0)  # ptxas does not know: it would keep descriptors of all of these, and spill
            q = q_smem.at[nought]
            kv = kv_smem.at[slot] if wide_smem is None else wide_smem.at[nought]
            k, v = kv.at[:, pl.ds(0, head_dim)], kv.at[:, pl.ds(head_dim, head_dim)]

            def is_before_end(shape: tuple[int, int], layout: plgpu.Layout) -> Array:
                return keys_of_block(shape, 0, layout) < end_key - block_key

            if wide_smem is None:
                pl.when(block_key + span > end_key)(lambda: _copy_keys(v, v, is_before_end))
            else:
                _copy_keys(kv_smem.at[slot], kv, is_before_end)

            if interpret:  # the interpreter does not look for races of wgmma's operands: read them
                _ = q_smem.at[0, pl.ds(0, rows)][...], k[...], v[...]

            def scores(s_acc: Any) -> Array:
                plgpu.wgmma(s_acc, q, k.transpose((1, 0)))
                return s_acc[...]

            logit_scale = scale if k_scale_ref is None else scale * k_scale_ref[0]
            s = pl.run_scoped(scores, plgpu.ACC((ROWS, BLOCK), jnp.float32))
            if soft_cap is None:
                s *= logit_scale * LOG2E
            else:  # tanh by exp2: the hardware's own is good to 11 bits
                s = soft_cap * LOG2E * (1 - 2 / (jnp.exp2(s * (2 * LOG2E / soft_cap * logit_scale)) + 1))

            def mask(s: Array) -> Array:
                row, key = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=wgmma_layout), keys_of_block(s.shape, 1)
                token = lax.div(row, jnp.int32(group))
                visible = key <= token + (position - block_key)
                if has_window:
                    visible &= key >= token + (first_key - block_key)
                return jnp.where(visible, s, -jnp.inf)

            masked = block_key + span > position + 1
            if has_window:
                masked |= block_key < first_key + ROWS // group
            s = lax.cond(masked, mask, lambda s: s, s)
            new_top = jnp.maximum(top, jnp.round(s.max(axis=1)))
            fade = jnp.exp2(top - new_top)
            p = jnp.exp2(s - over_rows(new_top, s.shape))
            total = total * fade + p.sum(axis=1)
            acc *= over_rows(fade, acc.shape)
            acc = _add_weighted(acc, p.astype(q_smem.dtype), v, p_smem)

            @pl.when(i + stages < end)
            def _refill() -> None:
                fetch(i + stages, refill)

            return acc, new_top, total

        top = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW_LAYOUT)
        total = plgpu.layout_cast(jnp.full((ROWS,), 0.0, jnp.float32), ROW_LAYOUT)
        acc = plgpu.layout_cast(jnp.full((ROWS, head_dim), 0.0, jnp.float32), wgmma_layout)
        acc, top, total = lax.fori_loop(begin, end, step, (acc, top, total))

        acc *= over_rows(1 / jnp.where(total > 0, total, 1.0), acc.shape)
        lse = (top + jnp.log2(total)) / LOG2E
        is_whole = end - begin == blocks

        row_smem[...] = lse
        out_smem[...] = acc
        plgpu.commit_smem()

        @pl.when(is_whole)
        def _final() -> None:
            plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, rows)], out_ref.at[tile, head])
            plgpu.copy_smem_to_gmem(row_smem, lse_ref.at[tile, head])

        @pl.when(jnp.logical_not(is_whole))
        def _piece() -> None:
            part = 2 * cta + (begin == 0)
            plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, rows)], parts_ref.at[part])
            plgpu.copy_smem_to_gmem(row_smem, parts_lse_ref.at[part])

        plgpu.wait_smem_to_gmem(0)


def _copy_keys(source: Any, target: Any, is_before_end: Callable[[tuple[int, int], plgpu.Layout], Array]) -> None:
    """Keys of a block in the target's dtype, with zeros past the end: what lies there may be NaN, and 0 * NaN is NaN."""
    layout = plgpu.Layout.WGMMA_8BIT if source.dtype.itemsize == 1 else plgpu.Layout.WGMMA
    step = math.gcd(source.shape[1], 64)
    is_key = is_before_end((BLOCK, step), layout)
    for column in range(0, source.shape[1], step):
        columns = pl.ds(column, step)
        values = plgpu.layout_cast(source[:, columns], layout)
        if source.dtype == jnp.float8_e4m3fn:  # of the conversions from it the hardware has this one
            values = values.astype(jnp.float16)
            if target.dtype != jnp.float16:
                values = values.astype(jnp.float32)
        values = values.astype(target.dtype)
        target[:, columns] = jnp.where(is_key, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def _add_weighted(acc: Array, p: Array, v: Any, p_smem: Any) -> Array:
    """`acc + p @ v`. The interpreter knows neither wgmma with a left operand in registers nor a filled accumulator."""
    if p_smem is None:
        return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p, v))(plgpu.ACC.init(acc))
    p_smem[...] = p
    plgpu.commit_smem()

    def product(product_acc: Any) -> Array:
        plgpu.wgmma(product_acc, p_smem, v)
        return product_acc[...]

    return acc + pl.run_scoped(product, plgpu.ACC((ROWS, acc.shape[1]), jnp.float32))
