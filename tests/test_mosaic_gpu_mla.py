"""Latent attention for Hopper GPUs in JAX's interpreter, with small latents, and what it refuses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mosaic_gpu import LATENT
from test_paged_attention import H100, Case, assert_half_close, needs_interpreter

from paxserve.pallas_kernels import MLASizes, choose_implementation, mosaic_gpu_mla
from paxserve.pallas_kernels.layout import load

SMALL: dict[str, Any] = {"kv_heads": 1, "head_dim": 192, "latent_dim": 128, "dtype": jnp.bfloat16}
BATCHES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 140)), min_size=3, max_size=3)
DECODE: dict[str, Any] = {"options": {"max_query_len": 1}}


def interpret(case: Case, *, ctas: int = 6, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Runs the kernels on `ctas` thread blocks in JAX's interpreter, which raises if two race.

    That is if shared or global memory is read before it was written, or written by two at once.
    """
    needs_interpreter()
    options = {"scale": case.head_dim**-0.5} | case.options | options
    arrays = {name: options.pop(name) for name in ("k_scale", "page_offset") if name in options}

    @jax.jit
    def attend(q: Any, pages: Any, tables: Any, lens: Any, starts: Any, arrays: Any) -> Any:
        params = mosaic_gpu_mla.plgpu.InterpretGPUParams(detect_races=True)  # type: ignore[attr-defined]
        latent, rope = q[..., : case.latent_dim], q[..., case.latent_dim :]
        return mosaic_gpu_mla.attend(
            latent, rope, pages, tables, lens, starts, **options, **arrays, ctas=ctas, interpret=params
        )

    args = case.q, load(case.kv_pages), case.block_tables, case.context_lens, case.query_starts, arrays
    out, lse = attend.lower(*args).compile({"xla_backend_optimization_level": 0})(*args)
    assert out.dtype == case.dtype
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


CASES = {
    "decode": (Case((1,) * 5, (1, 15, 64, 65, 150), padding=0, heads=16, **SMALL, **DECODE), 5),
    "decode with padding rows": (Case((1, 0, 1, 0), (40, 0, 130, 0), heads=3, page_size=64, **SMALL, **DECODE), 7),
    "100 heads": (Case((1,) * 2, (64, 130), heads=100, **SMALL, **DECODE), 6),
    "128 heads, pages of 8": (Case((1,) * 2, (70, 9), heads=128, page_size=8, **SMALL, **DECODE), 3),
    "mixed": (Case((1, 0, 5, 33, 1), (1, 0, 65, 49, 170), heads=16, **SMALL), 8),
    "prefill of float16, soft cap": (
        Case((20, 3), (40, 80), heads=48, **(SMALL | {"dtype": jnp.float16}), options={"soft_cap": 2.0}),
        5,
    ),
    "rank 256, RoPE 128, pages of 128": (
        Case((2, 1), (140, 129), heads=64, page_size=128, **(SMALL | {"head_dim": 384, "latent_dim": 256})),
        4,
    ),
}


@pytest.mark.parametrize(("case", "ctas"), CASES.values(), ids=CASES.keys())
def test_matches_numpy(case: Case, ctas: int) -> None:
    assert_half_close(interpret(case, ctas=ctas), case.numpy())


@pytest.mark.parametrize(("stored", "heads"), [(jnp.int8, 80), (jnp.float8_e4m3fn, 5)])
def test_quantised_pages(stored: Any, heads: int) -> None:
    case, k_scale = Case((1, 4, 0), (65, 131, 0), heads=heads, **SMALL), 2.0**-4

    def quantise(x: Any) -> jax.Array:
        x = jnp.asarray(x, jnp.float32) / k_scale
        return (jnp.round(x) if stored == jnp.int8 else x).astype(stored)

    case.kv = [np.asarray(quantise(kv), np.float64) * k_scale for kv in case.kv]
    case.kv_pages = quantise(load(case.kv_pages))
    assert_half_close(interpret(case, k_scale=jnp.float32(k_scale)), case.numpy())


@pytest.mark.parametrize(
    ("case", "ctas"),
    [
        (Case((1, 0, 5, 9), (1, 0, 165, 49), heads=16, **SMALL), 6),
        (Case((1, 2, 3), (165, 49, 100), heads=16, page_size=128, **SMALL), 2),
    ],
    ids=["pages of 16", "a sequence without keys between others"],
)
def test_dealt_pages(case: Case, ctas: int) -> None:
    dealt = case.deal(3, 1)
    assert_half_close(interpret(dealt, ctas=ctas), dealt.numpy())


@settings(max_examples=4, deadline=None)
@given(rows=BATCHES, seed=st.integers(0, 99))
def test_drawn_batches(rows: list[tuple[int, int]], seed: int) -> None:
    queries = tuple(query for query, _ in rows)
    contexts = tuple(query + before if query else 0 for query, before in rows)
    case = Case(queries, contexts, padding=80 - sum(queries), heads=8, **SMALL, seed=seed)
    case.block_tables = np.pad(case.block_tables, ((0, 0), (0, 16 - case.block_tables.shape[1])))
    case.kv_pages = jnp.pad(case.kv_pages, ((0, 50 - len(case.kv_pages)), (0, 0), (0, 0)))
    needs_interpreter()
    assert_half_close(case.run("mosaic_gpu"), case.numpy())


def test_result_hardly_depends_on_how_the_work_is_cut() -> None:
    """P is rounded alike wherever an item is cut: only the order of float32 sums differs."""
    case = Case((1, 1), (400, 90), padding=0, heads=4, **(SMALL | {"dtype": jnp.float16}))
    out, lse = interpret(case, ctas=1)
    cut, cut_lse = interpret(case, ctas=9)
    assert np.mean(out != cut) < 0.02
    np.testing.assert_allclose(lse, cut_lse, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "dtypes", "message"),
    [
        ({"heads": 129}, ("bfloat16",), "up to 128 query heads, not 129"),
        ({"kv_lora_rank": 320}, ("bfloat16",), "kv_lora_rank of 128, 256, 384 or 512, not 320"),
        ({"qk_rope_head_dim": 128}, ("bfloat16",), "up to 576 with the kv_lora_rank, not 128"),
        ({"page_size": 24}, ("bfloat16",), "not of 24"),
        ({}, ("bfloat16", "float8_e5m2"), "does not read float8_e5m2"),
        ({}, ("bfloat16", "float16"), "does not read float16 with bfloat16 queries"),
    ],
)
def test_refused(changes: dict[str, int], dtypes: tuple[str, ...], message: str) -> None:
    sizes = MLASizes(**(vars(LATENT) | changes))
    with pytest.raises(NotImplementedError, match=message):
        choose_implementation("mosaic_gpu", H100, *dtypes, sizes=sizes)
    assert choose_implementation(None, H100, *dtypes, sizes=sizes) == "xla"
