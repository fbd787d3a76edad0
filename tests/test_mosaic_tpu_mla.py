"""The TPU kernel for latent attention, simulated with race detection: ragged batches and their edges.

`scripts/check_kernels` compiles it for the chips.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from test_paged_attention import MIXED, Case, assert_close

from paxserve.pallas_kernels import mosaic_tpu_mla

MLA = {"heads": 6, "kv_heads": 1, "head_dim": 20, "latent_dim": 12}
CASES = {
    "mixed, in small blocks": Case(**MIXED, **MLA, padding=40, options={"soft_cap": 2.0}),
    "decode with padding rows": Case(
        (1, 0, 1, 1, 1), (40, 0, 3, 77, 1), padding=2, **MLA, options={"max_query_len": 1}
    ),
    "page boundaries": Case((1,) * 5 + (2,) * 3, (15, 16, 17, 31, 33, 15, 16, 17), **MLA),
    "a table longer than is copied at once": Case((1, 1), (2200, 1), **MLA, options={"max_query_len": 1}),
    "only padding": Case((0, 0), (0, 0), padding=4, **MLA),
    "as released, paired": Case((1, 3), (70, 40), heads=16, kv_heads=1, head_dim=576, latent_dim=512, paired=True),
}

SMALL = {
    "mosaic_tpu mla decode": {"decodes": 2, "decode_keys": 64, "slots": 3},
    "mosaic_tpu mla prefill": {"query_rows": 48, "query_keys": 32, "parts": 2, "hoisting": 64, "slots": 3},
}


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    """Race detection, and blocks so small that a few tokens fill several."""
    monkeypatch.setattr(mosaic_tpu_mla, "block_sizes", lambda kernel, **_: SMALL[kernel])
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    races = interpret_pallas_call.races
    pltpu.reset_tpu_interpret_mode_state()
    assert races is None or not races.races_found


@pytest.mark.parametrize("case", [pytest.param(case, id=label) for label, case in CASES.items()])
def test_matches_numpy(case: Case) -> None:
    assert_close(case.run("mosaic_tpu"), case.numpy(), atol=1e-5)


@pytest.mark.parametrize(("stride", "rank"), [(2, 1), (3, 0)])
def test_dealt_pages(stride: int, rank: int) -> None:
    """Rows that see no key of the pages that are here among rows that do."""
    dealt = Case((1, 1, 40, 1, 3), (70, 16, 45, 100, 20), **MLA).deal(stride, rank)
    assert_close(dealt.run("mosaic_tpu"), dealt.numpy(), atol=1e-5)


def test_two_cores_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_tpu_mla, "cores_per_device", lambda: 2)
    case = Case((1, 20, 1, 7), (70, 33, 1, 9), padding=9, **MLA)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)):
        assert_close(case.run("mosaic_tpu"), case.numpy(), atol=1e-5)


def test_several_columns_of_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block wider than a matrix unit."""
    monkeypatch.setattr(mosaic_tpu_mla, "matrix_columns", lambda rows: 4)
    case = Case((1, 20, 1), (70, 45, 9), **MLA)
    assert_close(case.run("mosaic_tpu"), case.numpy(), atol=1e-5)


def test_bfloat16_with_every_free_slot_nan() -> None:
    case = Case((1, 1, 20), (50, 1, 33), heads=8, kv_heads=1, head_dim=96, latent_dim=64, dtype=jnp.bfloat16, seed=3)
    out, lse = case.run("mosaic_tpu")
    expected, expected_lse = case.run("reference")
    assert np.abs(out - expected).max() < 2**-6
    np.testing.assert_allclose(lse, expected_lse, atol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_quantised_pages(dtype: jnp.dtype) -> None:
    case = Case((1, 1, 2), (50, 33, 20), **MLA, paired=True)
    case.kv_pages = jnp.asarray(np.random.default_rng(1).integers(-127, 128, case.kv_pages.shape), dtype)
    result = case.run("mosaic_tpu", k_scale=jnp.float32(0.03))
    case.kv_pages = case.kv_pages.astype(jnp.float32) * 0.03
    assert_close(result, case.run("reference"), atol=2e-5)


def test_a_sequence_that_overflowed_does_not_reach_its_neighbours() -> None:
    """Infinite values of one sequence stay in the buffers that the next ones use."""
    case = Case((1, 1, 1), (60, 3, 20), **MLA, options={"max_query_len": 1})
    expected = case.numpy()
    case.kv_pages = case.kv_pages.at[case.block_tables[0, :4]].set(jnp.inf)
    out, lse = case.run("mosaic_tpu")
    assert_close((out[1:3], lse[1:3]), (expected[0][1:3], expected[1][1:3]), atol=1e-5)


@settings(max_examples=4, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 60)), min_size=3, max_size=3),
    stride=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_drawn_batches(rows: list[tuple[int, int]], stride: int, seed: int) -> None:
    queries = tuple(query for query, _ in rows)
    contexts = tuple(query + before if query else 0 for query, before in rows)
    case = Case(queries, contexts, padding=64 - sum(queries), seed=seed, **MLA)
    case.block_tables = np.pad(case.block_tables, ((0, 0), (0, 9 - case.block_tables.shape[1])))
    case.kv_pages = jnp.pad(case.kv_pages, ((0, 24 - len(case.kv_pages)), (0, 0), (0, 0)))
    case = case.deal(stride, seed % stride)
    assert_close(case.run("mosaic_tpu"), case.numpy(), atol=1e-5)
