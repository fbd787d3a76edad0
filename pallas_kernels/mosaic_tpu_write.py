"""Writes new tokens' K and V, or latents, into pages in place on TPU, by a Pallas kernel (Mosaic TPU).

A copy cannot cut a memory tile, which holds `32 / itemsize` rows of a page, or 8 of paired latents, and XLA's scatter
therefore reads, changes and writes a tile per row and head, a few at a time. Here a token's tiles of all heads are one copy,
and those of consecutive tokens that lie in one tile are read and written once.

Grid. A step writes a chunk of tokens, which come as 32-bit integers with a value's bits at the bottom, so that the dtype
does not matter. It starts reading all tiles of its chunk, waits for all of them, puts each token's rows into its tile,
starts writing a tile after its last token, and at the end waits for all that was written: what the next step reads is in
memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from paxserve.pallas_kernels.layout import Scale, is_second, kv_rows, latent_values

SUBLANES = 8
TILES_BYTES = 16 * 2**20  # of VMEM for a chunk's tiles, at most
CHUNK = 256  # tokens, at most
VMEM_LIMIT = 48 * 2**20


def write_pages(
    kv_pages: Num[Array, "pages kv_heads slots width"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    token_pages: Int[Array, "tokens"],
    token_offsets: Int[Array, "tokens"],
    *,
    k_scale: Scale | None,
    v_scale: Scale | None,
) -> Num[Array, "pages kv_heads slots width"]:
    """See `paxserve.pallas_kernels.write_pages`."""
    kv, slots = kv_rows(kv_pages, k, v, token_pages, token_offsets, k_scale, v_scale)
    rows = jnp.moveaxis(kv, 2, 0).reshape(-1, *kv_pages.shape[1::2])  # [parts * tokens, kv_heads, width]
    return write_rows(
        kv_pages,
        rows,
        jnp.tile(token_pages, kv.shape[2]),
        slots.T.reshape(-1),
        interpret=False if pltpu.is_tpu_device() else pltpu.InterpretParams(),
    )


def write_latent_pages(
    latent_pages: Num[Array, "pages *slots width"],
    latent: Float[Array, "tokens kv_lora_rank"],
    k_rope: Float[Array, "tokens qk_rope_head_dim"],
    token_pages: Int[Array, "tokens"],
    token_offsets: Int[Array, "tokens"],
    *,
    k_scale: Scale | None,
) -> Num[Array, "pages *slots width"]:
    """See `paxserve.pallas_kernels.write_latent_pages`. A group of paired latents is written as a page of one head."""
    rows = latent_values(latent_pages, latent, k_rope, token_pages, token_offsets, k_scale)[:, None]
    interpret = False if pltpu.is_tpu_device() else pltpu.InterpretParams()
    if latent_pages.ndim == 3:
        written = write_rows(latent_pages[:, None], rows, token_pages, token_offsets, interpret=interpret)
        return written.reshape(latent_pages.shape)
    _, groups, group_rows, width = latent_pages.shape
    written = write_rows(
        latent_pages.reshape(-1, 1, group_rows, width),
        rows,
        token_pages * groups + token_offsets // (2 * group_rows),
        token_offsets % (2 * group_rows),
        kv_lora_rank=latent.shape[1],
        interpret=interpret,
    )
    return written.reshape(latent_pages.shape)


def write_rows(
    pages: Num[Array, "pages heads page_rows width"],
    rows: Num[Array, "tokens heads width"],
    token_pages: Int[Array, "tokens"],
    token_offsets: Int[Array, "tokens"],
    *,
    kv_lora_rank: int | None = None,
    interpret: Any = False,
) -> Num[Array, "pages heads page_rows width"]:
    """The pages with `rows[t]`, of their dtype, in slot `token_offsets[t]` of page `token_pages[t]`; donate them.

    A slot is a row, or if there is a `kv_lora_rank` half of one: pages are then groups of paired latents, first all first
    halves of rows, then the second; a token's half of `rows[t]` is written. Tokens whose page does not exist are not
    written. Those of one page must follow one another: of tokens apart that lie in one tile only some may be written.
    """
    num_pages, heads, page_rows, width = pages.shape
    tokens = len(rows)
    bits = 8 * pages.dtype.itemsize
    packed = 32 // bits  # rows that share a sublane
    tile_rows = min(SUBLANES * packed, page_rows)
    tile_slots = tile_rows if kv_lora_rank is None else 2 * tile_rows
    sublanes = tile_rows // packed
    lanes = -(-width // 128) * 128
    tile_bytes = heads * tile_rows * lanes * pages.dtype.itemsize
    chunk = max(min(CHUNK, TILES_BYTES // tile_bytes, -(-tokens // SUBLANES) * SUBLANES) // SUBLANES, 1) * SUBLANES
    spare = -tokens % chunk

    def kernel(page: Any, offset: Any, new: Any, _: Any, out: Any, tiles: Any, read: Any, written: Any) -> None:
        first = pl.program_id(0) * chunk

        def place(token: Array) -> tuple[Array, Array]:
            return page[token], lax.div(offset[token], tile_slots)

        def is_new(token: Array) -> Array:
            """Whether the token's tile is not the one of the token before it in this chunk."""
            before, own = place(jnp.maximum(token - 1, first)), place(token)
            return (token == first) | (own[0] != before[0]) | (own[1] != before[1])

        def tile_of(token: Array) -> Any:
            number, tile = place(token)
            return out.at[number, :, pl.ds(pl.multiple_of(tile * tile_rows, tile_rows), tile_rows)]

        def exists(token: Array) -> Array:
            return (page[token] >= 0) & (page[token] < num_pages)

        def start_reading(i: Array, count: Array) -> Array:
            starts = is_new(first + i) & exists(first + i)
            pl.when(starts)(pltpu.make_async_copy(tile_of(first + i), tiles.at[count], read).start)
            return count + starts.astype(jnp.int32)

        count = lax.fori_loop(0, chunk, start_reading, jnp.int32(0))
        pl.loop(0, count)(lambda _: pltpu.make_async_copy(tiles.at[0], tiles.at[0], read).wait())
        sublane, column = (lax.broadcasted_iota(jnp.int32, (heads, sublanes, width), axis) for axis in (1, 2))

        def put(i: Array, count: Array) -> Array:
            token = first + i
            count += (is_new(token) & exists(token)).astype(jnp.int32)
            is_last = (i == chunk - 1) | is_new(jnp.minimum(token + 1, first + chunk - 1))

            @pl.when(exists(token))
            def _() -> None:
                row = lax.rem(offset[token], tile_rows)
                old = pltpu.bitcast(tiles[count].reshape(heads * tile_rows, width), jnp.int32)
                old = old.reshape(heads, sublanes, width)
                value = jnp.broadcast_to(new[i if heads > 1 else pl.ds(i, 1)][:, None], old.shape)
                if packed > 1:
                    shift = lax.rem(row, packed) * bits
                    value = (old & ~lax.shift_left(2**bits - 1, shift)) | lax.shift_left(value, shift)
                is_own = sublane == lax.div(row, packed)
                if kv_lora_rank is not None:
                    half = lax.div(lax.rem(offset[token], tile_slots), tile_rows)
                    is_own &= is_second(column, kv_lora_rank, width) == (half == 1)
                value = jnp.where(is_own, value, old).reshape(heads * sublanes, width)
                tiles[count] = pltpu.bitcast(value, pages.dtype).reshape(heads, tile_rows, width)
                pl.when(is_last)(pltpu.make_async_copy(tiles.at[count], tile_of(token), written).start)

            return count

        lax.fori_loop(0, chunk, put, jnp.int32(-1))
        pl.loop(0, count)(lambda _: pltpu.make_async_copy(tiles.at[0], tiles.at[0], written).wait())

    row = (heads, width) if heads > 1 else (width,)  # of one head XLA would give every row a memory tile of its own
    as_bits = lax.bitcast_convert_type(rows.reshape(tokens, *row), f"uint{bits}").astype(jnp.uint32)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=((tokens + spare) // chunk,),
            in_specs=[
                pl.BlockSpec((chunk, *row), lambda i, *_: (i, *[0] * len(row))),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((chunk, heads, tile_rows, width), pages.dtype),
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VMEM_LIMIT,
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
        ),
        interpret=interpret,
        name="write_pages",
    )(
        jnp.pad(token_pages.astype(jnp.int32), (0, spare), constant_values=-1),
        jnp.pad(token_offsets.astype(jnp.int32), (0, spare)),
        jnp.pad(lax.bitcast_convert_type(as_bits, jnp.int32), ((0, spare), *[(0, 0)] * len(row))),
        pages,
    )
