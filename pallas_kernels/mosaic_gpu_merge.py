"""The results of `mosaic_gpu`'s items, token by token: as they are, or merged from the pieces of an item that was cut.

Pieces are merged by their log-sum-exp in a kernel of its own, whose grid is (thread block of the schedule, chunk of its
item's values): each merges its chunk of the pieces of the item that begins in that thread block's share, if it was cut.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from paxserve.pallas_kernels.mosaic_gpu_schedule import Schedule

UNROLL = 4  # pieces whose loads are in flight together
LOWEST = float(jnp.finfo(jnp.float32).min)


def kernel_options(interpret: Any, **params: Any) -> dict[str, Any]:
    """Options of `plgpu.kernel` for all of `mosaic_gpu`; `interpret` is `plgpu.InterpretGPUParams` or None, to compile."""
    semantics = plgpu.LoweringSemantics.Warpgroup
    params = plgpu.CompilerParams(approx_math=True, lowering_semantics=semantics, **params)
    return {"compiler_params": params} | ({} if interpret is None else {"interpret": interpret})


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
    log-sum-exps are natural, and -inf for a row that saw no key, which counts for nothing. rows * value_dim must be a
    multiple of 128.
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
    chunk = math.gcd(rows * value_dim, 1024)  # eight values a thread, or fewer
    chunks = rows * value_dim // chunk
    lse = jnp.broadcast_to(lse[..., None], parts.shape)  # beside every value: the merge is then elementwise
    out, out_lse = plgpu.kernel(
        _merge_kernel,
        out_type=(
            jax.ShapeDtypeStruct((num_ctas, chunks, chunk), dtype),
            jax.ShapeDtypeStruct((num_ctas, chunks, chunk), jnp.float32),
        ),
        grid=(num_ctas, chunks),
        grid_names=("cta", "chunk"),
        kernel_name="merge_pieces",
        **kernel_options(interpret),
    )(ctas, parts.reshape(-1, chunks, chunk), lse.reshape(-1, chunks, chunk))
    return out.reshape(num_ctas, rows, value_dim), out_lse.reshape(num_ctas, rows, value_dim)[..., 0]


def _merge_kernel(ctas_ref: Any, parts_ref: Any, lse_ref: Any, out_ref: Any, out_lse_ref: Any) -> None:
    cta, chunk = lax.axis_index("cta"), lax.axis_index("chunk")
    pieces = ctas_ref[cta, 4]

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        loaded = []
        for j in range(UNROLL):
            piece = i * UNROLL + j
            part = jnp.maximum(2 * (cta + jnp.minimum(piece, pieces - 1)), 2 * cta + 1)
            lse = lse_ref[part, chunk] + jnp.where(piece < pieces, 0.0, -jnp.inf)
            loaded.append((lse, parts_ref[part, chunk]))
        new_top = functools.reduce(jnp.maximum, (lse for lse, _ in loaded), top)
        fade = jnp.exp(top - new_top)
        total, acc = total * fade, acc * fade
        for lse, part in loaded:
            weight = jnp.exp(lse - new_top)
            total, acc = total + weight, acc + weight * part
        return new_top, total, acc

    @pl.when(pieces > 0)
    def _merge_item() -> None:
        shape = out_ref.shape[2:]
        top, total, acc = lax.fori_loop(
            0,
            lax.div(pieces + (UNROLL - 1), jnp.int32(UNROLL)),
            step,
            (jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)),
        )
        out_ref.at[cta, chunk][...] = (acc / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)
        out_lse_ref.at[cta, chunk][...] = top + jnp.log(total)
