"""Communication between the devices that run one program each under `jax.shard_map`.

Outside of a `shard_map`, and over axes of size 1, nothing is communicated: a model can be called on whole arrays.
"""

import math
from collections.abc import Sequence

import jax
from jaxtyping import Array, Int, Shaped


def axes_size(axes: Sequence[str]) -> int:
    """Devices along these mesh axes together."""
    return math.prod(_size(axis) for axis in axes)


def axes_rank(axes: Sequence[str]) -> Int[Array, ""] | int:
    """This device's number along these mesh axes, the first of them varying slowest."""
    return jax.lax.axis_index(tuple(axes)) if axes_size(axes) > 1 else 0


def sum_over(x: Shaped[Array, "..."], axes: Sequence[str]) -> Shaped[Array, "..."]:
    """The sum of what the devices along these axes hold."""
    return jax.lax.psum(x, _live(axes)) if axes_size(axes) > 1 else x


def gather(x: Shaped[Array, "..."], axes: Sequence[str], dimension: int) -> Shaped[Array, "..."]:
    """What the devices along these axes hold, put side by side along a dimension in the order of `axes_rank`."""
    dimension %= x.ndim
    return jax.lax.all_gather(x, _live(axes), axis=dimension, tiled=True) if axes_size(axes) > 1 else x


def sum_scatter(x: Shaped[Array, "..."], axes: Sequence[str], dimension: int) -> Shaped[Array, "..."]:
    """This device's part, along a dimension, of the sum of what the devices along these axes hold."""
    dimension %= x.ndim
    if axes_size(axes) == 1:
        return x
    return jax.lax.psum_scatter(x, _live(axes), scatter_dimension=dimension, tiled=True)


def exchange(x: Shaped[Array, "..."], axes: Sequence[str], *, split: int, concat: int) -> Shaped[Array, "..."]:
    """Parts along dimension `split` go to the devices along these axes; what comes in is put side by side along `concat`."""
    if axes_size(axes) == 1:
        return x
    return jax.lax.all_to_all(x, _live(axes), split_axis=split, concat_axis=concat, tiled=True)


def _live(axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if _size(axis) > 1)


def _size(axis: str) -> int:
    try:
        return jax.lax.axis_size(axis)
    except NameError:  # outside of a shard_map
        return 1
