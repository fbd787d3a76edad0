"""Page shapes, writes and copies, against plain NumPy indexing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxserve.pallas_kernels import (
    copy_pages,
    gqa_pages_shape,
    init_gqa_pages,
    load,
    mla_pages_shape,
    paged_attention,
    storage_dtype,
    write_latent_pages,
    write_pages,
)
from paxserve.pallas_kernels.layout import latent_rows, page_size_of, pair, split_kv

LAYERS, PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM = 3, 5, 2, 4, 8
SIZES = (LAYERS, PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM)


def random_kv(tokens: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((2, tokens, KV_HEADS, HEAD_DIM)).astype(np.float32)


def test_layout() -> None:
    assert gqa_pages_shape(*SIZES) == (15, 2, 4, 16)
    assert init_gqa_pages(*SIZES, jnp.bfloat16).nbytes == PAGES * 3 * 2 * 4 * 16 * 2
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        gqa_pages_shape(1, 1, 1, 0, 1)


def test_latent_layout() -> None:
    """DeepSeek-V3's 512 + 64 values per token and layer, with nothing between them."""
    assert mla_pages_shape(61, 3, 16, 576) == (183, 16, 576)
    assert mla_pages_shape(61, 3, 16, 576, paired=True) == (183, 1, 8, 1152)
    with pytest.raises(ValueError, match="page_size must be a multiple of 16"):
        mla_pages_shape(61, 3, 17, 576, paired=True)
    with pytest.raises(ValueError, match="cached_dim must be at least 1, got 0"):
        mla_pages_shape(1, 1, 1, 0)


def test_bfloat16_is_stored_as_bits_on_cpu_only() -> None:
    assert storage_dtype(jnp.bfloat16, "cpu") == jnp.uint16
    assert storage_dtype(jnp.bfloat16, "tpu") == jnp.bfloat16
    assert storage_dtype(jnp.float32, "cpu") == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_write_pages(dtype: jnp.dtype) -> None:
    k, v = random_kv(6)
    token_pages = np.array([7, 7, 9, 5, 5, 5])  # of layer 1: pages 2, 2, 4 and three padding tokens
    token_offsets = np.array([2, 3, 0, 0, 0, 0])
    before = init_gqa_pages(*SIZES, dtype)
    pages = jax.jit(write_pages)(before, jnp.asarray(k, dtype), jnp.asarray(v, dtype), token_pages, token_offsets)
    assert pages.dtype == before.dtype
    values = np.asarray(load(pages), np.float32)
    expected = np.zeros_like(values)
    for t in range(3):
        expected[token_pages[t], :, token_offsets[t]] = np.concatenate([k[t], v[t]], axis=-1)
    null_page = 5
    others = np.arange(len(values)) != null_page
    np.testing.assert_allclose(values[others], expected[others], rtol=0 if dtype == jnp.float32 else 2**-8)
    assert not values[null_page, :, 1:].any()


def test_write_stacked_pages() -> None:
    k, v = map(jnp.asarray, random_kv(3))
    token_pages, token_offsets = np.array([7, 7, 9]), np.array([2, 3, 0])
    side_by_side = write_pages(init_gqa_pages(*SIZES, jnp.float32), k, v, token_pages, token_offsets)
    stacked = jnp.zeros(gqa_pages_shape(*SIZES, stacked=True))
    written = write_pages(stacked, k, v, token_pages, token_offsets)
    assert stacked.size == side_by_side.size
    for part, expected in zip(split_kv(written, HEAD_DIM), split_kv(side_by_side, HEAD_DIM), strict=True):
        np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_write_latent_pages(dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(0)
    latent, k_rope = (jnp.asarray(rng.integers(-9, 10, (4, size)), jnp.float32) for size in (6, 2))
    token_pages, token_offsets = np.array([7, 7, 9, 5]), np.array([2, 3, 0, 0])  # the last is padding
    before = jnp.zeros(mla_pages_shape(LAYERS, PAGES, PAGE_SIZE, 8), storage_dtype(dtype))
    scale = 0.5 if dtype == jnp.int8 else None
    written = jax.jit(write_latent_pages)(before, latent, k_rope, token_pages, token_offsets, k_scale=scale)
    assert written.dtype == before.dtype
    expected = np.zeros(before.shape)
    expected[token_pages, token_offsets] = np.concatenate([latent, k_rope], axis=-1) / (scale or 1)
    np.testing.assert_array_equal(np.asarray(load(written), np.float32), expected)
    copied = copy_pages(written, np.array([2]), np.array([3]), num_layers=LAYERS)
    np.testing.assert_array_equal(copied[8], written[7])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_write_paired_latent_pages(dtype: jnp.dtype) -> None:
    """Tokens of either half of a page, two of them in one row, leave the rest as it was."""
    rng = np.random.default_rng(0)
    rank, rope, page_size = 6, 2, 32
    before = rng.integers(-9, 10, (LAYERS * PAGES, page_size, rank + rope))
    new = rng.integers(-9, 10, (5, rank + rope))
    token_pages, token_offsets = np.array([7, 7, 9, 9, 5]), np.array([18, 26, 4, 15, 0])  # the last is padding
    stored = pair(jnp.asarray(before, dtype), rank)
    if storage_dtype(dtype) != dtype:
        stored = jax.lax.bitcast_convert_type(stored, storage_dtype(dtype))
    scale = 0.5 if dtype == jnp.int8 else None
    latent, k_rope = jnp.split(jnp.asarray(new, jnp.float32), [rank], axis=1)
    written = jax.jit(write_latent_pages)(stored, latent, k_rope, token_pages, token_offsets, k_scale=scale)
    before[token_pages, token_offsets] = new / (scale or 1)
    np.testing.assert_array_equal(latent_rows(load(written), rank, rope).astype(jnp.float32), before)
    # Where the halves lie: latents of tokens 18 and 26, then their RoPE parts.
    row = [*before[7, 18, :rank], *before[7, 26, :rank], *before[7, 18, rank:], *before[7, 26, rank:]]
    np.testing.assert_array_equal(load(written)[7, 1, 2].astype(jnp.float32), row)


def test_pages_of_another_head_dim_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit K and V of head_dim 5"):
        page_size_of(init_gqa_pages(*SIZES, jnp.float32), 5)


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.int8, 0.5), (jnp.float8_e4m3fn, 16)])
def test_quantised_pages_keep_values_within_half_a_step(dtype: jnp.dtype, bound: float) -> None:
    k, v = random_kv(4)
    k_scale, v_scale = np.float32(np.abs(k).max() / 127), np.float32(np.abs(v).max() / 127)
    token_pages, token_offsets = np.full(4, 1), np.arange(4)
    pages = write_pages(
        init_gqa_pages(1, 3, KV_HEADS, PAGE_SIZE, HEAD_DIM, dtype),
        *map(jnp.asarray, (k, v, token_pages, token_offsets)),
        k_scale=k_scale,
        v_scale=v_scale,
    )
    stored = np.asarray(pages[1], np.float32).swapaxes(0, 1)  # [slots, kv_heads, 2 * head_dim]
    expected = np.concatenate([k / k_scale, v / v_scale], axis=-1)
    assert np.abs(stored - expected).max() <= bound * (1 + 1e-5)

    q = jnp.asarray(k[3:4])
    attend = jax.jit(paged_attention, static_argnames=("scale", "implementation"))
    table, context_lens, query_starts = np.ones((1, 1), np.int32), np.array([4]), np.array([0, 1])
    out, _ = attend(
        q,
        pages,
        table,
        context_lens,
        query_starts,
        scale=1.0,
        k_scale=k_scale,
        v_scale=v_scale,
        implementation="reference",
    )
    weights = np.exp(np.einsum("hd,thd->ht", k[3], k))
    exact = np.einsum("ht,thd->hd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(out[0], exact, atol=0.05 if dtype == jnp.int8 else 0.3)


def test_quantised_writes_saturate() -> None:
    k = jnp.full((1, KV_HEADS, HEAD_DIM), 1e6)
    one = jnp.ones(1, jnp.int32)
    for dtype, limit in ((jnp.int8, 127), (jnp.float8_e4m3fn, 448)):
        pages = init_gqa_pages(1, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM, dtype)
        pages = write_pages(pages, k, -k, one, one, k_scale=1.0, v_scale=1.0)
        assert float(pages[1, 0, 1, 0]) == limit
        assert float(pages[1, 0, 1, -1]) == -limit


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_copy_pages_copies_every_layer_and_reads_before_it_writes(dtype: jnp.dtype) -> None:
    shape = gqa_pages_shape(*SIZES)
    before = jnp.arange(np.prod(shape)).reshape(shape).astype(storage_dtype(dtype))
    src, dst = np.array([2, 3, 0, 0]), np.array([3, 4, 0, 0])
    after = jax.jit(copy_pages, static_argnames="num_layers")(before, src, dst, num_layers=LAYERS)
    expected = np.array(before).reshape(LAYERS, PAGES, *shape[1:])
    expected[:, [3, 4]] = expected[:, [2, 3]]
    np.testing.assert_array_equal(np.asarray(after).reshape(expected.shape), expected)


def test_user_errors() -> None:
    pages = init_gqa_pages(*SIZES, jnp.float32)
    k = jnp.zeros((2, KV_HEADS, HEAD_DIM))
    ids = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="must both be"):
        write_pages(pages, k, k[:1], ids, ids)
    with pytest.raises(ValueError, match="token_offsets"):
        write_pages(pages, k, k, ids, ids[:1])
    with pytest.raises(ValueError, match="int8 pages need"):
        write_pages(pages.astype(jnp.int8), k, k, ids, ids)
    with pytest.raises(ValueError, match="num_layers=2"):
        copy_pages(pages, ids, ids, num_layers=2)
    with pytest.raises(ValueError, match="one length"):
        copy_pages(pages, ids, ids[:1], num_layers=LAYERS)
    latents = jnp.zeros(mla_pages_shape(LAYERS, PAGES, PAGE_SIZE, 8))
    with pytest.raises(ValueError, match="do not hold latents and RoPE parts of 12 values"):
        write_latent_pages(latents, jnp.zeros((2, 6)), jnp.zeros((2, 6)), ids, ids)
    with pytest.raises(ValueError, match="token_offsets"):
        write_latent_pages(latents, jnp.zeros((2, 6)), jnp.zeros((2, 2)), ids, ids[:1])
    with pytest.raises(ValueError, match="int8 pages need k_scale"):
        write_latent_pages(latents.astype(jnp.int8), jnp.zeros((2, 6)), jnp.zeros((2, 2)), ids, ids)
