"""Attention for Hopper GPUs: the division of its work, its kernels in JAX's interpreter, and what it refuses.

That the kernels compile for the hardware is checked by scripts/check_kernels, and on a GPU by scripts/gpu_check.
"""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh
from test_paged_attention import A100, H100, HALF, TPU, Case, assert_half_close, needs_interpreter

from paxserve.pallas_kernels import GQASizes, MLASizes, api, choose_implementation, mosaic_gpu
from paxserve.pallas_kernels.layout import load
from paxserve.pallas_kernels.mosaic_gpu_schedule import BLOCK, Schedule, make_schedule
from paxserve.pallas_kernels.target import target

LLAMA = GQASizes(heads=32, kv_heads=8, head_dim=128, page_size=32)
LATENT = MLASizes(heads=16, kv_lora_rank=512, qk_rope_head_dim=64, page_size=64)
# The first tile of 40 queries at 130..169 then sees keys from 64, where a block begins: only its first row sees them all.
ALIGNED = {"window": jnp.int32(67), "sinks": jnp.linspace(-1.0, 5.0, 4)}
OTHER_HEAD_DIMS = (80, 96, 192, 256)
BATCHES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), min_size=4, max_size=4)


STATIC = ("tokens", "tile_tokens", "kv_heads", "page_size", "unit", "page_stride", "ctas")
SCHEDULE = jax.jit(make_schedule, static_argnames=STATIC)


@settings(max_examples=40, deadline=None)
@given(
    rows=BATCHES,
    window=st.integers(1, 400),
    sizes=st.sampled_from([(1, 64, 1, 40), (9, 8, 2, 5), (16, 128, 1, 7), (16, 128, 3, 7), (64, 16, 4, 1)]),
)
def test_schedule(rows: list[tuple[int, int]], window: int, sizes: tuple[int, int, int, int]) -> None:
    """Every KV head of every query token gets all blocks of its keys, once; shares are equal; pieces can be found."""
    tile_tokens, page_size, stride, ctas = sizes
    unit, offsets = min(page_size, BLOCK), np.arange(4) % stride
    queries = np.asarray([min(query, tile_tokens) if tile_tokens == 1 else query for query, _ in rows])
    contexts = np.where(queries > 0, queries + [before for _, before in rows], 0)
    contexts[0] = 0  # padding, whatever its queries
    starts, kv_heads, tokens = np.cumsum([0, *queries]), 2, 170
    made = SCHEDULE(
        jnp.asarray(contexts, jnp.int32),
        jnp.asarray(starts, jnp.int32),
        tokens=tokens,
        tile_tokens=tile_tokens,
        kv_heads=kv_heads,
        page_size=page_size,
        unit=unit,
        window=jnp.int32(window),
        page_stride=stride,
        page_offset=jnp.asarray(offsets, jnp.int32),
        ctas=ctas,
    )
    schedule = Schedule(*(np.asarray(each) for each in made))

    tile_blocks = schedule.tiles[:, 2]
    total = int(tile_blocks.sum()) * kv_heads
    owners: dict[tuple[int, int], list[int]] = {}
    shares = []
    for cta, (begin, end, first_item, end_item, _) in enumerate(schedule.ctas):
        shares.append(end - begin)
        for item in range(first_item, end_item):
            tile, head = divmod(item, kv_heads)
            item_begin = schedule.tiles[tile, 1] + head * tile_blocks[tile]
            part = range(max(begin, item_begin), min(end, item_begin + tile_blocks[tile]))
            assert part or not tile_blocks[tile], "an item of a share has a block in it, if it has any"
            for block in part:
                owners.setdefault((item, block - item_begin), []).append(cta)
    assert sum(shares) == total
    assert max(shares) <= max(-(-total // ctas), 1)
    items = range(len(tile_blocks) * kv_heads)
    assert owners.keys() == {(item, block) for item in items for block in range(tile_blocks[item // kv_heads])}
    assert all(len(each) == 1 for each in owners.values())
    for item in items:
        ctas_of = [owners[item, block][0] for block in range(tile_blocks[item // kv_heads])]
        if len(set(ctas_of)) > 1:
            assert schedule.cut_by[item] == ctas_of[0]
            assert schedule.ctas[ctas_of[0], 4] == len(set(ctas_of)) == ctas_of[-1] - ctas_of[0] + 1
        elif ctas_of:
            assert schedule.cut_by[item] == -1

    for seq in range(len(rows)):
        keys = np.arange(400)
        keys_here = keys[keys // page_size % stride == offsets[seq]]
        for i in range(queries[seq]):
            token = starts[seq] + i
            own = contexts[seq] - queries[seq] + i
            visible = np.flatnonzero((keys_here <= own) & (keys_here > own - window))  # in the row of keys here
            if schedule.tile[token] == -1:
                assert contexts[seq] == 0 or not len(visible)
                continue
            tile = schedule.tiles[schedule.tile[token]]
            of_seq, _, blocks, first_unit, last_unit, position, end_key, first_key, offset = tile
            assert (of_seq, offset) == (seq, offsets[seq])
            assert schedule.first_token[schedule.tile[token]] + schedule.row[token] == token
            assert position + schedule.row[token] == own < end_key <= contexts[seq]
            assert first_key <= own - window + 1
            of_tile = np.flatnonzero((keys_here < end_key) & (keys_here >= first_key))
            assert (first_unit, last_unit) == (of_tile[0] // unit, of_tile[-1] // unit)
            assert set(visible) <= set(of_tile)
            assert blocks == -(-(last_unit + 1 - first_unit) // (BLOCK // unit))
    assert (schedule.tile[starts[-1] :] == -1).all()


def interpret(case: Case, *, ctas: int, **params: Any) -> tuple[np.ndarray, np.ndarray]:
    """Runs the kernels on `ctas` thread blocks in JAX's interpreter."""
    needs_interpreter()
    options = {"scale": case.head_dim**-0.5} | case.options

    @jax.jit
    def attend(*arrays: Any) -> Any:
        return mosaic_gpu.attend(
            *arrays,
            **options,
            ctas=ctas,
            interpret=mosaic_gpu.plgpu.InterpretGPUParams(**params),  # type: ignore[attr-defined]
        )

    arrays = case.q, load(case.kv_pages), case.block_tables, case.context_lens, case.query_starts
    out, lse = attend.lower(*arrays).compile({"xla_backend_optimization_level": 0})(*arrays)
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


@pytest.mark.parametrize(
    ("case", "ctas"),
    [
        (Case((1, 40, 1), (300, 170, 64), heads=4, kv_heads=1, **HALF, options=ALIGNED), 7),
        (Case((3, 1), (400, 65), heads=40, head_dim=64, page_size=8, dtype=jnp.float16), 2),
        *(
            (Case((1, 9), (70, 40), heads=2, kv_heads=1, padding=0, **HALF | {"head_dim": d}), 2)
            for d in OTHER_HEAD_DIMS
        ),
    ],
    ids=["one kv head, cut often", "groups of 20, pages of 8", *(f"head_dim {d}" for d in OTHER_HEAD_DIMS)],
)
def test_no_races(case: Case, ctas: int) -> None:
    """The interpreter raises if shared or global memory is read before it was written, or written by two at once."""
    assert_half_close(interpret(case, ctas=ctas, detect_races=True), case.numpy())


@settings(max_examples=4, deadline=None)
@given(rows=BATCHES, window=st.integers(1, 90), seed=st.integers(0, 99))
def test_drawn_batches(rows: list[tuple[int, int]], window: int, seed: int) -> None:
    queries = tuple(query for query, _ in rows)
    contexts = tuple(query + before if query else 0 for query, before in rows)
    options = {"window": jnp.int32(window)}
    case = Case(queries, contexts, padding=170 - sum(queries), **HALF, options=options, seed=seed)
    case.block_tables = np.pad(case.block_tables, ((0, 0), (0, 24 - case.block_tables.shape[1])))
    case.kv_pages = jnp.pad(case.kv_pages, ((0, 100 - len(case.kv_pages)), (0, 0), (0, 0), (0, 0)))
    needs_interpreter()
    assert_half_close(case.run("mosaic_gpu"), case.numpy())


def test_edges_of_contexts_and_pages() -> None:
    case = Case((1,) * 5 + (0,), (1, 15, 16, 17, 65, 0), padding=1, heads=1, kv_heads=1, **HALF)
    assert_half_close(interpret(case, ctas=3), case.numpy())


def test_more_than_65536_tokens() -> None:
    options = {"window": jnp.int32(300)}  # all of them take the interpreter half a minute
    case = Case((1,), (65_700,), padding=0, heads=1, kv_heads=1, page_size=256, **HALF, options=options)
    assert_half_close(interpret(case, ctas=2), case.numpy())


def test_result_hardly_depends_on_how_the_work_is_cut() -> None:
    """P is rounded alike wherever an item is cut: only the order of float32 sums differs."""
    case = Case((1, 1), (700, 90), padding=0, heads=4, kv_heads=1, head_dim=64, dtype=jnp.float16)
    out, lse = interpret(case, ctas=1)
    cut, cut_lse = interpret(case, ctas=9)
    assert np.mean(out != cut) < 0.02
    np.testing.assert_allclose(lse, cut_lse, atol=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 20, 1), (130, 90, 9), heads=4, **HALF, options={"window": jnp.int32(90)}),
        Case((2, 1), (300, 100), page_size=128, **HALF),
    ],
    ids=["pages of 16, window", "pages of 128"],
)
def test_dealt_pages(case: Case) -> None:
    """A sequence's pages dealt over three devices: each sees its own, and nothing where it has none."""
    for rank in range(3):
        dealt = case.deal(3, rank)
        assert_half_close(interpret(dealt, ctas=5), dealt.numpy())


def test_window_does_not_read_pages_before_it() -> None:
    """The engine frees pages a window has left: their block-table entries then point anywhere."""
    needs_interpreter()
    options = {"window": jnp.int32(20)}
    case = Case((1, 4), (100, 90), **HALF, options=options)
    expected = case.numpy()
    case.block_tables[0, : (100 - 20) // 16] = 10**6
    case.block_tables[1, : (90 - 4 + 1 - 20) // 16] = -1
    assert_half_close(case.run("mosaic_gpu"), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 72}, "head_dim 64, 80, 96, 128, 192, 256, not 72"),
        ({"page_size": 24}, "not of 24"),
        ({"heads": 8 * 65}, "up to 64 query heads per KV head, not 65"),
    ],
)
def test_refused_sizes(changes: dict[str, int], message: str) -> None:
    sizes = GQASizes(**(vars(LLAMA) | changes))
    with pytest.raises(NotImplementedError, match=message):
        choose_implementation("mosaic_gpu", H100, jnp.bfloat16, sizes=sizes)
    assert choose_implementation(None, H100, jnp.bfloat16, sizes=sizes) == "xla"


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ((jnp.bfloat16, jnp.float16), "does not read float16 with bfloat16 queries"),
        ((jnp.bfloat16, jnp.float8_e5m2), "does not read float8_e5m2"),
    ],
)
def test_refused_pages(dtypes: Any, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        choose_implementation("mosaic_gpu", H100, *dtypes, sizes=LLAMA)


@pytest.mark.parametrize("head_dim", mosaic_gpu.HEAD_DIMS)
def test_pages_that_it_reads(head_dim: int) -> None:
    for page_size in (8, 16, 32, 64, 128, 256):
        sizes = dataclasses.replace(LLAMA, head_dim=head_dim, page_size=page_size)
        for pages in (jnp.bfloat16, *mosaic_gpu.EIGHT_BIT):
            assert choose_implementation("mosaic_gpu", H100, jnp.bfloat16, pages, sizes=sizes) == "mosaic_gpu"


def test_choice(caplog: pytest.LogCaptureFixture) -> None:
    for sizes in (LLAMA, LATENT):
        for pages in (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn):
            assert choose_implementation(None, H100, jnp.bfloat16, pages, sizes=sizes) == "mosaic_gpu"
        assert choose_implementation(None, H100, jnp.float32, sizes=sizes) == "xla"
        with pytest.raises(NotImplementedError, match="does not read float32"):
            choose_implementation("mosaic_gpu", H100, jnp.float32, sizes=sizes)
    with pytest.raises(NotImplementedError, match="Hopper GPUs, not on TPU v5"):
        choose_implementation("mosaic_gpu", TPU, jnp.bfloat16, sizes=LLAMA)
    for kind in ("NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H20-3e", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert choose_implementation(None, AbstractDevice(kind, 132, "gpu"), jnp.bfloat16, sizes=LLAMA) == "mosaic_gpu"

    api._say_once.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert choose_implementation(None, A100, jnp.bfloat16, sizes=LLAMA) == "xla"
    assert [record.message for record in caplog.records] == [
        "attention is computed by 'xla', not by 'mosaic_gpu': it runs on Hopper GPUs, not on NVIDIA A100-SXM4-80GB"
    ]
    with pytest.raises(NotImplementedError, match=r"'mosaic_gpu' is not available: .* not on NVIDIA A100"):
        choose_implementation("mosaic_gpu", A100, jnp.bfloat16, sizes=LLAMA)


def test_target() -> None:
    """A program under a mesh is for the mesh's devices, whatever there is here."""
    assert target().platform == jax.default_backend()
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=H100)):
        assert target() == H100


def quantised(case: Case, dtype: Any) -> Case:
    """The case with 8-bit pages, whose free slots hold the largest int8 or NaN; for NumPy, K and V are what these stand for."""
    scales = np.repeat(np.float32([0.03, 0.3]), case.head_dim)
    values = np.asarray(load(case.kv_pages), np.float32) / scales
    case.kv_pages = jnp.asarray(np.nan_to_num(values.round(), nan=127) if dtype == jnp.int8 else values, dtype)
    for seq, kv in enumerate(case.kv):
        page, slot = np.divmod(np.arange(kv.shape[2]), case.page_size)
        rows = np.asarray(case.kv_pages, np.float64)[case.block_tables[seq, page], :, slot] * scales
        kv[...] = rows.reshape(-1, case.kv_heads, 2, case.head_dim).transpose(2, 1, 0, 3)
    case.options = case.options | {"k_scale": jnp.float32(0.03), "v_scale": jnp.float32(0.3)}
    return case


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("query_dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_8_bit_pages(dtype: Any, query_dtype: Any) -> None:
    case = quantised(Case((1, 9), (130, 70), heads=4, head_dim=64, dtype=query_dtype), dtype)
    assert_half_close(interpret(case, ctas=3, detect_races=True), case.numpy())


@pytest.mark.parametrize(("head_dim", "dtype"), [(192, jnp.float8_e4m3fn), (256, jnp.int8)])
def test_8_bit_pages_of_large_heads(head_dim: int, dtype: Any) -> None:
    case = Case((1, 9), (70, 40), padding=0, heads=2, kv_heads=1, **HALF | {"head_dim": head_dim, "page_size": 8})
    assert_half_close(interpret(quantised(case, dtype), ctas=2, detect_races=True), case.numpy())


def test_gpu_check_rehearses() -> None:
    """That the script for a GPU runs, on CPU, and that it compares with what attention is."""
    needs_interpreter()
    script = Path(__file__).parent.parent / "scripts/gpu_check"
    run = subprocess.run([sys.executable, script, "--rehearse", "--part", "right"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(" right ") >= 3
    assert "WRONG" not in run.stdout
