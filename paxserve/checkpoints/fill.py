"""The tree of a model's parameters and the flat, layout-independent names they are stored under.

A checkpoint knows every parameter by its name in the spelling of unrolled layers, "layers.3.attn.qkv.kernel". A model
whose layers are stacked in runs of layers alike has that one at layers.0.attn.qkv.kernel[3], if the first run holds it.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from paxserve.sharding import named_sharding

ParamPath = tuple[Any, ...]
Targets = dict[str, jax.ShapeDtypeStruct]
Arrays = dict[ParamPath, jax.Array]


def stored_arrays(params: nnx.State) -> dict[str, jax.Array]:
    """Every parameter by its stored name, stacked layers taken apart."""
    arrays: dict[str, jax.Array] = {}
    for path, param in nnx.to_flat_state(params):
        value = param.get_value()
        arrays |= zip(_stored_names(path, param), value if _is_stacked(param) else [value], strict=True)
    return arrays


def stored_targets(declared: nnx.State, mesh: Mesh) -> Targets:
    """What a model needs by stored name, with shape, dtype and sharding."""
    return {name: target for path, param in nnx.to_flat_state(declared) for name, target in _targets(path, param, mesh)}


def fill_params(declared: nnx.State, mesh: Mesh, load: Callable[[Targets], Mapping[str, jax.Array]]) -> nnx.State:
    """The parameters of a model from `load`, which is asked for some of the stored arrays at a time.

    Stacked layers are loaded one after the other into their place, so that no second copy of the stack ever exists.
    """
    whole: dict[str, ParamPath] = {}
    targets: Targets = {}
    stacks: dict[ParamPath, dict[ParamPath, nnx.Variable]] = defaultdict(dict)  # by the path of the run
    for path, param in nnx.to_flat_state(declared):
        if _is_stacked(param):
            stacks[path[:2]][path] = param
        else:
            ((name, targets[name]),) = _targets(path, param, mesh)
            whole[name] = path
    loaded = load(targets)
    arrays = {path: loaded[name] for name, path in whole.items()}
    for stack in stacks.values():
        arrays |= _fill_stack(stack, mesh, load)
    return nnx.from_flat_state([(path, param.replace(arrays[path])) for path, param in nnx.to_flat_state(declared)])


def _fill_stack(
    params: Mapping[ParamPath, nnx.Variable], mesh: Mesh, load: Callable[[Targets], Mapping[str, jax.Array]]
) -> Arrays:
    shardings = {path: named_sharding(mesh, param.axes, param.shape) for path, param in params.items()}

    @functools.partial(jax.jit, out_shardings=shardings)
    def allocate() -> Arrays:
        return {path: jnp.zeros(param.shape, param.dtype) for path, param in params.items()}

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
    def insert(stack: Arrays, layer: Arrays, index: int) -> Arrays:
        return {path: jax.lax.dynamic_update_index_in_dim(stack[path], layer[path], index, 0) for path in stack}

    stack = allocate()
    for index, layer in enumerate(zip(*(_targets(path, param, mesh) for path, param in params.items()), strict=True)):
        loaded = load(dict(layer))
        stack = insert(stack, {path: loaded[name] for path, (name, _) in zip(params, layer, strict=True)}, index)
    return stack


def _targets(path: ParamPath, param: nnx.Variable, mesh: Mesh) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
    """(name, what it is loaded as) for everything that is stored of a parameter."""
    skip = int(_is_stacked(param))
    sharding = named_sharding(mesh, param.axes[skip:], param.shape[skip:])
    for name in _stored_names(path, param):
        yield name, jax.ShapeDtypeStruct(param.shape[skip:], param.dtype, sharding=sharding)


def _is_stacked(param: nnx.Variable) -> bool:
    return param.layers is not None


def _stored_names(path: ParamPath, param: nnx.Variable) -> list[str]:
    """The name a parameter is stored under, or one per layer if it is stacked."""
    if not _is_stacked(param):
        return [".".join(map(str, path))]
    layers, _, *rest = path
    return [".".join(map(str, (layers, layer, *rest))) for layer in param.layers]
