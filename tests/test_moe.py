"""The choice of experts against transformers (tests/golden/make_routing.py), what they compute against plain NumPy."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden.tiny_models import ROUTERS, router_logits, weight

from paxserve.models.config import MoEConfig
from paxserve.models.config_hf import config_from_hf
from paxserve.models.moe import MoE, apply_experts, grouped_in_blocks, grouped_ragged, route
from paxserve.models.params import Declare, random_params
from paxserve.sharding import make_mesh

GOLDEN = np.load(Path(__file__).parent / "golden" / "routing.npz")
EMBED, WIDTH, EXPERTS, CHOSEN = 16, 24, 6, 2
MOE = MoEConfig(EXPERTS, CHOSEN, WIDTH, layers=(True,), shared_intermediate_size=8, score_bias=True)


@pytest.mark.parametrize("name", ROUTERS)
def test_routing_is_that_of_transformers(name):
    moe = config_from_hf(ROUTERS[name]).moe
    bias = weight(f"{name}.bias", (moe.num_experts,)) if moe.score_bias else None
    experts, weights = route(jnp.asarray(router_logits(name, moe.num_experts)), bias, moe)
    assert experts.dtype == jnp.int32
    assert weights.dtype == jnp.float32
    order = np.argsort(experts, axis=-1)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(experts), order, -1), GOLDEN[f"{name}/experts"])
    np.testing.assert_allclose(np.take_along_axis(np.asarray(weights), order, -1), GOLDEN[f"{name}/weights"], rtol=1e-5)


def test_of_equal_experts_the_first_are_chosen():
    moe = MoEConfig(8, 3, WIDTH, layers=(True,), groups=4, top_groups=2)
    experts, _ = route(jnp.zeros((2, 8)), None, moe)
    np.testing.assert_array_equal(experts, [[0, 1, 2]] * 2)


@pytest.mark.parametrize(
    "fields", [{"groups": 5}, {"experts_per_token": 9}, {"groups": 4, "top_groups": 1, "experts_per_token": 3}]
)
def test_impossible_choices_are_refused(fields):
    with pytest.raises(ValueError, match="experts"):
        MoEConfig(**{"num_experts": 8, "experts_per_token": 2, "intermediate_size": 4, "layers": (True,), **fields})


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


GATE_UP, DOWN = random(2, EXPERTS, 2, WIDTH, EMBED) / 4, random(2, EXPERTS, EMBED, WIDTH, seed=1) / 4
LAYER = 1


def expert(x, e):
    gate, up = x @ GATE_UP[LAYER, e, 0].T, x @ GATE_UP[LAYER, e, 1].T
    return (gate / (1 + np.exp(-gate)) * up) @ DOWN[LAYER, e].T


@pytest.mark.parametrize(
    "grouped",
    [
        *(
            functools.partial(grouped_in_blocks, block, sum_at_end=sum_at_end)
            for block in (8, 64)
            for sum_at_end in (False, True)
        ),
        grouped_ragged,
    ],
)
@pytest.mark.parametrize(
    "sizes", [[1, 0, 0, 0, 0, 0], [0, 3, 0, 1, 0, 2], [0, 0, 0, 0, 0, 9], [8, 8, 0, 17, 15, 0], [40, 1, 0, 97, 0, 70]]
)
def test_each_group_has_its_expert(grouped, sizes):
    elsewhere = 3  # pairs whose experts another device has
    rows = random(sum(sizes) + elsewhere, EMBED)
    groups = np.split(rows[:-elsewhere], np.cumsum(sizes)[:-1])
    expected = np.concatenate(
        [*(expert(group, e) for e, group in enumerate(groups)), np.zeros((elsewhere, EMBED), np.float32)]
    )
    weights, order = random(len(rows), seed=2), np.random.default_rng(3).permutation(len(rows))
    expected = (weights[:, None] * expected)[np.argsort(order)]
    found = jax.jit(grouped)(rows[np.argsort(order)], weights, order, jnp.array(sizes, jnp.int32), LAYER, GATE_UP, DOWN)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_experts_are_weighed_and_summed():
    x, weights = random(5, EMBED), random(5, CHOSEN, seed=2)
    experts = np.array([[0, 1], [5, 0], [3, 5], [1, 0], [2, 4]], np.int32)
    expected = [
        sum(w * expert(row, e) for e, w in zip(*pair, strict=True))
        for row, *pair in zip(x, experts, weights, strict=True)
    ]
    found = jax.jit(apply_experts)(x, experts, weights, LAYER, GATE_UP, DOWN)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def layer():
    graph, declared = nnx.split(MoE(Declare(jnp.float32), EMBED, MOE))
    params = random_params(declared, 0, make_mesh())
    return jax.jit(lambda x: nnx.merge(graph, params)(x))


@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
def test_a_token_does_not_depend_on_its_batch_mates(layer, tokens):
    x = random(tokens, EMBED)
    y = layer(x)
    for mates in (random(9, EMBED, seed=3), np.zeros((3, EMBED), np.float32), np.repeat(x[:1], 70, axis=0)):
        batch = np.concatenate([mates[:2], x, mates[2:]])
        np.testing.assert_allclose(layer(batch)[2 : 2 + tokens], y, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [4, 128])
def test_cpu_makes_no_copy_of_all_experts(dtype, tokens):
    experts, chosen = 32, 2
    x = jax.ShapeDtypeStruct((tokens, 64), dtype)
    pairs = jax.ShapeDtypeStruct((tokens, chosen), jnp.int32), jax.ShapeDtypeStruct((tokens, chosen), jnp.float32)
    kernels = jax.ShapeDtypeStruct((1, experts, 2, 256, 64), dtype), jax.ShapeDtypeStruct((1, experts, 64, 256), dtype)
    with jax.default_device(jax.devices("cpu")[0]):
        memory = jax.jit(apply_experts).lower(x, *pairs, 0, *kernels).compile().memory_analysis()
    assert memory.temp_size_in_bytes < memory.argument_size_in_bytes / 4
