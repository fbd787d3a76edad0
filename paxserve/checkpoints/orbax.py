"""Model directories of our own: parameters in an Orbax checkpoint, the configuration as JSON beside it.

model_config.json   {"format_version": 2, "config": every field of ModelConfig}
params/             the Orbax checkpoint (https://orbax.readthedocs.io): a tree of dicts, '.'-joined paths as in
                    models/weights.py, always in the spelling of unrolled layers
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from paxserve.checkpoints.config_json import config_from_json, config_to_json
from paxserve.checkpoints.fill import Targets, fill_params, stored_arrays, stored_targets
from paxserve.checkpoints.reader import CheckpointError, listed
from paxserve.models.config import ModelConfig

CONFIG_FILE = "model_config.json"
PARAMS_DIR = "params"
FORMAT_VERSION = 2  # in 1 the kernel of attention's output projection had an axis for the heads
CHUNK_BYTES = 2**20  # what is read at the least: without it Orbax writes, and reads, an array as one chunk


def save_orbax(directory: str | Path, config: ModelConfig, params: nnx.State) -> None:
    """Writes configuration and parameters, of unrolled or stacked layers, into an existing directory."""
    directory = Path(directory).resolve()
    tree = _nested(stored_arrays(params))
    cut = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / PARAMS_DIR, tree, save_args=cut)
    facts = {"format_version": FORMAT_VERSION, "config": config_to_json(config)}
    (directory / CONFIG_FILE).write_text(json.dumps(facts, indent=2) + "\n")


def orbax_config(directory: str | Path) -> ModelConfig:
    """The configuration in `directory`. Raises CheckpointError if it cannot be read."""
    file = Path(directory) / CONFIG_FILE
    try:
        facts = json.loads(file.read_bytes())
        if facts["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"format_version is {facts['format_version']}; supported is {FORMAT_VERSION}; convert it anew"
            )
        return config_from_json(facts["config"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}") from error


def load_orbax(directory: str | Path, declared: nnx.State, mesh: Mesh) -> nnx.State:
    """The declared parameters of a model, cast to their dtypes, each device restoring its shard only.

    Raises CheckpointError, before any value is read, if a parameter is missing, unknown or of another shape; and if the
    files are damaged.
    """
    directory = Path(directory).resolve() / PARAMS_DIR
    _check(directory, {name: target.shape for name, target in stored_targets(declared, mesh).items()})

    def load(targets: Targets) -> dict[str, jax.Array]:
        return {name: array for batch in _batches(targets) for name, array in _restore(directory, batch).items()}

    return fill_params(declared, mesh, load)


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


def _batches(targets: Targets) -> Iterator[Targets]:
    """Parts of the targets no larger than the largest of them: of what it restores at a time, Orbax holds all twice."""
    sizes = {name: math.prod(target.shape) * target.dtype.itemsize for name, target in targets.items()}
    batch, filled = Targets(), 0
    for name, target in targets.items():
        if filled + sizes[name] > max(sizes.values()):
            yield batch
            batch, filled = {}, 0
        batch[name] = target
        filled += sizes[name]
    yield batch


def _restore(directory: Path, targets: Targets) -> dict[str, jax.Array]:
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
