"""Every implementation of paged attention against the reference, and the reference against plain NumPy."""

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice

from paxserve.pallas_kernels import (
    IMPLEMENTATIONS,
    gqa_pages_shape,
    mla_paged_attention,
    mla_pages_shape,
    paged_attention,
    storage_dtype,
    write_latent_pages,
    write_pages,
)
from paxserve.pallas_kernels.layout import pair

GQA: dict[str, Any] = {}
MLA: dict[str, Any] = {"kv_heads": 1, "head_dim": 20, "latent_dim": 12}
INTERPRETED = {"mosaic_gpu", "mosaic_tpu"}  # on CPU: a few cases, of sizes that the hardware computes
FAST_NAMES = sorted(set(IMPLEMENTATIONS) - {"reference"} - INTERPRETED)
FAST = [
    pytest.param(name, kind, id=f"{name}-{label}")
    for label, kind in (("gqa", GQA), ("mla", MLA))
    for name in FAST_NAMES
]


@functools.cache
def jitted(function: Any, static: tuple[str, ...]) -> Any:
    return jax.jit(function, static_argnames=static)


CPU = AbstractDevice("cpu", None, "cpu")
TPU = AbstractDevice("TPU v5", 2, "tpu")
A100 = AbstractDevice("NVIDIA A100-SXM4-80GB", 108, "gpu")
H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")


def needs_interpreter() -> None:
    """Skips a test of Mosaic GPU kernels where JAX is too old to interpret them."""
    if jax.__version_info__ < (0, 11):  # by version, not by what JAX has: a newer one without an interpreter fails
        pytest.skip(f"interpreting Mosaic GPU kernels needs JAX 0.11 (Python 3.12) or newer; this is {jax.__version__}")


@dataclass
class Case:
    """A ragged batch over shuffled pages. Free pages, free slots and spare block-table entries hold garbage.

    latent_dim: of latent attention, the values of a cached row of `head_dim` that are the latent, and so V.
    paired: of latent attention, whether pages hold two tokens in a row.
    """

    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16
    padding: int = 3
    dtype: Any = jnp.float32
    seed: int = 0
    stacked: bool = False
    latent_dim: int | None = None
    paired: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        d = self.head_dim
        rows = 1 if self.latent_dim else 2
        self.kv = [rng.standard_normal((rows, self.kv_heads, c, d)) for c in self.contexts]
        tokens = sum(self.queries) + self.padding
        # Rounded to the dtype first: NumPy and the implementations then see the same numbers.
        self.q = np.asarray(jnp.asarray(rng.standard_normal((tokens, self.heads, d)), self.dtype))
        self.kv = [np.asarray(jnp.asarray(kv, self.dtype), np.float64) for kv in self.kv]
        page_counts = [-(-c // self.page_size) for c in self.contexts]
        num_pages = sum(page_counts) + 4
        ids = iter(rng.permutation(np.arange(1, num_pages)))
        pages = np.full((num_pages, self.kv_heads, self.page_size, rows * d), np.nan)
        self.block_tables = rng.choice([-7, 0, num_pages - 1, 10**6], (len(self.contexts), max(page_counts) + 2))
        for s, kv in enumerate(self.kv):
            for j in range(page_counts[s]):
                page = self.block_tables[s, j] = next(ids)
                part = kv[:, :, j * self.page_size : (j + 1) * self.page_size]
                pages[page, :, : part.shape[2]] = np.concatenate(part, axis=-1)
        if self.stacked:
            pages = np.concatenate([pages[..., :d], pages[..., d:]], axis=2)
        if self.latent_dim:
            pages = np.asarray(pair(pages[:, 0], self.latent_dim)) if self.paired else pages[:, 0]
            assert pages.shape == mla_pages_shape(1, num_pages, self.page_size, d, paired=self.paired)
        else:
            assert pages.shape == gqa_pages_shape(1, num_pages, self.kv_heads, self.page_size, d, stacked=self.stacked)
        stored = jnp.asarray(pages, self.dtype)
        as_stored = storage_dtype(self.dtype)
        self.kv_pages = stored if as_stored == self.dtype else jax.lax.bitcast_convert_type(stored, as_stored)
        self.visible = [np.ones(c, bool) for c in self.contexts]
        self.context_lens = np.asarray(self.contexts, np.int32)
        self.query_starts = np.cumsum([0, *self.queries], dtype=np.int32)

    def run(self, implementation: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        options = {"scale": self.head_dim**-0.5, "implementation": implementation} | self.options | options
        is_array = jax.tree.map(lambda leaf: isinstance(leaf, jax.Array), options)
        static = tuple(name for name in options if not any(jax.tree.leaves(is_array[name])))
        function: Any = mla_paged_attention if self.latent_dim else paged_attention
        q = (self.q[..., : self.latent_dim], self.q[..., self.latent_dim :]) if self.latent_dim else (self.q,)
        args = (*q, self.kv_pages, self.block_tables, self.context_lens, self.query_starts)
        out, lse = jitted(function, static)(*args, **options)
        assert out.dtype == self.dtype
        assert lse.dtype == jnp.float32
        return np.asarray(out, np.float64), np.asarray(lse, np.float64)

    def deal(self, stride: int, rank: int) -> "Case":
        """This case as a device sees it that holds every `stride`-th page, of sequence s from its page (rank + s) % stride on.

        The other pages' keys are no longer there for `numpy` either.
        """
        dealt = copy.copy(self)
        offsets = (rank + np.arange(len(self.contexts))) % stride
        dealt.block_tables = np.full_like(self.block_tables, -7)
        dealt.visible = []
        for s, offset in enumerate(offsets):
            own = self.block_tables[s, offset::stride]
            dealt.block_tables[s, : len(own)] = own
            dealt.visible.append(np.arange(self.contexts[s]) // self.page_size % stride == offset)
        dealt.options = self.options | {"page_stride": stride, "page_offset": jnp.asarray(offsets, jnp.int32)}
        return dealt

    def numpy(self) -> tuple[np.ndarray, np.ndarray]:
        """Softmax attention in float64, one query token and one head at a time."""
        out = np.zeros((*self.q.shape[:2], self.latent_dim or self.head_dim))
        lse = np.full(self.q.shape[:2], -np.inf)
        window, soft_cap = self.options.get("window"), self.options.get("soft_cap")
        sinks = self.options.get("sinks")
        for s, kv in enumerate(self.kv):
            for i in range(self.queries[s]):
                token = self.query_starts[s] + i
                end = self.contexts[s] - self.queries[s] + i + 1
                start = 0 if window is None else max(end - int(window), 0)
                seen = self.visible[s][start:end]
                if not seen.any():
                    continue
                for h in range(self.heads):
                    head = kv[:, h // (self.heads // self.kv_heads), start:end][:, seen]
                    k, v = head[0], head[-1][:, : self.latent_dim]
                    logits = k @ self.q[token, h].astype(np.float64) * self.head_dim**-0.5
                    if soft_cap is not None:
                        logits = soft_cap * np.tanh(logits / soft_cap)
                    total = np.exp(logits).sum() + (0 if sinks is None else np.exp(float(sinks[h])))
                    out[token, h] = np.exp(logits) / total @ v
                    lse[token, h] = np.log(total)
        return out, lse


def assert_close(actual: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray], atol: float) -> None:
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=atol, rtol=atol)


def assert_half_close(actual: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]) -> None:
    """Of 16-bit attention: the output to a rounding or two of bfloat16, the log-sum-exp as float32 gives it."""
    np.testing.assert_allclose(actual[0], expected[0], atol=2**-7, rtol=2**-7)
    np.testing.assert_allclose(actual[1], expected[1], atol=2e-6, rtol=2e-6)


MIXED = {"queries": (1, 0, 5, 33, 1, 16, 1), "contexts": (1, 0, 5, 49, 16, 17, 70)}
CASES = {
    "mixed": Case(**MIXED),
    "decode": Case((1,) * 6, (1, 15, 16, 17, 33, 100), padding=0),
    "decode with padding rows": Case((1, 0, 1, 0), (40, 0, 3, 0), padding=2, options={"max_query_len": 1}),
    "prefill longer than a tile": Case((150, 70), (150, 90), padding=4),
    "decode in several lanes": Case(
        (1,) * 24, tuple(range(24, 0, -1)), heads=2, kv_heads=1, padding=0, stacked=True, options={"max_query_len": 1}
    ),
    "stacked": Case(**MIXED, stacked=True),
    "stacked decode": Case((1,) * 6, (1, 15, 16, 17, 33, 100), padding=0, stacked=True),
    "stacked, window over pages": Case(**MIXED, heads=9, kv_heads=3, stacked=True, options={"window": jnp.int32(37)}),
    "only padding": Case((0, 0), (0, 0), padding=4),
    "heads: one kv head, head_dim 64": Case(**MIXED, heads=4, kv_heads=1, head_dim=64),
    "heads: as many as kv heads, head_dim 80": Case(**MIXED, heads=3, kv_heads=3, head_dim=80),
    "heads: head_dim 96, page size 8": Case(**MIXED, heads=9, kv_heads=3, head_dim=96, page_size=8),
    "heads: head_dim 128, page size 64": Case(**MIXED, heads=4, kv_heads=2, head_dim=128, page_size=64),
    "window of one": Case(**MIXED, options={"window": jnp.int32(1)}),
    "window within a page": Case(**MIXED, options={"window": jnp.int32(7)}),
    "window over pages": Case(**MIXED, options={"window": jnp.int32(37)}),
    "window static": Case(**MIXED, options={"window": 20}),
    "soft cap": Case(**MIXED, options={"soft_cap": 0.7}),
    "sinks": Case(**MIXED, options={"sinks": jnp.linspace(-4.0, 4.0, 6)}),
    "everything": Case(**MIXED, options={"window": jnp.int32(9), "soft_cap": 2.0, "sinks": jnp.linspace(-1.0, 5.0, 6)}),
}

MLA_CASES = {
    "latent": Case(**MIXED, **MLA),
    "latent, decode": Case((1,) * 6, (1, 15, 16, 17, 33, 100), padding=0, **MLA, options={"max_query_len": 1}),
    "latent, decode with many heads": Case((1,) * 3, (1, 17, 100), heads=40, **MLA),
    "latent, padding rows": Case((1, 0, 1, 0), (40, 0, 3, 0), padding=2, **MLA, options={"max_query_len": 1}),
    "latent, prefill longer than a tile": Case((150, 70), (150, 90), padding=4, heads=2, **MLA),
    "latent, as released": Case(**MIXED, heads=4, kv_heads=1, head_dim=576, latent_dim=512, page_size=8),
    "latent, paired": Case(**MIXED, **MLA, paired=True),
    "latent, paired decode": Case((1,) * 6, (1, 15, 16, 17, 33, 100), padding=0, **MLA, paired=True),
    "latent, soft cap": Case(**MIXED, **MLA, options={"soft_cap": 0.7}),
}


@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        pytest.param(case, name, id=f"{label}-{name}")
        for label, case in (CASES | MLA_CASES).items()
        for name in ("reference", *FAST_NAMES)
    ],
)
def test_matches_numpy(case: Case, implementation: str) -> None:
    assert_close(case.run(implementation), case.numpy(), atol=1e-5)


DEALT = {
    "mixed": Case(**MIXED),
    "window": Case(**MIXED, stacked=True, options={"window": jnp.int32(21)}),
    "long": Case((1, 150, 2), (200, 170, 100), page_size=8),
    "latent": Case(**MIXED, **MLA),
    "latent, paired": Case(**MIXED, **MLA, paired=True),
}


@pytest.mark.parametrize(("stride", "rank"), [(2, 1), (3, 0)])
@pytest.mark.parametrize("implementation", ["reference", *FAST_NAMES])
@pytest.mark.parametrize("case", DEALT.values(), ids=DEALT.keys())
def test_dealt_pages(case: Case, implementation: str, stride: int, rank: int) -> None:
    dealt = case.deal(stride, rank)
    assert_close(dealt.run(implementation), dealt.numpy(), atol=1e-5)


HALF: dict[str, Any] = {"head_dim": 64, "dtype": jnp.bfloat16}
LONGER = {"queries": (1, 0, 5, 33, 1, 16, 1), "contexts": (1, 0, 65, 49, 64, 17, 170)}
INTERPRETED_CASES = {
    "mixed": Case(**LONGER, **HALF),
    "decode": Case((1,) * 6, (1, 15, 16, 17, 65, 200), padding=0, **HALF, options={"max_query_len": 1}),
    "head_dim 128, pages of 128": Case((1, 7), (270, 130), heads=8, page_size=128, head_dim=128, dtype=jnp.bfloat16),
    "everything": Case(
        **LONGER, **HALF, options={"window": jnp.int32(9), "soft_cap": 2.0, "sinks": jnp.linspace(-1.0, 5.0, 6)}
    ),
}


@pytest.mark.parametrize("implementation", sorted(INTERPRETED))
@pytest.mark.parametrize("case", INTERPRETED_CASES.values(), ids=INTERPRETED_CASES.keys())
def test_interpreted_matches_numpy(case: Case, implementation: str) -> None:
    needs_interpreter()
    assert_half_close(case.run(implementation), case.numpy())


@pytest.mark.parametrize(("implementation", "kind"), FAST)
class TestAgainstReference:
    """The base that every fast implementation passes, once for each kind of attention that it computes."""

    def test_bfloat16(self, implementation: str, kind: dict[str, Any]) -> None:
        case = Case(**MIXED, **(kind | {"head_dim": 64, "dtype": jnp.bfloat16}))
        out, lse = case.run(implementation)
        expected, expected_lse = case.run("reference")
        assert np.abs(out - expected).max() < 2**-6
        np.testing.assert_allclose(lse, expected_lse, atol=1e-3)

    def test_int8_pages(self, implementation: str, kind: dict[str, Any]) -> None:
        case = Case(**MIXED, **kind)
        scales = {"k_scale": jnp.float32(0.03)} | ({} if case.latent_dim else {"v_scale": jnp.float32(0.05)})
        case.kv_pages = jnp.asarray(np.random.default_rng(1).integers(-127, 128, case.kv_pages.shape), jnp.int8)
        result = case.run(implementation, **scales)
        per_column = jnp.repeat(jnp.stack(list(scales.values())), case.head_dim)
        case.kv_pages = case.kv_pages * per_column
        assert_close(result, case.run("reference"), atol=2e-5)

    def test_one_promised_query_token_changes_nothing(self, implementation: str, kind: dict[str, Any]) -> None:
        case = Case((1,) * 6, (1, 15, 16, 17, 33, 100), padding=0, **kind)
        assert_close(case.run(implementation, max_query_len=1), case.run(implementation), atol=1e-6)

    def test_result_does_not_depend_on_batch_mates(self, implementation: str, kind: dict[str, Any]) -> None:
        together = Case((3, 1, 40), (20, 300, 60), **kind)
        out, lse = together.run(implementation)
        for s in range(3):
            alone = Case((3, 1, 40), (20, 300, 60), **kind)
            keep = np.arange(3) == s
            alone.context_lens = np.where(keep, alone.context_lens, 0)
            rows = slice(*together.query_starts[s : s + 2])
            alone_out, alone_lse = alone.run(implementation)
            assert_close((alone_out[rows], alone_lse[rows]), (out[rows], lse[rows]), atol=1e-6)
            others = np.delete(np.arange(len(lse)), rows)
            assert not alone_out[others].any()
            assert np.isneginf(alone_lse[others]).all()

    def test_halves_merge_by_lse(self, implementation: str, kind: dict[str, Any]) -> None:
        """A query over keys 0:32 and the same query over keys 32:64, merged, is the query over keys 0:64."""
        case = Case((1, 1), (64, 64), padding=0, **kind)
        out, lse = case.run(implementation)
        case.context_lens = np.asarray([32, 32], np.int32)
        first, first_lse = case.run(implementation)
        case.block_tables = np.roll(case.block_tables, -2, axis=1)
        second, second_lse = case.run(implementation)
        merged_lse = np.logaddexp(first_lse, second_lse)
        merged = first * np.exp(first_lse - merged_lse)[..., None] + second * np.exp(second_lse - merged_lse)[..., None]
        assert_close((merged, merged_lse), (out, lse), atol=1e-5)

    @settings(max_examples=8, deadline=None)
    @given(
        rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=4, max_size=4),
        window=st.integers(1, 90),
        seed=st.integers(0, 99),
    )
    def test_drawn_batches(
        self, implementation: str, kind: dict[str, Any], rows: list[tuple[int, int]], window: int, seed: int
    ) -> None:
        queries = tuple(query for query, _ in rows)
        contexts = tuple(query + before if query else 0 for query, before in rows)
        if kind is GQA:
            kind = {"stacked": True, "options": {"window": jnp.int32(window)}}
        case = Case(queries, contexts, padding=170 - sum(queries), seed=seed, **kind)
        case.block_tables = np.pad(case.block_tables, ((0, 0), (0, 9 - case.block_tables.shape[1])))
        case.kv_pages = jnp.pad(case.kv_pages, ((0, 40 - len(case.kv_pages)), *[(0, 0)] * (case.kv_pages.ndim - 1)))
        assert_close(case.run(implementation), case.run("reference"), atol=1e-5)


@pytest.mark.parametrize("implementation", FAST_NAMES)
class TestGQAAgainstReference:
    """What only grouped-query attention has: windows and stacked pages."""

    def test_bfloat16_stacked(self, implementation: str) -> None:
        TestAgainstReference().test_bfloat16(implementation, {"stacked": True})

    def test_window_does_not_read_pages_before_it(self, implementation: str) -> None:
        """The engine frees pages a window has left: their block-table entries then point anywhere."""
        case = Case((1, 4), (100, 90), options={"window": jnp.int32(20)})
        expected = case.run(implementation)
        case.block_tables[0, : (100 - 20) // 16] = 10**6
        case.block_tables[1, : (90 - 4 + 1 - 20) // 16] = -1
        assert_close(case.run(implementation), expected, atol=0)


def gqa_layer(pages: jax.Array, q: jax.Array, tables: jax.Array, lens: jax.Array, starts: jax.Array) -> Any:
    pages = write_pages(pages, q[:, :2], q[:, :2], tables[:, 0], lens - 1)
    out, _ = paged_attention(q, pages, tables, lens, starts, scale=0.125, max_query_len=1, implementation="xla")
    return pages, out


def mla_layer(pages: jax.Array, q: jax.Array, tables: jax.Array, lens: jax.Array, starts: jax.Array) -> Any:
    pages = write_latent_pages(pages, q[:, 0], q[:, 1], tables[:, 0], lens - 1)
    out, _ = mla_paged_attention(q, q, pages, tables, lens, starts, scale=0.1, max_query_len=1, implementation="xla")
    return pages, out


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(gqa_layer, gqa_pages_shape(2, 4096, 2, 16, 64)), (mla_layer, mla_pages_shape(2, 4096, 16, 128))],
)
def test_temporaries_do_not_grow_with_the_pool(layer: Any, shape: tuple[int, ...]) -> None:
    """A chain of writes and reads updates the donated pages in place and gathers a chunk at a time."""
    pages = jax.ShapeDtypeStruct(shape, storage_dtype(jnp.bfloat16))

    def step(pages: jax.Array, q: jax.Array, tables: jax.Array, lens: jax.Array, starts: jax.Array) -> Any:
        for number in range(2):
            pages, q = layer(pages, q, tables + number * 4096, lens, starts)
        return pages, q

    args = (
        pages,
        jax.ShapeDtypeStruct((4, 6, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((4, 1024), jnp.int32),
        jax.ShapeDtypeStruct((4,), jnp.int32),
        jax.ShapeDtypeStruct((5,), jnp.int32),
    )
    memory: Any = jax.jit(step, donate_argnums=0).lower(*args).compile().memory_analysis()
    pool_bytes = pages.size * 2
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"implementation": "flash"}, "unknown attention implementation 'flash'"),
        ({"window": 0}, "window must be at least 1"),
        ({"soft_cap": 0.0}, "soft_cap must be positive"),
        ({"sinks": jnp.zeros(5)}, "one logit per query head"),
        ({"max_query_len": 0}, "max_query_len must be at least 1"),
        ({"q": jnp.zeros((4, 5, 16))}, "not a multiple of 2 kv heads"),
        ({"q": jnp.zeros((4, 6, 8))}, "do not fit K and V of head_dim 8"),
        ({"q": jnp.zeros((4, 96))}, "expected q"),
        ({"context_lens": jnp.zeros(2, jnp.int32)}, "1 block tables need"),
        ({"kv_pages": jnp.zeros((3, 2, 16, 32), jnp.int8)}, "need k_scale and v_scale"),
    ],
)
def test_user_errors(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "q": jnp.zeros((4, 6, 16)),
        "kv_pages": jnp.zeros((3, 2, 16, 32)),
        "block_tables": jnp.zeros((1, 2), jnp.int32),
        "context_lens": jnp.ones(1, jnp.int32),
        "query_starts": jnp.zeros(2, jnp.int32),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"implementation": "flash"}, "unknown attention implementation 'flash'"),
        ({"soft_cap": -1.0}, "soft_cap must be positive"),
        ({"max_query_len": 0}, "max_query_len must be at least 1"),
        ({"q_rope": jnp.zeros((4, 5, 8))}, "same tokens and heads"),
        ({"q_rope": jnp.zeros((4, 6, 8), jnp.bfloat16)}, "of one dtype"),
        ({"q_rope": jnp.zeros((4, 6, 16))}, "do not hold latents and RoPE parts of 32 values"),
        ({"latent_pages": jnp.zeros((3, 24))}, "expected q_latent"),
        ({"context_lens": jnp.zeros(2, jnp.int32)}, "1 block tables need"),
        ({"latent_pages": jnp.zeros((3, 16, 24), jnp.int8)}, "need k_scale"),
    ],
)
def test_mla_user_errors(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "q_latent": jnp.zeros((4, 6, 16)),
        "q_rope": jnp.zeros((4, 6, 8)),
        "latent_pages": jnp.zeros((3, 16, 24)),
        "block_tables": jnp.zeros((1, 2), jnp.int32),
        "context_lens": jnp.ones(1, jnp.int32),
        "query_starts": jnp.zeros(2, jnp.int32),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        mla_paged_attention(**(arguments | changes))
