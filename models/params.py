"""Parameter declarations: shape, dtype, logical axes and initializer stated once, everything else derived."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from paxserve.sharding import named_sharding

Initializer = Callable[[jax.Array, Sequence[int], Any], jax.Array]


@dataclass(frozen=True)
class Declare:
    """Makes the `nnx.Param`s of a module: `declare(shape, logical axes, initializer)`.

    With `stack=L` every parameter gets a leading axis "layers" of size L, the form `jax.lax.scan` goes over.
    """

    rngs: nnx.Rngs
    dtype: Any
    stack: int | None = None

    def __call__(self, shape: Sequence[int], axes: Sequence[str | None], init: Initializer) -> nnx.Param:
        shape, axes = tuple(shape), tuple(axes)
        if len(shape) != len(axes):
            raise ValueError(f"shape {shape} and axes {axes} differ in length")
        if self.stack is None:
            return nnx.Param(init(self.rngs.params(), shape, self.dtype), axes=axes)
        keys = jax.random.split(self.rngs.params(), self.stack)
        value = jax.vmap(lambda key: init(key, shape, self.dtype))(keys)
        return nnx.Param(value, axes=("layers", *axes))


def normal(fan_in: int) -> Initializer:
    """Normal with variance 1 / fan_in, drawn in float32 so that every dtype starts from the same numbers."""

    def init(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5).astype(dtype)

    return init


def ones(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Initializer of norm scales."""
    return jnp.ones(shape, dtype)


def zeros(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Initializer of biases."""
    return jnp.zeros(shape, dtype)


def abstract_params(make_model: Callable[[nnx.Rngs], nnx.Module]) -> tuple[nnx.GraphDef, nnx.State]:
    """(graphdef, state of ShapeDtypeStructs) of a model, without allocating anything."""
    model = nnx.eval_shape(lambda: make_model(nnx.Rngs(0)))
    return nnx.split(model)


def random_params(make_model: Callable[[nnx.Rngs], nnx.Module], seed: int, mesh: Mesh) -> nnx.State:
    """Randomly initialised parameters, created in place on the mesh."""
    shardings = param_shardings(abstract_params(make_model)[1], mesh)
    init = jax.jit(lambda: nnx.state(make_model(nnx.Rngs(seed))), out_shardings=shardings)
    return init()


def param_shardings(state: nnx.State, mesh: Mesh) -> nnx.State:
    """The same tree with every parameter's value replaced by its NamedSharding."""
    return jax.tree.map(
        lambda param: param.replace(named_sharding(mesh, param.axes)), state, is_leaf=lambda x: isinstance(x, nnx.Param)
    )
