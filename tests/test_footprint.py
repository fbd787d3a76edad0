"""The KV cache's footprint: published figures, and the bytes that engines allocate."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from golden.tiny_models import MODELS

from paxserve.config import EngineConfig
from paxserve.footprint import footprint, query_key_pairs
from paxserve.model_source import resolve_kv_shape
from paxserve.models.builtin import builtin_config
from paxserve.models.config_hf import config_from_hf
from paxserve.models.kv_shape import KV_DTYPES, kv_shape, kv_shape_from_hf
from paxserve.runner import make_builder
from paxserve.sharding import MeshShape, mesh_shape
from paxserve.sizing import size_limits

GIB = 2**30


def shape_of(name):
    return kv_shape_from_hf(builtin_config(name))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("llama-2-7b", 524_288),
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-405b", 516_096),
        ("deepseek-v2-lite", 31_104),
        ("deepseek-v3", 70_272),
        ("opt-13b", 819_200),  # "800 KB of one token" (PagedAttention, arXiv:2309.06180)
    ],
)
def test_bytes_per_token(name, values):
    assert shape_of(name).bytes_per_token("bfloat16") == values


@pytest.mark.parametrize(
    ("name", "context", "gib"),
    [("mistral-7b-v0.3", 32_768, 4), ("llama-3.1-70b", 131_072, 40), ("llama-3.1-70b", 1_048_576, 320)],
)
def test_bytes_per_sequence(name, context, gib):
    figures = footprint(name, shape_of(name), context)
    assert figures.kv_dtype == "bfloat16"
    assert figures.sequence_bytes == figures.sequence_page_bytes == figures.batch_bytes == gib * GIB


def test_eight_kv_heads_of_32_are_a_quarter_of_mha():
    config = config_from_hf(builtin_config("llama-3.1-8b"))
    mha = kv_shape(dataclasses.replace(config, num_kv_heads=config.num_heads))
    assert mha.values_per_token == 4 * kv_shape(config).values_per_token


def test_latent_attention_against_caching_every_head():
    figures = footprint("deepseek-v3", shape_of("deepseek-v3"), 1)
    assert (figures.bytes_per_token, figures.expanded_bytes_per_token) == (70_272, 4_997_120)


def test_deepseek_v2_against_67b():
    """The paper's 93.3 % (arXiv:2405.04434, table 1 and section 3.2.3) counts V2's cache at 6 bits, against 16."""
    v2, dense = (shape_of(name).values_per_token for name in ("deepseek-v2", "deepseek-67b"))
    assert 1 - v2 / dense == pytest.approx(0.822, abs=5e-4)
    assert 1 - (v2 * 6) / (dense * 16) == pytest.approx(0.933, abs=5e-4)


def test_query_key_pairs():
    def counted(tokens, cached):
        """Pairs (query, key) of every step, one by one."""
        steps = range(1, tokens + 1)
        return sum(sum(query if not cached or query == step else 0 for query in range(1, step + 1)) for step in steps)

    assert query_key_pairs(4, cached=False) == 20
    assert query_key_pairs(4, cached=True) == 10
    for tokens in range(12):
        for cached in (False, True):
            assert query_key_pairs(tokens, cached=cached) == counted(tokens, cached)
    for cached, power in ((True, 2), (False, 3)):
        growth = query_key_pairs(2000, cached=cached) / query_key_pairs(1000, cached=cached)
        assert growth == pytest.approx(2**power, rel=1e-2)


def test_whole_pages():
    figures = footprint("any", shape_of("llama-2-7b"), 33, batch=3, page_size=16)
    assert figures.sequence_bytes == 33 * 524_288
    assert figures.pages_per_sequence == 3
    assert figures.sequence_page_bytes == 48 * 524_288
    assert figures.batch_bytes == 3 * 48 * 524_288


@pytest.mark.parametrize(("dtype", "size"), KV_DTYPES.items())
def test_kv_dtypes(dtype, size):
    figures = footprint("any", shape_of("llama-2-7b"), 64, kv_dtype=dtype)
    assert figures.bytes_per_token == 262_144 * size
    assert figures.scale_bytes == (32 * 2 * 4 if size == 1 else 0)  # one float32 for K and one for V in each layer


def test_windows_hide_tokens_but_keep_their_pages():
    shape = kv_shape_from_hf({**MODELS["qwen2_some_windows"], "max_position_embeddings": 128})
    assert shape.windows == (None, 8)
    figures = footprint("any", shape, 32)
    per_layer = shape.bytes_per_token("float32") // 2
    assert figures.sequence_bytes == 32 * 2 * per_layer
    assert figures.visible_bytes == (32 + 8) * per_layer


@pytest.mark.parametrize(
    ("text", "kv_heads", "mesh"),
    [
        ("1", 8, MeshShape()),
        ("16", 8, MeshShape(kv_head=8, kv_page=2)),
        ("16", 12, MeshShape(kv_head=4, kv_page=4)),
        ("16", 1, MeshShape(kv_head=1, kv_page=16)),
        ("data=2,kv_head=4", 8, MeshShape(data=2, kv_head=4)),
        ("kv_page=2,data=3", 1, MeshShape(data=3, kv_page=2)),
    ],
)
def test_mesh(text, kv_heads, mesh):
    assert mesh_shape(text, kv_heads) == mesh


@pytest.mark.parametrize("text", ["", "0", "-2", "kv_head", "heads=2", "kv_head=0", "data=2,data=2", "data=2,16"])
def test_a_malformed_mesh_is_refused(text):
    with pytest.raises(ValueError, match="give a number of chips"):
        mesh_shape(text, 8)


def test_heads_that_do_not_split_are_refused():
    with pytest.raises(ValueError, match="8 KV heads cannot be split over kv_head=3"):
        mesh_shape("kv_head=3", 8)


def test_bytes_per_chip():
    def per_chip(name, **options):
        figures = footprint(name, shape_of(name), 64, page_size=16, **options)
        return figures.bytes_per_chip / figures.bytes_per_token

    assert per_chip("llama-3.1-8b") == 64
    assert per_chip("llama-3.1-8b", mesh="8") == 8
    assert per_chip("llama-3.1-8b", mesh="16") == 4  # 2 of 4 pages
    assert per_chip("deepseek-v3", mesh="16") == 16  # 1 of 4 pages, on some chips none
    assert per_chip("deepseek-v3", mesh="16", batch=8) == 32
    assert per_chip("llama-3.1-8b", mesh="data=2,kv_head=8", batch=3) == 16  # the fuller group has 2 sequences
    int8 = footprint("any", shape_of("llama-2-7b"), 64, mesh="8", kv_dtype="int8")
    assert int8.bytes_per_chip == int8.batch_bytes // 8 + int8.scale_bytes


@pytest.mark.parametrize("size", ["context", "batch", "page_size"])
def test_sizes_below_one_are_refused(size):
    with pytest.raises(ValueError, match=f"{size}=0: must be at least 1"):
        footprint("any", shape_of("llama-2-7b"), **{"context": 1, size: 0})


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="'int3': must be one of float32"):
        footprint("any", shape_of("llama-2-7b"), 1, kv_dtype="int3")


def allocated_by_formula(limits, shape, dtype):
    """The footprint of the longest sequences that may run together, and of the null page."""
    figures = footprint(
        "any", shape, limits.max_model_len, batch=limits.max_num_seqs, kv_dtype=dtype, page_size=limits.page_size
    )
    return figures.batch_bytes + shape.page_bytes(limits.page_size, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "model", ["llama_mha", "llama_gqa_tied", "llama_mqa_biases", "deepseek_v2_lite", "deepseek_v3"]
)
def test_the_pool_takes_what_the_formula_says(model, dtype):
    """Allocated as an engine does it, of the size that an engine chooses, without compiling the engine's programs."""
    model = config_from_hf(MODELS[model])
    config = EngineConfig(model="any", dtype=dtype, max_num_seqs=4, page_size=8)
    builder = make_builder(model, config, jax.devices())
    limits = size_limits(config, model, dtype, MeshShape(), None, builder.step_bytes)
    pages = builder.state_shapes(limits).kv_pages
    assert jnp.zeros(pages.shape, pages.dtype).nbytes == allocated_by_formula(limits, kv_shape(model), dtype)


def test_a_running_engine_holds_what_the_formula_says(random_llm):
    engine = random_llm.engine
    _, shape = resolve_kv_shape(engine.source.path)
    expected = allocated_by_formula(engine.limits, shape, engine.runner.dtype.name)
    assert engine.runner.state.kv_pages.nbytes == expected
