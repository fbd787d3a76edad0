"""Fills a model's parameters from a checkpoint, each device's shard read on its own, after everything was checked."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from paxserve.checkpoints.fill import Targets, fill_params, stored_targets
from paxserve.checkpoints.reader import CheckpointError, TensorReader, listed
from paxserve.checkpoints.safetensors import FP8, SafetensorsReader
from paxserve.models.config import ModelConfig
from paxserve.models.fp8 import FLOAT8, SCALE_SUFFIX
from paxserve.models.weights import TensorSource, mtp_tensors, tensor_sources

# Tensors that are no weights: RoPE frequencies saved by older transformers versions, which follow from the
# configuration, and the RoPE factors of a GGUF file, which are read into it.
DERIVED_TENSORS = ("*.rotary_emb.inv_freq", "rope_freqs.weight")

# Some formats' values are larger as they are read than they are stored, and than they will be.
PIECE_VALUES = 2**21

Bounds = tuple[tuple[int, int], ...]  # (start, stop) per axis
Index = tuple[slice, ...]
Read = Callable[[TensorSource, Index], np.ndarray]
"""Gives `tensor[index]` of a source's tensor, one slice with a start and a stop per axis."""


def load_params(reader: TensorReader, config: ModelConfig, declared: nnx.State, mesh: Mesh) -> nnx.State:
    """The declared parameters of a model, in their dtypes, sharded over `mesh` by their logical axes.

    Works for unrolled and stacked layers alike, and for kernels kept in FP8. A process reads only what its devices hold,
    and holds about one tensor in host memory beyond that.

    Raises CheckpointError, before any value is read, if a tensor is missing, unknown or of another shape than `config`
    says, or not in FP8 though it is to be kept so.
    """
    sources = check_tensors(reader, config)
    access = {name: _access(reader, sources, name, target) for name, target in stored_targets(declared, mesh).items()}

    def load(targets: Targets) -> dict[str, jax.Array]:
        return {name: _load_param(*access[name], target) for name, target in targets.items()}

    return fill_params(declared, mesh, load)


def _access(
    reader: TensorReader, sources: Mapping[str, list[TensorSource]], name: str, target: jax.ShapeDtypeStruct
) -> tuple[Read, list[TensorSource]]:
    """How the tensors of a parameter are read, and which they are."""
    if target.dtype == FLOAT8:
        fp8 = _fp8_reader(reader, sources[name])
        return lambda source, index: fp8.read_fp8(source.name, index), sources[name]
    if name in sources:
        return lambda source, index: reader.read(source.name, index), sources[name]
    kernel = sources[name.removesuffix(SCALE_SUFFIX)]
    fp8 = _fp8_reader(reader, kernel)
    scales = [source.of_scales(target.shape) for source in kernel]
    return lambda source, index: fp8.read_scales(source.name, index, source.shape), scales


def _fp8_reader(reader: TensorReader, sources: list[TensorSource]) -> SafetensorsReader:
    for source in sources:
        info = reader.tensors[source.name]
        if info.dtype != FP8:
            raise CheckpointError(
                f"tensor {source.name} in {info.file} has type {info.dtype}, so it cannot be kept in FP8"
            )
    assert isinstance(reader, SafetensorsReader), "no other format has FP8 weights"
    return reader


def check_tensors(reader: TensorReader, config: ModelConfig) -> dict[str, list[TensorSource]]:
    """The sources of every parameter by its unrolled name, after checking that `reader` has them and nothing else."""
    sources = defaultdict(list)
    for source in tensor_sources(config, reader.tensors):
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
        if not any(fnmatchcase(name, pattern) for pattern in (*DERIVED_TENSORS, *mtp_tensors(config)))
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
        np.array_equal(reader.read("model.embed_tokens.weight", piece), reader.read(name, piece))
        for piece in _pieces(head.shape)
    )
    if not same:
        raise CheckpointError(
            f"tensor {name} in {head.file} differs from model.embed_tokens.weight, but the configuration ties them"
        )
    return True


def _pieces(shape: tuple[int, ...]) -> Iterator[Index]:
    """What is read at a time of an array of this shape: some rows of its first axis that has several."""
    axis = next((axis for axis, size in enumerate(shape) if size > 1), 0)
    rows = max(1, PIECE_VALUES * shape[axis] // math.prod(shape))
    whole = tuple(slice(0, size) for size in shape)
    for start in range(0, shape[axis], rows):
        yield (*whole[:axis], slice(start, min(start + rows, shape[axis])), *whole[axis + 1 :])


def _load_param(read_tensor: Read, sources: list[TensorSource], target: jax.ShapeDtypeStruct) -> jax.Array:
    """One parameter, put together from its tensors, each shard on its own."""

    @functools.cache  # replicas share one copy
    def read(bounds: Bounds) -> np.ndarray:
        return _read_block(read_tensor, sources, bounds, target)

    def shard(index: Index | None) -> np.ndarray:
        assert index is not None
        return read(tuple(part.indices(size)[:2] for part, size in zip(index, target.shape, strict=True)))

    return jax.make_array_from_callback(target.shape, target.sharding, shard)


def _read_block(read: Read, sources: list[TensorSource], bounds: Bounds, target: jax.ShapeDtypeStruct) -> np.ndarray:
    """The part of a parameter within `bounds`: what every source has there."""
    block = np.empty([stop - start for start, stop in bounds], target.dtype)
    filled = 0
    for source in sources:
        place, wanted = [], []
        for taken, size, (start, stop), offset in zip(source.index, target.shape, bounds, source.first, strict=True):
            first, last, _ = taken.indices(size)
            low, high = max(first, start), min(last, stop)
            place.append(slice(low - start, high - start))
            wanted.append(slice(offset + low - first, offset + high - first))
        if all(part.start < part.stop for part in wanted):
            part = block[tuple(place)]
            for piece in _pieces(part.shape):
                moved = (slice(w.start + p.start, w.start + p.stop) for w, p in zip(wanted, piece, strict=True))
                part[piece] = _read_view(read, source, tuple(moved))
            filled += part.size
    assert filled == block.size, f"{sources[0].path}: {filled} of {block.size} values have a source"
    return block


def _read_view(read: Read, source: TensorSource, wanted: Index) -> np.ndarray:
    """`tensor.reshape(source.view)[wanted]`, reading nothing else of the tensor.

    Every axis of the tensor is split into some axes of the view. What is wanted of these is one range of the tensor's axis
    if, of the axes within the outermost one that is longer than 1, all is wanted; else it is read piece by piece.
    """
    index = []
    for axes in source.split:
        outer = next((axis for axis in axes if _length(wanted[axis]) > 1), axes[-1])
        if any(_length(wanted[axis]) < source.view[axis] for axis in axes if axis > outer):
            pieces = [
                _read_view(read, source, (*wanted[:outer], slice(at, at + 1), *wanted[outer + 1 :]))
                for at in range(wanted[outer].start, wanted[outer].stop)
            ]
            return np.concatenate(pieces, axis=outer)
        start = 0
        for axis in range(axes.start, outer + 1):
            start = start * source.view[axis] + wanted[axis].start
        inner = math.prod(source.view[outer + 1 : axes.stop])
        index.append(slice(start * inner, (start + _length(wanted[outer])) * inner))
    return read(source, tuple(index)).reshape([_length(part) for part in wanted])


def _length(part: slice) -> int:
    return part.stop - part.start
