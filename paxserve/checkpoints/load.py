"""Fills a model's parameters from a checkpoint, each device's shard read on its own, after everything was checked."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from paxserve.checkpoints.reader import CheckpointError, TensorReader, listed
from paxserve.models.config import ModelConfig
from paxserve.models.params import abstract_params
from paxserve.models.weights import TensorSource, tensor_sources
from paxserve.sharding import named_sharding

# Tensors that are no weights: RoPE frequencies saved by older transformers versions, which follow from the
# configuration, and the RoPE factors of a GGUF file, which are read into it.
DERIVED_TENSORS = ("*.rotary_emb.inv_freq", "rope_freqs.weight")

Path = tuple[Any, ...]
Bounds = tuple[tuple[int, int], ...]  # (start, stop) per axis
Index = tuple[slice, ...]


def load_params(
    reader: TensorReader, config: ModelConfig, make_model: Callable[[nnx.Rngs], nnx.Module], mesh: Mesh
) -> nnx.State:
    """The parameters of `make_model`, in the dtypes it declares, sharded over `mesh` by their logical axes.

    Works for unrolled and stacked layers alike. A process reads only what its devices hold, and holds about one tensor
    in host memory beyond that.

    Raises CheckpointError, before any value is read, if a tensor is missing, unknown or of another shape than `config`
    says.
    """
    sources = check_tensors(reader, config)

    def load(path: Path, param: nnx.Variable) -> nnx.Variable:
        per_layer = [sources[name] for name in stored_names(path, param)]

        @functools.cache  # replicas share one copy
        def read(bounds: Bounds) -> np.ndarray:
            return _read_block(reader, per_layer, bounds, param)

        def block(index: Index | None) -> np.ndarray:
            assert index is not None
            return read(tuple(part.indices(size)[:2] for part, size in zip(index, param.shape, strict=True)))

        return param.replace(jax.make_array_from_callback(param.shape, named_sharding(mesh, param.axes), block))

    return map_params(load, abstract_params(make_model)[1])


def map_params(fn: Callable[[Path, nnx.Variable], nnx.Variable], state: nnx.State) -> nnx.State:
    """`fn(path, param)` for every parameter of the state."""
    return nnx.from_flat_state([(path, fn(path, param)) for path, param in nnx.to_flat_state(state)])


def is_stacked(param: nnx.Variable) -> bool:
    """Whether the parameter holds all layers, with the layer as its first axis."""
    return param.axes[0] == "layers"


def stored_names(path: Path, param: nnx.Variable) -> list[str]:
    """The parameter's name in the unrolled spelling, or one name per layer if it is stacked."""
    if not is_stacked(param):
        return [".".join(map(str, path))]
    return [".".join(map(str, (path[0], layer, *path[1:]))) for layer in range(param.shape[0])]


def check_tensors(reader: TensorReader, config: ModelConfig) -> dict[str, list[TensorSource]]:
    """The sources of every parameter by its unrolled name, after checking that `reader` has them and nothing else."""
    sources = defaultdict(list)
    for source in tensor_sources(config):
        sources[source.path].append(source)
    expected = {source.name: source.shape for group in sources.values() for source in group}

    if missing := expected.keys() - reader.tensors.keys():
        raise CheckpointError(f"{reader.path} lacks tensor {listed(missing)}")
    for name, shape in expected.items():
        info = reader.tensors[name]
        if info.shape != shape:
            raise CheckpointError(
                f"tensor {name} in {info.file} has shape {list(info.shape)}; the configuration asks for {list(shape)}"
            )
    extra = {
        name
        for name in reader.tensors.keys() - expected.keys()
        if not any(fnmatchcase(name, pattern) for pattern in DERIVED_TENSORS)
        and not _is_tied_copy(reader, config, name)
    }
    if extra:
        files = listed({str(reader.tensors[name].file) for name in extra})
        raise CheckpointError(
            f"unknown tensor {listed(extra)} in {files}; a {config.architecture} model has no such weight"
        )
    return sources


def _is_tied_copy(reader: TensorReader, config: ModelConfig, name: str) -> bool:
    """Whether the tensor is an output projection that repeats the embedding which it is tied to."""
    if name != "lm_head.weight" or not config.tie_word_embeddings:
        return False
    embedding, head = reader.tensors["model.embed_tokens.weight"], reader.tensors[name]
    same = embedding.shape == head.shape and all(
        np.array_equal(reader.read("model.embed_tokens.weight", rows), reader.read(name, rows))
        for rows in _row_chunks(head.shape)
    )
    if not same:
        raise CheckpointError(
            f"tensor {name} in {head.file} differs from model.embed_tokens.weight, but the configuration ties them"
        )
    return True


def _row_chunks(shape: tuple[int, ...], rows: int = 4096) -> Iterator[Index]:
    rest = (slice(None),) * (len(shape) - 1)
    return ((slice(start, min(start + rows, shape[0])), *rest) for start in range(0, shape[0], rows))


def _read_block(
    reader: TensorReader,
    per_layer: list[list[TensorSource]],
    bounds: Bounds,
    param: nnx.Variable,
) -> np.ndarray:
    """The part of a parameter within `bounds`, put together from the tensors it is made of."""
    block = np.empty([stop - start for start, stop in bounds], param.dtype)
    if not is_stacked(param):
        (sources,) = per_layer
        _fill(reader, sources, block, bounds, param.shape)
    else:
        for row, layer in enumerate(range(*bounds[0])):
            _fill(reader, per_layer[layer], block[row], bounds[1:], param.shape[1:])
    return block


def _fill(
    reader: TensorReader,
    sources: list[TensorSource],
    block: np.ndarray,
    bounds: Bounds,
    shape: tuple[int, ...],
) -> None:
    """Writes what each source has within `bounds` of a parameter of this shape into `block`."""
    filled = 0
    for source in sources:
        target, wanted = [], []
        for place, size, (start, stop) in zip(source.index, shape, bounds, strict=True):
            first, last, _ = place.indices(size)
            low, high = max(first, start), min(last, stop)
            target.append(slice(low - start, high - start))
            wanted.append(slice(low - first, high - first))
        if all(part.start < part.stop for part in wanted):
            values = _read_view(reader, source, tuple(wanted))
            block[tuple(target)] = values
            filled += values.size
    assert filled == block.size, f"{sources[0].path}: {filled} of {block.size} values have a source"


def _read_view(reader: TensorReader, source: TensorSource, wanted: Index) -> np.ndarray:
    """`tensor.reshape(source.view)[wanted]`, reading no more rows and columns of the tensor than that needs.

    Every axis of the tensor is split into some axes of the view. The outermost of those that is longer than 1 limits
    what is read; the inner ones are cut afterwards.
    """
    index, view, cut, axis = [], [], [], 0
    for size in source.shape:
        first = axis
        while axis == first or math.prod(source.view[first:axis]) < size:
            axis += 1
        outer = next((a for a in range(first, axis) if source.view[a] > 1), axis - 1)
        inner = math.prod(source.view[outer + 1 : axis])
        index.append(slice(wanted[outer].start * inner, wanted[outer].stop * inner))
        view += [1] * (outer - first) + [wanted[outer].stop - wanted[outer].start, *source.view[outer + 1 : axis]]
        cut += [slice(None)] * (outer - first + 1) + list(wanted[outer + 1 : axis])
    return reader.read(source.name, tuple(index)).reshape(view)[tuple(cut)]
