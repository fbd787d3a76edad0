"""Communication between the devices that run one program each under `jax.shard_map`.

Outside of a `shard_map`, and over axes of size 1, nothing is communicated: a model can be called on whole arrays.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

TWO_STAGES = 16
"""Devices from which on gathers and scatters go in two stages. Of one over all devices of a large TPU slice XLA makes an
all-reduce, which sends twice as much."""


def axes_size(axes: Sequence[str]) -> int:
    """Devices along these mesh axes together."""
    return math.prod(_size(axis) for axis in axes)


def axes_rank(axes: Sequence[str]) -> Int[Array, ""] | int:
    """This device's number along these mesh axes, the first of them varying slowest."""
    return jax.lax.axis_index(tuple(axes)) if axes_size(axes) > 1 else 0


def sum_over(x: Shaped[Array, "..."], axes: Sequence[str]) -> Shaped[Array, "..."]:
    """The sum of what the devices along these axes hold."""
    return jax.lax.psum(x, _live(axes)) if axes_size(axes) > 1 else x


def logsumexp_over(x: Float[Array, "..."], axes: Sequence[str]) -> Float[Array, "..."]:
    """The log of the summed exponentials of what the devices along these axes hold, each of which may be -inf."""
    if axes_size(axes) == 1:
        return x
    for groups in _stages(axes_size(axes)):
        x = jax.nn.logsumexp(jax.lax.all_gather(x, _live(axes), axis_index_groups=groups), axis=0)
    return x


def gather(x: Shaped[Array, "..."], axes: Sequence[str], dimension: int) -> Shaped[Array, "..."]:
    """What the devices along these axes hold, put side by side along a dimension in the order of `axes_rank`."""
    if axes_size(axes) == 1:
        return x
    x = jnp.moveaxis(x, dimension, 0)
    for groups in _stages(axes_size(axes)):
        x = jax.lax.all_gather(x, _live(axes), axis=0, tiled=True, axis_index_groups=groups)
    return jnp.moveaxis(x, 0, dimension)


def sum_scatter(x: Shaped[Array, "..."], axes: Sequence[str], dimension: int) -> Shaped[Array, "..."]:
    """This device's part, along a dimension, of the sum of what the devices along these axes hold."""
    if axes_size(axes) == 1:
        return x
    x = jnp.moveaxis(x, dimension, 0)  # of a scatter along another axis XLA:TPU often makes an all-reduce
    for groups in reversed(_stages(axes_size(axes))):
        x = jax.lax.psum_scatter(x, _live(axes), scatter_dimension=0, tiled=True, axis_index_groups=groups)
    return jnp.moveaxis(x, 0, dimension)


def exchange(x: Shaped[Array, "..."], axes: Sequence[str], *, split: int, concat: int) -> Shaped[Array, "..."]:
    """Parts along dimension `split` go to the devices along these axes; what comes in is put side by side along `concat`."""
    if axes_size(axes) == 1:
        return x
    return jax.lax.all_to_all(x, _live(axes), split_axis=split, concat_axis=concat, tiled=True)


def _stages(devices: int) -> list[list[list[int]] | None]:
    """Groups of ranks that gather one after the other: neighbours first, then those with the same place among theirs."""
    near = max(size for size in range(1, math.isqrt(devices) + 1) if devices % size == 0)
    if devices < TWO_STAGES or near == 1:
        return [None]
    return [
        [list(range(first, first + near)) for first in range(0, devices, near)],
        [list(range(place, devices, near)) for place in range(near)],
    ]


def _live(axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if _size(axis) > 1)


def _size(axis: str) -> int:
    try:
        return jax.lax.axis_size(axis)
    except NameError:  # outside of a shard_map
        return 1
