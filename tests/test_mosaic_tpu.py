"""The TPU kernels, simulated with race detection: a choice of the cases that every implementation passes, and their edges.

`scripts/check_kernels` compiles them for the chips.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from test_paged_attention import H100, MIXED, TPU, Case, assert_close

from paxserve.pallas_kernels import (
    GQASizes,
    MLASizes,
    choose_implementation,
    mla_pages_shape,
    mosaic_tpu,
    mosaic_tpu_mla,
    mosaic_tpu_write,
    paged_attention,
    schedule_attention,
    storage_dtype,
    write_latent_pages,
    write_pages,
)

EVERYTHING = {"window": jnp.int32(21), "soft_cap": 2.0, "sinks": jnp.linspace(-1.0, 5.0, 6)}
LATENT = MLASizes(heads=16, kv_lora_rank=512, qk_rope_head_dim=64, page_size=64)
CASES = {
    "mixed, in small blocks": Case(**MIXED, padding=40, options=EVERYTHING),
    "decode with padding rows, head_dim 128": Case(
        (1, 0, 1, 1, 1), (40, 0, 3, 77, 1), head_dim=128, padding=2, page_size=8, options={"max_query_len": 1}
    ),
    "a table longer than is copied at once": Case(
        (1, 1), (1100, 1), heads=2, kv_heads=1, page_size=8, options={"max_query_len": 1}
    ),
    "only padding": Case((0, 0), (0, 0), padding=4),
    "prefill, head_dim 128": Case((20, 1, 40), (20, 30, 61), heads=2, kv_heads=1, head_dim=128),
    "prefill, head_dim 192": Case((20, 1), (37, 30), heads=2, kv_heads=2, head_dim=192),
    "prefill, head_dim 80": Case((20, 1), (37, 30), heads=2, kv_heads=1, head_dim=80),
}

SMALL = {
    "mosaic_tpu decode": {"block_keys": 32, "chains": 4, "slots": 3},
    "mosaic_tpu prefill": {"query_rows": 48, "query_keys": 16, "turn": 2, "hoisting": 64, "slots": 4},
}


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    """Race detection, and blocks so small that a few tokens fill several."""
    monkeypatch.setattr(mosaic_tpu, "block_sizes", lambda kernel, **_: SMALL[kernel])
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    races = interpret_pallas_call.races
    pltpu.reset_tpu_interpret_mode_state()
    assert races is None or not races.races_found


@pytest.mark.parametrize("case", [pytest.param(case, id=label) for label, case in CASES.items()])
def test_matches_numpy(case: Case) -> None:
    assert_close(case.run("mosaic_tpu"), case.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((1, 20, 1, 2, 1), (50, 33, 1, 90, 9), padding=9), id="mixed"),
        pytest.param(Case((1, 40, 1, 1), (70, 61, 20, 33), padding=4, options={"window": jnp.int32(21)}), id="window"),
    ],
)
def test_dealt_pages(case: Case) -> None:
    """Of three devices, the second: some sequences and some rows have no keys there."""
    dealt = case.deal(3, 1)
    assert_close(dealt.run("mosaic_tpu"), dealt.numpy(), atol=1e-5)


@pytest.mark.parametrize("latent", [False, True])
def test_a_schedule_made_before(latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is all that attention takes of the batch: what is made of it anew could not be told from this."""
    small = SMALL | {
        "mosaic_tpu mla decode": {"decodes": 2, "decode_keys": 32, "slots": 3},
        "mosaic_tpu mla prefill": {"query_rows": 48, "query_keys": 32, "parts": 2, "hoisting": 64, "slots": 3},
    }
    for module in (mosaic_tpu, mosaic_tpu_mla):
        monkeypatch.setattr(module, "block_sizes", lambda kernel, **_: small[kernel])
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 1, "head_dim": 20, "latent_dim": 12} if latent else {}
    case = Case((1, 20, 1, 7), (50, 33, 1, 9), padding=7, **sizes)
    _, heads, dim = case.q.shape
    kinds: Any = MLASizes(heads, 12, dim - 12, 16) if latent else GQASizes(heads, case.kv_pages.shape[1], dim, 16)
    expected = case.numpy()
    schedule = schedule_attention(
        kinds,
        jnp.asarray(case.context_lens),
        jnp.asarray(case.query_starts),
        tokens=len(case.q),
        max_pages=case.block_tables.shape[1],
        dtypes=(case.q.dtype, case.kv_pages.dtype),
        implementation="mosaic_tpu",
    )
    case.context_lens, case.query_starts = np.zeros_like(case.context_lens), np.zeros_like(case.query_starts)
    assert_close(case.run("mosaic_tpu", schedule=schedule), expected, atol=1e-5)
    with pytest.raises(ValueError, match="'xla' takes no schedule"):
        case.run("xla", schedule=schedule)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_turns_of_many_units(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = SMALL | {"mosaic_tpu prefill": SMALL["mosaic_tpu prefill"] | {"turn": 8}}
    monkeypatch.setattr(mosaic_tpu, "block_sizes", lambda kernel, **_: longer[kernel])
    case = Case((20, 1, 40), (20, 30, 261), heads=2, kv_heads=kv_heads)
    assert_close(case.run("mosaic_tpu"), case.numpy(), atol=1e-5)


def test_two_cores_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_tpu, "cores_per_device", lambda: 2)
    case = Case((1, 20, 1, 7, 30), (70, 33, 1, 9, 40), heads=2, kv_heads=1, padding=9)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)):
        assert_close(case.run("mosaic_tpu"), case.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("kv_heads", "most_tiles", "chains", "expected"),
    [
        (4, 9, 12, (4, 3)),
        (8, 9, 12, (4, 3)),
        (32, 1, 12, (8, 1)),
        (2, 6, 11, (2, 5)),
        (2, 99, 11, (1, 11)),
        (8, 9, 1, (1, 1)),
    ],
)
def test_decodes_side_by_side(kv_heads: int, most_tiles: int, chains: int, expected: tuple[int, int]) -> None:
    assert mosaic_tpu._side_by_side(kv_heads, most_tiles, chains) == expected


def test_bfloat16_with_every_free_slot_nan() -> None:
    case = Case((1, 1, 20), (50, 1, 33), heads=4, kv_heads=2, head_dim=64, dtype=jnp.bfloat16, seed=3)
    out, lse = case.run("mosaic_tpu")
    expected, expected_lse = case.run("reference")
    assert np.abs(out - expected).max() < 2**-6
    np.testing.assert_allclose(lse, expected_lse, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "queries", "contexts"), [(jnp.int8, (1, 1), (50, 33)), (jnp.float8_e4m3fn, (1, 9), (50, 33))]
)
def test_quantised_pages(dtype: Any, queries: tuple[int, ...], contexts: tuple[int, ...]) -> None:
    options = {"max_query_len": max(queries)}
    case = Case(queries, contexts, heads=4, kv_heads=2, page_size=32, padding=0, options=options)
    drawn = np.random.default_rng(1).integers(-127, 128, case.kv_pages.shape)
    case.kv_pages = jnp.asarray(drawn).astype(dtype)
    result = case.run("mosaic_tpu", k_scale=jnp.float32(0.03), v_scale=jnp.float32(0.05))
    case.kv_pages = case.kv_pages.astype(jnp.float32) * jnp.repeat(jnp.asarray([0.03, 0.05]), case.head_dim)
    assert_close(result, case.run("reference"), atol=2e-5)


def test_a_context_beyond_65536_tokens() -> None:
    """Of which a window leaves all but the end: positions and tables are long, the work is not."""
    case = Case((1, 2), (66_000, 65_537), heads=1, kv_heads=1, head_dim=8, options={"window": jnp.int32(40)})
    assert_close(case.run("mosaic_tpu"), case.numpy(), atol=1e-5)


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=3, max_size=3),
    window=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_drawn_batches(rows: list[tuple[int, int]], window: int, seed: int) -> None:
    queries = tuple(query for query, _ in rows)
    contexts = tuple(query + before if query else 0 for query, before in rows)
    case = Case(queries, contexts, 2, 2, padding=70 - sum(queries), seed=seed, options={"window": jnp.int32(window)})
    case.block_tables = np.pad(case.block_tables, ((0, 0), (0, 6 - case.block_tables.shape[1])))
    case.kv_pages = jnp.pad(case.kv_pages, ((0, 20 - len(case.kv_pages)), (0, 0), (0, 0), (0, 0)))
    assert_close(case.run("mosaic_tpu"), case.run("reference"), atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
def test_written_pages(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that begin and end within tiles and chunks of tokens, a page that is not there, padding on the null page."""
    monkeypatch.setattr(mosaic_tpu_write, "CHUNK", 8)
    token_pages = np.array([3] * 9 + [4] * 3 + [2, 7, 11, 1, 1, 0, 0, 0])
    token_offsets = np.array([*range(55, 64), *range(3), 5, 63, 0, 9, 40, 0, 0, 0])
    rng = np.random.default_rng(0)
    pages = jnp.asarray(rng.integers(-9, 10, (9, 2, 64, 32))).astype(storage_dtype(dtype))
    k, v = jnp.asarray(rng.integers(-9, 10, (2, len(token_pages), 2, 16)), jnp.float32)
    scales = {"k_scale": 1.0, "v_scale": 1.0} if dtype == jnp.int8 else {}
    write = jax.jit(write_pages, static_argnames="implementation")
    written = write(pages, k, v, token_pages, token_offsets, implementation="mosaic_tpu", **scales)
    expected = write(pages, k, v, token_pages, token_offsets, implementation="xla", **scales)
    np.testing.assert_array_equal(np.asarray(written[1:], np.float32), np.asarray(expected[1:], np.float32))


def test_written_stacked_pages() -> None:
    pages = jnp.zeros((3, 1, 32, 8))
    k, v = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 1, 8)))
    at = np.array([2, 2, 1]), np.array([7, 8, 0])
    expected = write_pages(pages, k, v, *at, implementation="xla")
    write = jax.jit(write_pages, static_argnames="implementation")
    np.testing.assert_array_equal(write(pages, k, v, *at, implementation="mosaic_tpu"), expected)


@pytest.mark.parametrize(
    ("dtype", "paired"),
    [(jnp.float32, True), (jnp.bfloat16, True), (jnp.int8, True), (jnp.float8_e4m3fn, True), (jnp.int8, False)],
)
def test_written_latent_pages(dtype: Any, paired: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of both halves of a row, of one alone, of two chunks; a page that is not there, padding on the null page."""
    monkeypatch.setattr(mosaic_tpu_write, "CHUNK", 8)
    token_pages = np.array([3] * 11 + [2, 5, 1, 0, 0])
    token_offsets = np.array([*range(6, 17), 31, 0, 8, 0, 0])
    rng = np.random.default_rng(0)
    pages = jnp.asarray(rng.integers(-9, 10, mla_pages_shape(1, 5, 32, 20, paired=paired))).astype(storage_dtype(dtype))
    latent, k_rope = (jnp.asarray(rng.integers(-9, 10, (16, size)), jnp.float32) for size in (12, 8))
    scale = {"k_scale": 1.0} if dtype == jnp.int8 else {}
    write = jax.jit(write_latent_pages, static_argnames="implementation")
    written = write(pages, latent, k_rope, token_pages, token_offsets, implementation="mosaic_tpu", **scale)
    expected = write(pages, latent, k_rope, token_pages, token_offsets, implementation="xla", **scale)
    np.testing.assert_array_equal(np.asarray(written[1:], np.float32), np.asarray(expected[1:], np.float32))


def test_a_sequence_that_overflowed_does_not_reach_its_neighbours() -> None:
    """Infinite values of one sequence stay in the buffers that the next ones use."""
    case = Case((1, 1, 1), (60, 3, 20), heads=2, kv_heads=1, options={"max_query_len": 1})
    expected = case.numpy()
    case.kv_pages = case.kv_pages.at[case.block_tables[0, :4]].set(jnp.inf)
    out, lse = case.run("mosaic_tpu")
    assert_close((out[1:3], lse[1:3]), (expected[0][1:3], expected[1][1:3]), atol=1e-5)


def test_chosen_on_tpu_for_what_it_computes() -> None:
    assert choose_implementation(None, TPU, jnp.bfloat16, sizes=GQASizes(8, 2, 128, 32)) == "mosaic_tpu"
    assert choose_implementation(None, TPU, jnp.bfloat16, sizes=GQASizes(8, 2, 128, 8)) == "xla"
    assert choose_implementation(None, TPU, jnp.float16, sizes=GQASizes(8, 2, 128, 32)) == "xla"
    assert choose_implementation(None, TPU, jnp.bfloat16, sizes=LATENT) == "mosaic_tpu"
    with pytest.raises(NotImplementedError, match="does not run on gpu"):
        choose_implementation("mosaic_tpu", H100, jnp.bfloat16, sizes=LATENT)
    with pytest.raises(NotImplementedError, match="bfloat16 pages must hold a multiple of 16 tokens, not 8"):
        choose_implementation("mosaic_tpu", TPU, jnp.bfloat16, sizes=dataclasses.replace(LATENT, page_size=8))
    with pytest.raises(NotImplementedError, match="bfloat16 pages must hold a multiple of 16 tokens, not 8"):
        choose_implementation("mosaic_tpu", TPU, jnp.bfloat16, sizes=GQASizes(8, 2, 128, 8))
    with pytest.raises(NotImplementedError, match="does not read float16"):
        paged_attention(
            jnp.zeros((1, 1, 16), jnp.float16),
            jnp.zeros((2, 1, 16, 32), jnp.float16),
            jnp.zeros((1, 1), jnp.int32),
            jnp.ones(1, jnp.int32),
            jnp.arange(2),
            scale=1.0,
            implementation="mosaic_tpu",
        )
