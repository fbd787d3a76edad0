"""RoPE tables against those transformers computes (tests/golden/make_tiny_logits.py)."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from golden.tiny_models import ROPE_POSITIONS, ROPES

from paxserve.models.config import RopeConfig
from paxserve.models.config_hf import config_from_hf
from paxserve.models.rope import apply_rope, rope_table, softmax_factor

TABLES = np.load(Path(__file__).parent / "golden" / "rope_tables.npz")


@pytest.mark.parametrize("name", ROPES)
def test_tables_match_transformers(name):
    head_dim, max_position, fields = ROPES[name]
    config = config_from_hf(
        {
            "model_type": "llama",
            "head_dim": head_dim,
            "max_position_embeddings": max_position,
            "rope_parameters": fields,
        }
    )
    table = rope_table(config.rope, head_dim, jnp.array(ROPE_POSITIONS, jnp.int32))
    # One unit in the last place of a float32 frequency turns into an angle that grows with the position.
    angles = np.array(ROPE_POSITIONS)[:, None] * TABLES[f"{name}/frequencies"]
    tolerance = 1e-6 + 4e-7 * angles
    for part, value in (("cos", table.cos), ("sin", table.sin)):
        error = np.abs(np.asarray(value) - TABLES[f"{name}/{part}"])
        assert (error <= tolerance).all(), (part, (error / tolerance).max())


def test_dynamic_does_not_depend_on_the_other_positions():
    rope = RopeConfig(kind="dynamic", factor=2.0, original_max_position=16)
    positions = jnp.arange(40, dtype=jnp.int32)
    whole = rope_table(rope, 64, positions)
    apart = [rope_table(rope, 64, positions[i : i + 1]).cos[0] for i in (3, 15, 16, 39)]
    np.testing.assert_allclose(whole.cos[jnp.array([3, 15, 16, 39])], jnp.stack(apart), atol=1e-6)


def test_frequency_factors_divide_the_frequencies():
    factors = tuple(float(2**i) for i in range(4))
    positions = jnp.array([5], jnp.int32)
    plain = rope_table(RopeConfig(theta=1.0), 8, positions)
    divided = rope_table(RopeConfig(theta=1.0, frequency_factors=factors), 8, positions)
    np.testing.assert_allclose(plain.cos[0], np.cos(np.full(4, 5.0)), atol=1e-6)
    np.testing.assert_allclose(divided.cos[0], np.cos(5.0 / np.array(factors)), atol=1e-6)


def test_rotation_keeps_norms_and_dtype():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 16)), jnp.bfloat16)
    table = rope_table(RopeConfig(), 16, jnp.array([0, 1, 900], jnp.int32))
    y = apply_rope(x, table)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y[0], x[0])
    norms = [jnp.linalg.norm(z.astype(jnp.float32), axis=-1) for z in (x, y)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-2)


def test_interleaved_pairs_are_rotated_as_halves_are():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 16)), jnp.float32)
    table = rope_table(RopeConfig(), 16, jnp.array([0, 1, 900], jnp.int32))
    turned = np.asarray(apply_rope(x, table, interleaved=True))
    angles = np.array([0, 1, 900])[:, None] * 10_000.0 ** (-np.arange(8) / 8)
    expected = np.asarray(x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(turned[..., :8] + 1j * turned[..., 8:], expected, atol=1e-4)


def test_softmax_factor_of_deepseek():
    """mscale_all_dim counts twice, once for q and once for k; V2's released value is 0.1 * 0.707 * ln 40 + 1."""
    yarn = RopeConfig(kind="yarn", factor=40.0, original_max_position=4096, mscale=0.707, mscale_all_dim=0.707)
    assert softmax_factor(yarn) == pytest.approx(1.2608**2, rel=1e-4)
    assert softmax_factor(dataclasses.replace(yarn, mscale_all_dim=None)) == 1.0
    assert softmax_factor(RopeConfig()) == 1.0


def test_unknown_kind_is_refused():
    with pytest.raises(NotImplementedError, match="longrope"):
        rope_table(RopeConfig(kind="longrope"), 64, jnp.arange(2))


def test_missing_original_length_is_refused():
    with pytest.raises(ValueError, match="original_max_position"):
        rope_table(RopeConfig(kind="llama3", factor=8.0), 64, jnp.arange(2))
