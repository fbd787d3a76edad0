"""Parameter declarations: shape, dtype, logical axes and initializer stated once, everything else derived.

A model is built of declarations alone: its parameters hold `jax.ShapeDtypeStruct`s. Their values come from a checkpoint
or from their initializers, in place on a mesh.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from paxserve.models.fp8 import FLOAT8, SCALE_SUFFIX, block_size
from paxserve.sharding import ONE_DEVICE, MeshShape, named_sharding, shape_of, split_over

Initializer = Callable[[jax.Array, Sequence[int], Any], jax.Array]
"""(key, shape, dtype) -> values. Hashable, and equal to its like: two builds of one model are the same tree."""


@dataclass(frozen=True)
class Declare:
    """Makes the `nnx.Param`s of a module: `declare(shape, logical axes, initializer)`.

    With `stack=range(a, b)` every parameter gets a leading axis "layers" for the layers from a to b - 1, the form
    `jax.lax.scan` goes over; its `layers` is that range, and None without.

    quantization: "fp8" for kernels in FP8 with scales (models/fp8.py), None for kernels in `dtype`.
    mesh: what the model is to be spread over, for which a block with one scale must lie on one device.
    """

    dtype: Any
    stack: range | None = None
    quantization: str | None = None
    mesh: MeshShape = ONE_DEVICE

    def __call__(self, shape: Sequence[int], axes: Sequence[str | None], init: Initializer) -> nnx.Param:
        shape, axes = tuple(shape), tuple(axes)
        if len(shape) != len(axes):
            raise ValueError(f"shape {shape} and axes {axes} differ in length")
        if self.stack is not None:
            shape, axes = (len(self.stack), *shape), ("layers", *axes)
        return nnx.Param(jax.ShapeDtypeStruct(shape, self.dtype), axes=axes, init=init, layers=self.stack)

    def kernel(
        self,
        out_shape: Sequence[int],
        in_size: int,
        out_axes: Sequence[str | None],
        in_axis: str,
        *,
        beside: int = 0,
    ) -> tuple[nnx.Param, nnx.Param | None]:
        """(an out-major kernel [*out, in], its scales if it is quantised).

        beside: how many rows of something else lie between the kernel's rows along its last out axis in a checkpoint.
        """
        shape, axes = (*out_shape, in_size), (*out_axes, in_axis)
        if self.quantization is None:
            return self(shape, axes, Normal(in_size)), None
        blocks = [1] * len(shape)
        over = split_over(axes, shape, self.mesh)
        for axis, other in ((len(out_shape) - 1, beside), (len(shape) - 1, 0)):
            splits = math.prod(getattr(self.mesh, name) for name in over[axis])
            blocks[axis] = block_size(shape[axis] // splits, other)
        scales = tuple(size // block for size, block in zip(shape, blocks, strict=True))
        in_fp8, in_float32 = (dataclasses.replace(self, dtype=dtype) for dtype in (FLOAT8, jnp.float32))
        return in_fp8(shape, axes, Normal(1)), in_float32(scales, axes, Constant(in_size**-0.5))


@dataclass(frozen=True)
class Normal:
    """Normal with variance 1 / fan_in, drawn in float32 so that every dtype starts from the same numbers."""

    fan_in: int

    def __call__(self, key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * self.fan_in**-0.5).astype(dtype)


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float

    def __call__(self, key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        return jnp.full(shape, self.value, dtype)


def ones(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Initializer of norm scales."""
    return jnp.ones(shape, dtype)


def zeros(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Initializer of biases."""
    return jnp.zeros(shape, dtype)


def random_params(declared: nnx.State, seed: int, mesh: Mesh) -> nnx.State:
    """Parameters drawn by their initializers, each created in place on the mesh."""
    compiled: dict[Any, Callable[[jax.Array], jax.Array]] = {}

    def draw(index: int, param: nnx.Variable) -> nnx.Variable:
        kind = (param.init, param.shape, param.dtype, param.axes)
        if kind not in compiled:
            init, shape, dtype, axes = kind
            compiled[kind] = jax.jit(
                lambda key: init(key, shape, dtype), out_shardings=named_sharding(mesh, axes, shape)
            )
        return param.replace(compiled[kind](jax.random.fold_in(jax.random.key(seed), index)))

    flat = nnx.to_flat_state(declared)
    return nnx.from_flat_state([(path, draw(index, param)) for index, (path, param) in enumerate(flat)])


def count_parameters(declared: nnx.State) -> int:
    """Numbers that a model has learned; the scales of quantised ones are not counted."""
    paths = dict(nnx.to_flat_state(declared))
    scales = {(*path[:-1], f"{path[-1]}{SCALE_SUFFIX}") for path in paths}
    return sum(param.size for path, param in paths.items() if path not in scales)


def sharded_shapes(declared: nnx.State, mesh: Mesh) -> nnx.State:
    """The same tree with the sharding of every parameter in its shape struct.

    Raises ValueError if a parameter cannot be split evenly.
    """

    def shard(param: nnx.Variable) -> nnx.Variable:
        for size, axis, over in zip(
            param.shape, param.axes, split_over(param.axes, param.shape, shape_of(mesh)), strict=True
        ):
            if size % (parts := math.prod(mesh.shape[name] for name in over)):
                raise ValueError(
                    f"mesh {shape_of(mesh)}: {axis!r}, of size {size}, cannot be split evenly over the {parts} devices "
                    f"along {', '.join(over)}; choose another mesh"
                )
        return param.replace(
            jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=named_sharding(mesh, param.axes, param.shape))
        )

    return jax.tree.map(shard, declared, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
