"""The results of `mosaic_gpu`'s items, token by token: as they are, or merged from the pieces of an item that was cut.

Pieces are merged by their log-sum-exp in a kernel of its own, whose grid is (thread block of the schedule, chunk of its
item's values): each merges its chunk of the pieces of the item that begins in that thread block's share, if it was cut.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from paxserve.pallas_kernels.mosaic_gpu_schedule import Schedule

CHUNK_VALUES = 512  # of a thread block, at least
UNROLL = 4  # pieces whose loads are in flight together
LOWEST = float(jnp.finfo(jnp.float32).min)


def kernel_options(interpret: Any, **params: Any) -> dict[str, Any]:
    """Options of `plgpu.kernel` for all of `mosaic_gpu`; `interpret` is `plgpu.InterpretGPUParams` or None, to compile."""
    semantics = plgpu.LoweringSemantics.Warpgroup
    options = {"compiler_params": plgpu.CompilerParams(approx_math=True, lowering_semantics=semantics, **params)}
    return options if interpret is None else options | {"interpret": interpret}


def collect(
    schedule: Schedule,
    out: Float[Array, "tiles items rows value_dim"],
    lse: Float32[Array, "tiles items any_rows"],
    parts: Float32[Array, "parts rows value_dim"],
    parts_lse: Float32[Array, "parts rows"],
    *,
    group: int,
    interpret: Any,
) -> tuple[Float[Array, "tokens heads value_dim"], Float32[Array, "tokens heads"]]:
    """Output and log-sum-exp of each token's heads, item by item of its tile; 0 and -inf for padding.

    Row r of an item is head `r % group` of its token `r // group`. `out` and `lse` are of the items that were not cut,
    piece `2 * cta + slot` of those that were (see mosaic_gpu_schedule.py); what is not in use may hold anything. Pieces'
    log-sum-exps are natural, and -inf for a row that saw no key, which counts for nothing. rows must be a multiple of 8,
    value_dim of 16.
    """
    num_tiles, items = out.shape[:2]
    merged, merged_lse = _merge(schedule.ctas, parts, parts_lse, out.dtype, interpret)
    tile = schedule.tile[:, None]
    item, in_group = jnp.divmod(jnp.arange(items * group), group)
    row = schedule.row[:, None] * group + in_group  # [tokens, heads]
    cut_by = schedule.cut_by.reshape(num_tiles, items)[tile, item]
    token_out = jnp.where((cut_by < 0)[..., None], out[tile, item, row], merged[cut_by, row])
    token_lse = jnp.where(cut_by < 0, lse[tile, item, row], merged_lse[cut_by, row])
    return jnp.where(tile[..., None] < 0, 0, token_out), jnp.where(tile < 0, -jnp.inf, token_lse)


def _merge(
    ctas: Int[Array, "ctas 5"],
    parts: Float32[Array, "parts rows value_dim"],
    lse: Float32[Array, "parts rows"],
    dtype: jax.typing.DTypeLike,
    interpret: Any,
) -> tuple[Float[Array, "ctas rows value_dim"], Float32[Array, "ctas rows"]]:
    """Output and log-sum-exp of the cut item that begins with each thread block; rubbish where there is none."""
    num_ctas, (rows, value_dim) = len(ctas), parts.shape[1:]
    chunk_rows = next(n for n in (1, 2, 4, 8) if n * value_dim >= CHUNK_VALUES and n * value_dim % 128 == 0)
    chunks, chunk = rows // chunk_rows, chunk_rows * value_dim
    out, out_lse = plgpu.kernel(
        functools.partial(_merge_kernel, chunk_rows=chunk_rows),
        out_type=(
            jax.ShapeDtypeStruct((num_ctas, chunks, chunk), dtype),
            jax.ShapeDtypeStruct((num_ctas, rows), jnp.float32),
        ),
        grid=(num_ctas, chunks),
        grid_names=("cta", "chunk"),
        kernel_name="merge_pieces",
        **kernel_options(interpret),
    )(ctas, parts.reshape(-1, chunks, chunk), lse, jnp.arange(chunk, dtype=jnp.int32) // value_dim)
    return out.reshape(num_ctas, rows, value_dim), out_lse


def _merge_kernel(
    ctas_ref: Any, parts_ref: Any, lse_ref: Any, row_ref: Any, out_ref: Any, out_lse_ref: Any, *, chunk_rows: int
) -> None:
    cta, chunk = lax.axis_index("cta"), lax.axis_index("chunk")
    pieces = ctas_ref[cta, 4]
    rows = [chunk * chunk_rows + r for r in range(chunk_rows)]

    def step(i: Array, carry: tuple[Any, Any, Array]) -> tuple[Any, Any, Array]:
        top, total, acc = carry
        loaded = []
        for j in range(UNROLL):
            piece = i * UNROLL + j
            part = jnp.maximum(2 * (cta + jnp.minimum(piece, pieces - 1)), 2 * cta + 1)
            counts = jnp.where(piece < pieces, 0.0, -jnp.inf)
            loaded.append(([lse_ref[part, row] + counts for row in rows], parts_ref[part, chunk]))
        new_top = [functools.reduce(jnp.maximum, lses) for lses in zip(top, *(lse for lse, _ in loaded), strict=True)]
        fade = [jnp.exp(a - b) for a, b in zip(top, new_top, strict=True)]
        total = [a * b for a, b in zip(total, fade, strict=True)]
        acc *= beside_values(fade)
        for lse, part in loaded:
            weight = [jnp.exp(a - b) for a, b in zip(lse, new_top, strict=True)]
            total = [a + b for a, b in zip(total, weight, strict=True)]
            acc += beside_values(weight) * part
        return new_top, total, acc

    def beside_values(of_rows: list[Array]) -> Array:
        """Beside each value of the chunk what belongs to its row."""
        values = jnp.full(row_ref.shape, of_rows[0])
        for r, x in enumerate(of_rows[1:], 1):
            values = jnp.where(row_ref[...] == r, x, values)
        return values

    @pl.when(pieces > 0)
    def _merge_item() -> None:
        top, total, acc = lax.fori_loop(
            0,
            lax.div(pieces + (UNROLL - 1), jnp.int32(UNROLL)),
            step,
            ([jnp.float32(LOWEST)] * chunk_rows, [jnp.float32(0)] * chunk_rows, jnp.zeros(row_ref.shape, jnp.float32)),
        )
        scale = beside_values([1 / jnp.where(x > 0, x, 1.0) for x in total])
        out_ref.at[cta, chunk][...] = (acc * scale).astype(out_ref.dtype)
        for r, row in enumerate(rows):
            out_lse_ref[cta, row] = top[r] + jnp.log(total[r])
