"""How KV pages lie in memory, and how they are written and copied.

All layers share one array `kv_pages[layers * pages, kv_heads, page_size, 2 * head_dim]`: layer `l`'s page `i` is row
`l * pages + i`, and K and V of a token lie side by side. Page 0 of every layer is the null page: padding is written
there, and its content never changes a result.

*Stacked* pages, `kv_pages[layers * pages, kv_heads, 2 * page_size, head_dim]`, hold a page's K rows above its V rows. CPUs
use them: XLA:CPU gathers K and V into operands of their own without a copy, and has no lanes to fill. `write_pages` and
the readers take either kind and tell them apart by the last axis.

Multi-head latent attention caches one row per token, `latent_pages[layers * pages, page_size, cached_dim]`: the latent,
`kv_lora_rank` values, then the key's RoPE part. Every head's keys and values are linear maps of that row, which are
applied to queries and outputs instead, so that attention reads it as the K of one KV head, and its latent as the V.

*Paired* latent pages, `latent_pages[layers * pages, page_size / 16, 8, 2 * cached_dim]`, hold two tokens in a row: of
each 16, row `r` has tokens `r` and `r + 8`, their latents, then their RoPE parts. TPUs use them: 2 * (512 + 64) values
fill lanes of 128 exactly, where 576 would be padded to 640, and 8 rows are the memory tile that XLA lays out arrays of
any dtype in if it is told so by an axis of 8; else it copies arrays of 8-bit values into it and back for each write.
Readers and `write_latent_pages` take either kind and tell them apart by the number of axes.

On CPU bfloat16 pages are stored as their bit patterns in uint16. XLA:CPU rewrites bfloat16 scatters, gathers and slices
to float32, which converts the WHOLE array around each of them (75 ms instead of 0.04 ms for a decode step's writes into
a 190 MB cache); on integers they happen in place. `storage_dtype` is the array's dtype, `load` gives values back.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

Scale = float | Float[Array, ""]

PAIR_ROWS = 8  # of a group of paired latents


@dataclass(frozen=True)
class GQASizes:
    """The sizes of grouped-query attention that not every implementation computes."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int


@dataclass(frozen=True)
class MLASizes:
    """The sizes of latent attention that not every implementation computes."""

    heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    page_size: int


Sizes = GQASizes | MLASizes


def stacks_kv(platform: str) -> bool:
    """Whether pages are stacked on this platform."""
    return platform == "cpu"


def gqa_pages_shape(
    num_layers: int, num_pages: int, kv_heads: int, page_size: int, head_dim: int, *, stacked: bool = False
) -> tuple[int, int, int, int]:
    """Shape of the pages array of a GQA model; `num_pages` counts the pages of one layer, the null page included.

    Raises ValueError if a size is below 1.
    """
    _check_sizes(num_layers=num_layers, num_pages=num_pages, kv_heads=kv_heads, page_size=page_size, head_dim=head_dim)
    slots = (2 * page_size, head_dim) if stacked else (page_size, 2 * head_dim)
    return (num_layers * num_pages, kv_heads, *slots)


def pairs_latents(platform: str) -> bool:
    """Whether latent pages are paired on this platform."""
    return platform == "tpu"


def mla_pages_shape(
    num_layers: int, num_pages: int, page_size: int, cached_dim: int, *, paired: bool = False
) -> tuple[int, ...]:
    """Shape of the pages array of an MLA model with `cached_dim = kv_lora_rank + qk_rope_head_dim`.

    Raises ValueError if a size is below 1, or if pages to be paired are not of a multiple of 16 tokens.
    """
    _check_sizes(num_layers=num_layers, num_pages=num_pages, page_size=page_size, cached_dim=cached_dim)
    if paired and page_size % (2 * PAIR_ROWS):
        raise ValueError(
            f"page_size must be a multiple of {2 * PAIR_ROWS} for latent attention on TPU, got {page_size}"
        )
    slots = (page_size // (2 * PAIR_ROWS), PAIR_ROWS, 2 * cached_dim) if paired else (page_size, cached_dim)
    return (num_layers * num_pages, *slots)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def page_size_of(kv_pages: Num[Array, "pages kv_heads slots width"], head_dim: int) -> int:
    """Tokens per page. Raises ValueError if the pages do not hold K and V of this head_dim."""
    slots, width = kv_pages.shape[2:]
    if width == 2 * head_dim:
        return slots
    if width == head_dim and slots % 2 == 0:
        return slots // 2
    raise ValueError(f"pages of {slots} x {width} values per kv head do not fit K and V of head_dim {head_dim}")


def split_kv(stored: Num[Array, "*pages slots width"], head_dim: int) -> tuple[Num[Array, "..."], Num[Array, "..."]]:
    """(K, V), each [*pages, page_size, head_dim], of pages of either kind."""
    if stored.shape[-1] == head_dim:
        return tuple(jnp.split(stored, 2, axis=-2))  # type: ignore[return-value]
    return stored[..., :head_dim], stored[..., head_dim:]


def latent_page_size(latent_pages: Num[Array, "pages *slots width"], cached_dim: int) -> int:
    """Tokens per page. Raises ValueError if the pages do not hold rows of `cached_dim` values."""
    _, *slots, width = latent_pages.shape
    if (len(slots), width) not in ((1, cached_dim), (2, 2 * cached_dim)):
        raise ValueError(f"pages of {(*slots, width)} do not hold latents and RoPE parts of {cached_dim} values")
    return math.prod(slots) * width // cached_dim


def pair(
    rows: Num[Array, "*pages page_size cached_dim"], kv_lora_rank: int
) -> Num[Array, "*pages groups 8 two_cached_dim"]:
    """Paired pages, from a row per token; of a multiple of 16 tokens."""
    *pages, _, cached_dim = rows.shape
    first, second = jnp.moveaxis(rows.reshape(*pages, -1, 2, PAIR_ROWS, cached_dim), -3, 0)
    parts = [half[..., part] for part in (slice(kv_lora_rank), slice(kv_lora_rank, None)) for half in (first, second)]
    return jnp.concatenate(parts, axis=-1)


def latent_rows(
    stored: Num[Array, "*pages_and_slots width"], kv_lora_rank: int, qk_rope_head_dim: int
) -> Num[Array, "*pages page_size cached_dim"]:
    """A row per token, of pages of either kind."""
    cached_dim = kv_lora_rank + qk_rope_head_dim
    if stored.shape[-1] == cached_dim:
        return stored
    parts = jnp.split(stored, [kv_lora_rank, 2 * kv_lora_rank, kv_lora_rank + cached_dim], axis=-1)
    rows = jnp.concatenate([jnp.concatenate(parts[half::2], axis=-1) for half in range(2)], axis=-2)
    return rows.reshape(*stored.shape[:-3], -1, cached_dim)


def keys_before(
    position: Int[Array, "*batch"], page_size: int, page_stride: int, page_offset: Int[Array, "*batch"]
) -> Int[Array, "*batch"]:
    """How many keys before `position` lie in a sequence's own pages, those of number page_offset + i * page_stride.

    In the order of the block table they are its keys 0 .. keys_before - 1: what a query sees of them is a range, too.
    """
    page = position // page_size - page_offset
    whole = jnp.maximum(-(-page // page_stride), 0)  # pages that end before it
    is_own = (page >= 0) & (page % page_stride == 0)
    return whole * page_size + jnp.where(is_own, position % page_size, 0)


def storage_dtype(dtype: jax.typing.DTypeLike, platform: str | None = None) -> jnp.dtype:
    """The dtype of the array that holds pages of `dtype` on `platform` (None: the default backend's)."""
    on_cpu = (platform or jax.default_backend()) == "cpu"
    return jnp.dtype(jnp.uint16 if on_cpu and jnp.dtype(dtype) == jnp.bfloat16 else dtype)


def load(stored: Num[Array, "..."]) -> Num[Array, "..."]:
    """The values of what was gathered from a pages array, in the dtype the pages were made for."""
    return jax.lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored


def init_gqa_pages(
    num_layers: int, num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: jax.typing.DTypeLike
) -> Num[Array, "pages kv_heads page_size two_head_dim"]:
    """A zeroed pages array of `gqa_pages_shape` in the default backend's `storage_dtype`."""
    return jnp.zeros(gqa_pages_shape(num_layers, num_pages, kv_heads, page_size, head_dim), storage_dtype(dtype))


def _store(x: Float[Array, "..."], scale: Scale | None, dtype: jax.typing.DTypeLike) -> Num[Array, "..."]:
    """`x / scale` as an array of pages of `dtype` holds it; 8-bit values are rounded to nearest and saturated."""
    if scale is not None:
        x = x.astype(jnp.float32) / scale
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    if dtype == jnp.int8:
        x = jnp.clip(jnp.round(x), -127, 127)
    elif jnp.finfo(dtype).bits == 8:
        limit = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -limit, limit)
    return x.astype(dtype)


def kv_rows(
    kv_pages: Num[Array, "pages kv_heads slots width"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    token_pages: Int[Array, "tokens"],
    token_offsets: Int[Array, "tokens"],
    k_scale: Scale | None,
    v_scale: Scale | None,
) -> tuple[Num[Array, "tokens kv_heads parts width"], Int[Array, "tokens parts"]]:
    """What `write_pages` writes of each token, as the pages hold it, and in which slots of its page.

    There is one part, K and V side by side, or K and V if the pages are stacked. Raises ValueError if the shapes disagree
    or if int8 pages come without scales.
    """
    tokens, kv_heads, head_dim = k.shape
    page_size = page_size_of(kv_pages, head_dim)
    if kv_heads != kv_pages.shape[1] or v.shape != k.shape:
        raise ValueError(
            f"k {k.shape} and v {v.shape} must both be [tokens, {kv_pages.shape[1]}, head_dim] for pages {kv_pages.shape}"
        )
    _check_places(tokens, token_pages, token_offsets)
    if kv_pages.dtype == jnp.int8 and (k_scale is None or v_scale is None):
        raise ValueError("int8 pages need k_scale and v_scale")
    slots, width = kv_pages.shape[2:]
    kv = jnp.stack([_store(k, k_scale, kv_pages.dtype), _store(v, v_scale, kv_pages.dtype)], axis=2)
    own_slots = token_offsets[:, None] + jnp.arange(0, slots, page_size)
    return kv.reshape(tokens, kv_heads, -1, width), own_slots


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
    """See `paxserve.pallas_kernels.write_pages`: a scatter, which XLA does in place."""
    kv, own_slots = kv_rows(kv_pages, k, v, token_pages, token_offsets, k_scale, v_scale)
    _, kv_heads, slots, _ = kv_pages.shape
    heads = (token_pages[:, None] * kv_heads + jnp.arange(kv_heads)) * slots  # [tokens, kv_heads]
    return _write_rows(kv_pages, heads[..., None] + own_slots[:, None], kv)


def latent_values(
    latent_pages: Num[Array, "pages *slots width"],
    latent: Float[Array, "tokens kv_lora_rank"],
    k_rope: Float[Array, "tokens qk_rope_head_dim"],
    token_pages: Int[Array, "tokens"],
    token_offsets: Int[Array, "tokens"],
    k_scale: Scale | None,
) -> Num[Array, "tokens width"]:
    """What `write_latent_pages` writes of each token, as the pages hold it: of a row of paired pages both halves.

    Raises ValueError if the shapes disagree or if int8 pages come without a scale.
    """
    tokens, rank = latent.shape
    if k_rope.shape[0] != tokens:
        raise ValueError(f"latent {latent.shape} and k_rope {k_rope.shape} must be of the same tokens")
    latent_page_size(latent_pages, rank + k_rope.shape[1])
    _check_places(tokens, token_pages, token_offsets)
    if latent_pages.dtype == jnp.int8 and k_scale is None:
        raise ValueError("int8 pages need k_scale")
    times = 1 if latent_pages.ndim == 3 else 2
    return _store(jnp.concatenate([latent] * times + [k_rope] * times, axis=-1), k_scale, latent_pages.dtype)


def is_second(column: Int[Array, "..."], kv_lora_rank: int, width: int) -> Bool[Array, "..."]:
    """Whether a column of a row of paired pages belongs to the second of its tokens."""
    return ((column >= kv_lora_rank) & (column < 2 * kv_lora_rank)) | (column >= width // 2 + kv_lora_rank)


def write_latent_pages(
    latent_pages: Num[Array, "pages *slots width"],
    latent: Float[Array, "tokens kv_lora_rank"],
    k_rope: Float[Array, "tokens qk_rope_head_dim"],
    token_pages: Int[Array, "tokens"],
    token_offsets: Int[Array, "tokens"],
    *,
    k_scale: Scale | None,
) -> Num[Array, "pages *slots width"]:
    """See `paxserve.pallas_kernels.write_latent_pages`: a scatter, which XLA does in place."""
    new = latent_values(latent_pages, latent, k_rope, token_pages, token_offsets, k_scale)
    width = new.shape[1]
    if latent_pages.ndim == 3:
        return _write_rows(latent_pages, token_pages * latent_pages.shape[1] + token_offsets, new)
    # One half of the rows after the other: a token of each half may share a row, and only whole rows are written in place.
    group, half, place = token_offsets // (2 * PAIR_ROWS), token_offsets // PAIR_ROWS % 2, token_offsets % PAIR_ROWS
    rows = (token_pages * latent_pages.shape[1] + group) * PAIR_ROWS + place
    half_of_column = is_second(jnp.arange(width), latent.shape[1], width)
    for written in range(2):
        old = latent_pages.reshape(-1, width)[rows]
        own = jnp.where(half == written, rows, latent_pages.size // width)  # else past the last: dropped
        latent_pages = _write_rows(latent_pages, own, jnp.where(half_of_column == written, new, old))
    return latent_pages


def _check_places(tokens: int, token_pages: Int[Array, "tokens"], token_offsets: Int[Array, "tokens"]) -> None:
    if token_pages.shape != (tokens,) or token_offsets.shape != (tokens,):
        raise ValueError(
            f"token_pages {token_pages.shape} and token_offsets {token_offsets.shape} must both be ({tokens},)"
        )


def _write_rows(
    pages: Num[Array, "*pages width"], rows: Int[Array, "*rows"], values: Num[Array, "*rows width"]
) -> Num[Array, "*pages width"]:
    # As a scatter of whole rows into a view of rows: XLA:TPU copies the array into another layout for any other scatter.
    return pages.reshape(-1, pages.shape[-1]).at[rows].set(values, mode="drop").reshape(pages.shape)


def copy_pages(
    kv_pages: Num[Array, "pages *page"],
    src: Int[Array, "copies"],
    dst: Int[Array, "copies"],
    *,
    num_layers: int,
) -> Num[Array, "pages *page"]:
    """Copies page `src[i]` to page `dst[i]` in every layer, of either attention; donate `kv_pages`. Padding pairs are (0, 0).

    All sources are read before any page is written. Raises ValueError if the pages do not divide into `num_layers`.
    """
    if kv_pages.shape[0] % num_layers:
        raise ValueError(f"{kv_pages.shape[0]} pages do not divide into num_layers={num_layers}")
    if src.shape != dst.shape or src.ndim != 1:
        raise ValueError(f"src {src.shape} and dst {dst.shape} must be vectors of one length")
    first = jnp.arange(num_layers)[:, None] * (kv_pages.shape[0] // num_layers)  # [layers, 1]
    return kv_pages.at[(first + dst).reshape(-1)].set(kv_pages[(first + src).reshape(-1)])
