"""Projection, norm and MLP against plain NumPy, and what they cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paxserve.models.layers import GatedMLP, Linear, RMSNorm, project
from paxserve.models.params import Declare, random_params
from paxserve.sharding import make_mesh

RANDOM = np.random.default_rng(0)
DECLARE = Declare(jnp.float32)


def with_values(module):
    """The module with its parameters drawn by their initializers."""
    graph, declared = nnx.split(module)
    return nnx.merge(graph, random_params(declared, 0, make_mesh()))


def test_project_keeps_every_axis_of_the_kernel_but_the_last():
    x, kernel = RANDOM.standard_normal((3, 4)), RANDOM.standard_normal((5, 6, 2, 4))
    y = project(jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32))
    np.testing.assert_allclose(y, np.einsum("ti,abci->tabc", x, kernel), rtol=1e-5, atol=1e-5)


def test_project_accumulates_bfloat16_in_float32():
    x = jnp.ones((2, 4096), jnp.bfloat16)
    y = project(x, jnp.full((3, 4096), 1.0078125, jnp.bfloat16))
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, 4128.0)


@pytest.mark.parametrize("shape", [(2, 384, 256), (4, 6, 16, 256), (256, 384)])
def test_project_on_cpu_does_not_copy_the_kernel(shape):
    x, kernel = jax.ShapeDtypeStruct((4, shape[-1]), jnp.bfloat16), jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with jax.default_device(jax.devices("cpu")[0]):
        memory = jax.jit(project).lower(x, kernel).compile().memory_analysis()
    assert memory.temp_size_in_bytes < np.prod(shape)  # half the kernel's bytes


def test_rms_norm():
    norm = with_values(RMSNorm(DECLARE, 8, "embed", 1e-5))
    norm.scale[...] = jnp.arange(8.0)
    x = RANDOM.standard_normal((3, 2, 8)).astype(np.float32)
    expected = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * np.arange(8)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)


def test_linear_keeps_the_dtype_and_adds_the_bias():
    linear = with_values(Linear(DECLARE, (2, 3), 4, (None, "mlp"), "embed", use_bias=True))
    linear.bias[...] = jnp.arange(6.0).reshape(2, 3)
    x = jnp.zeros((5, 4), jnp.bfloat16)
    assert linear(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(linear(x)[0], linear.bias[...])


def test_gated_mlp():
    mlp = with_values(GatedMLP(DECLARE, 4, 6, use_bias=False))
    x = RANDOM.standard_normal((3, 4)).astype(np.float32)
    gate, up = x @ mlp.gate_up.kernel[0].T, x @ mlp.gate_up.kernel[1].T
    expected = (gate / (1 + np.exp(-gate)) * up) @ mlp.down.kernel[...].T
    np.testing.assert_allclose(mlp(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-5)
