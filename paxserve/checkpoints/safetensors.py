"""Hugging Face directories of safetensors files (https://github.com/huggingface/safetensors, "Format")."""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers numpy's bfloat16, in which safetensors returns BF16 tensors
import numpy as np
from safetensors import SafetensorError, safe_open

from paxserve.checkpoints.reader import CheckpointError, TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class SafetensorsReader:
    """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists.

    Raises CheckpointError if a file is missing, damaged or truncated, or holds a type other than float32, float16 and
    bfloat16.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        self.tensors: dict[str, TensorInfo] = {}
        self._open: dict[Path, Any] = {}
        weight_map = self._weight_map()
        for file in sorted({SINGLE_FILE} if weight_map is None else set(weight_map.values())):
            self._add_shard(self.path / file)
        for name, file in (weight_map or {}).items():
            if name not in self.tensors or self.tensors[name].file.name != file:
                raise CheckpointError(
                    f"{self.path / file} does not hold tensor {name}, which {INDEX_FILE} promises there"
                )

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """`tensor[index]` in its stored type; only that part of the file is read."""
        return self._open[self.tensors[name].file].get_slice(name)[index]

    def _weight_map(self) -> dict[str, str] | None:
        """Tensor name -> shard file name; None if there is no index."""
        index = self.path / INDEX_FILE
        if not index.exists():
            return None
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            files = {str(file) for file in weight_map.values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f'{index} is not a safetensors index with a "weight_map": {error}') from error
        if outside := [file for file in files if Path(file).name != file]:
            raise CheckpointError(f"{index} lists files outside its directory: {', '.join(outside)}")
        return weight_map

    def _add_shard(self, file: Path) -> None:
        header = _read_header(file)
        for name, entry in header.items():
            if name in self.tensors:
                raise CheckpointError(f"tensor {name} is in both {self.tensors[name].file} and {file}")
            self.tensors[name] = TensorInfo(tuple(entry["shape"]), entry["dtype"], file)
        try:
            self._open[file] = safe_open(file, framework="numpy")
        except SafetensorError as error:
            raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error


def _read_header(file: Path) -> dict[str, dict[str, Any]]:
    """The header's entry of every tensor, checked against the file's size so that truncation is told by tensor."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if not 2 <= header_bytes <= size - 8:
                raise CheckpointError(f"{file} is not a safetensors file, or is cut off within its header")
            header = json.loads(stream.read(header_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            stored = f"tensor {name} in {file}"
            if entry["dtype"] not in ITEM_BYTES:
                raise CheckpointError(f"{stored} has type {entry['dtype']}; supported are {', '.join(ITEM_BYTES)}")
            if end - begin != math.prod(entry["shape"]) * ITEM_BYTES[entry["dtype"]]:
                raise CheckpointError(f"{stored}: {end - begin} bytes do not fit shape {entry['shape']}")
            if 8 + header_bytes + end > size:
                raise CheckpointError(f"{stored} is cut off: it ends at byte {8 + header_bytes + end} of {size}")
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{file} cannot be opened: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} has a damaged safetensors header: {error!r}") from error
    return header
