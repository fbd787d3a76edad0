"""Model directories of our own: parameters in an Orbax checkpoint, the configuration as JSON beside it.

model_config.json   {"format_version": 1, "config": every field of ModelConfig}
params/             the Orbax checkpoint (https://orbax.readthedocs.io): a tree of dicts, '.'-joined paths as in
                    models/weights.py, always in the spelling of unrolled layers
"""

import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from paxserve.checkpoints.config_json import config_from_json, config_to_json
from paxserve.checkpoints.load import is_stacked, map_params, stored_names
from paxserve.checkpoints.reader import CheckpointError, listed
from paxserve.models.config import ModelConfig
from paxserve.models.params import abstract_params
from paxserve.sharding import named_sharding

CONFIG_FILE = "model_config.json"
PARAMS_DIR = "params"
FORMAT_VERSION = 1


def save_orbax(directory: str | Path, config: ModelConfig, params: nnx.State) -> None:
    """Writes configuration and parameters, of unrolled or stacked layers, into an existing directory."""
    directory = Path(directory).resolve()
    arrays: dict[str, jax.Array] = {}
    for path, param in nnx.to_flat_state(params):
        names, value = stored_names(path, param), param.get_value()
        arrays |= zip(names, value if is_stacked(param) else [value], strict=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / PARAMS_DIR, _nested(arrays))
    facts = {"format_version": FORMAT_VERSION, "config": config_to_json(config)}
    (directory / CONFIG_FILE).write_text(json.dumps(facts, indent=2) + "\n")


def orbax_config(directory: str | Path) -> ModelConfig:
    """The configuration in `directory`. Raises CheckpointError if it cannot be read."""
    file = Path(directory) / CONFIG_FILE
    try:
        facts = json.loads(file.read_bytes())
        if facts["format_version"] != FORMAT_VERSION:
            raise CheckpointError(f"{file} has format_version {facts['format_version']}; supported is {FORMAT_VERSION}")
        return config_from_json(facts["config"])
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}") from error


def load_orbax(directory: str | Path, make_model: Callable[[nnx.Rngs], nnx.Module], mesh: Mesh) -> nnx.State:
    """The parameters of `make_model`, cast to the dtypes it declares, each device restoring its shard only.

    Stacked layers are restored one layer at a time into their place, so that no second copy of the stack exists.

    Raises CheckpointError, before any value is read, if a parameter is missing, unknown or of another shape.
    """
    directory = Path(directory).resolve() / PARAMS_DIR
    abstract = abstract_params(make_model)[1]
    targets = {
        name: target for path, param in nnx.to_flat_state(abstract) for name, target in _targets(path, param, mesh)
    }
    _check(directory, {name: target.shape for name, target in targets.items()})

    stacks: dict[Any, dict[Any, nnx.Variable]] = defaultdict(dict)  # by the module whose layers are stacked
    whole = {}
    for path, param in nnx.to_flat_state(abstract):
        if is_stacked(param):
            stacks[path[0]][path] = param
        else:
            whole[stored_names(path, param)[0]] = path
    arrays = _restore(directory, {name: targets[name] for name in whole})
    restored = {path: arrays[name] for name, path in whole.items()}
    for params in stacks.values():
        restored |= _restore_stack(directory, params, targets, mesh)
    return map_params(lambda path, param: param.replace(restored[path]), abstract)


def _restore_stack(
    directory: Path, params: Mapping[Any, nnx.Variable], targets: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh
) -> dict[Any, jax.Array]:
    """The stacked parameters of one module, filled layer by layer."""
    shardings = {path: named_sharding(mesh, param.axes) for path, param in params.items()}

    @functools.partial(jax.jit, out_shardings=shardings)
    def allocate() -> dict[Any, jax.Array]:
        return {path: jnp.zeros(param.shape, param.dtype) for path, param in params.items()}

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
    def insert(stack: dict[Any, jax.Array], layer: dict[Any, jax.Array], index: int) -> dict[Any, jax.Array]:
        return {path: jax.lax.dynamic_update_index_in_dim(stack[path], layer[path], index, 0) for path in stack}

    stack = allocate()
    (num_layers,) = {param.shape[0] for param in params.values()}
    for index in range(num_layers):
        names = {path: stored_names(path, param)[index] for path, param in params.items()}
        arrays = _restore(directory, {name: targets[name] for name in names.values()})
        stack = insert(stack, {path: arrays[name] for path, name in names.items()}, index)
    return stack


def _targets(path: Any, param: nnx.Variable, mesh: Mesh) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
    """(name, what to restore it as) for everything that is stored of a parameter."""
    skip = int(is_stacked(param))
    sharding = named_sharding(mesh, param.axes[skip:])
    for name in stored_names(path, param):
        yield name, jax.ShapeDtypeStruct(param.shape[skip:], param.dtype, sharding=sharding)


def _check(directory: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    try:
        metadata = ocp.PyTreeCheckpointer().metadata(directory).item_metadata.tree
        stored = {name: tuple(leaf.shape) for name, leaf in _flat(metadata)}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{directory} is not a readable Orbax checkpoint: {error!r}") from error
    if missing := expected.keys() - stored.keys():
        raise CheckpointError(f"{directory} lacks parameter {listed(missing)}")
    if extra := stored.keys() - expected.keys():
        raise CheckpointError(f"unknown parameter {listed(extra)} in {directory}")
    for name, shape in expected.items():
        if stored[name] != shape:
            raise CheckpointError(
                f"parameter {name} in {directory} has shape {list(stored[name])}; the model asks for {list(shape)}"
            )


def _restore(directory: Path, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Some of the checkpoint's arrays, in the targets' dtypes and shardings."""
    tree = _nested(targets)
    args = ocp.args.PyTreeRestore(
        item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
    )
    try:
        return dict(_flat(ocp.PyTreeCheckpointer().restore(directory, args)))
    except Exception as error:  # Orbax wraps what TensorStore raises in a bare Exception
        cause = error.__cause__ or error
        raise CheckpointError(f"{directory} is damaged; restoring {listed(targets)} failed: {cause}") from error


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """'.'-joined names to a tree of dicts."""
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, node in tree.items():
        if isinstance(node, Mapping):
            yield from _flat(node, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", node
