"""Hugging Face directories of safetensors files (https://github.com/huggingface/safetensors, "Format")."""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes  # registers numpy's bfloat16, too, in which safetensors returns BF16 tensors
import numpy as np
from safetensors import SafetensorError, safe_open

from paxserve.checkpoints.fp8 import FLOAT8_VALUES, SCALE_SUFFIX, scales_of, scales_shape
from paxserve.checkpoints.reader import CheckpointError, TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FP8 = "F8_E4M3"
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, FP8: 1}


class SafetensorsReader:
    """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists.

    FP8 weights are dequantised as they are read, unless they are asked for as they are; their scales are not among the
    tensors.

    Raises CheckpointError if a file is missing, damaged or truncated, or holds a type other than float32, float16,
    bfloat16 and float8_e4m3fn with scales.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        self.tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        self._scales: dict[str, TensorInfo] = {}  # by the name of the weight
        weight_map = self._weight_map()
        for file in sorted({SINGLE_FILE} if weight_map is None else set(weight_map.values())):
            self._add_shard(self.path / file)
        for name, file in (weight_map or {}).items():
            if name not in self.tensors or self.tensors[name].file.name != file:
                raise CheckpointError(
                    f"{self.path / file} does not hold tensor {name}, which {INDEX_FILE} promises there"
                )
        for name in [name for name, info in self.tensors.items() if info.dtype == FP8]:
            self._scales[name] = self._take_scales(name)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """`tensor[index]` in its stored type, or in float32 if that is FP8; only that part of the file is read."""
        info = self.tensors[name]
        if info.dtype != FP8:
            # Opened anew for every use: what is read stays mapped as long as the file is open.
            with safe_open(info.file, framework="numpy") as file:
                return file.get_slice(name)[index]
        return FLOAT8_VALUES[self.read_fp8(name, index).view(np.uint8)] * scales_of(self._read_scales(name), index)

    def read_fp8(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """`tensor[index]` of an FP8 weight as float8_e4m3fn, without its scales."""
        # The safetensors package does not give FP8 as NumPy arrays.
        info = self.tensors[name]
        return np.memmap(info.file, ml_dtypes.float8_e4m3fn, "r", self._offsets[name], info.shape)[index]

    def read_scales(self, name: str, index: tuple[slice, ...], shape: tuple[int, ...]) -> np.ndarray:
        """`scales[index]` in float32 of an FP8 weight that is cut into blocks of one size, `shape` of them along each
        axis, of which none straddles two blocks of the format.
        """
        rows, columns = (size // count for size, count in zip(self.tensors[name].shape[-2:], shape[-2:], strict=True))
        return scales_of(self._read_scales(name), index, (rows, columns))

    def _read_scales(self, name: str) -> np.ndarray:
        with safe_open(self._scales[name].file, framework="numpy") as file:
            return file.get_tensor(name + SCALE_SUFFIX)

    def _take_scales(self, name: str) -> TensorInfo:
        """Takes an FP8 weight's scales out of the tensors."""
        info, scales = self.tensors[name], self.tensors.pop(name + SCALE_SUFFIX, None)
        if scales is None:
            raise CheckpointError(
                f"tensor {name} in {info.file} has type {FP8} but no scales; {name}{SCALE_SUFFIX} should hold them"
            )
        if len(info.shape) < 2 or scales.shape != scales_shape(info.shape) or scales.dtype == FP8:
            raise CheckpointError(
                f"tensor {name}{SCALE_SUFFIX} in {scales.file}, {scales.dtype} of shape {list(scales.shape)}, does not hold "
                f"scales for blocks of 128 x 128 of {name} with shape {list(info.shape)}"
            )
        return scales

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
        header, data_start = _read_header(file)
        for name, entry in header.items():
            if name in self.tensors:
                raise CheckpointError(f"tensor {name} is in both {self.tensors[name].file} and {file}")
            self.tensors[name] = TensorInfo(tuple(entry["shape"]), entry["dtype"], file)
            self._offsets[name] = data_start + entry["data_offsets"][0]
        try:
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error


def _read_header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """(the header's entry of every tensor, where in the file the data start).

    The entries are checked against the file's size so that truncation is told by tensor.
    """
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
            if begin < 0 or end - begin != math.prod(entry["shape"]) * ITEM_BYTES[entry["dtype"]]:
                raise CheckpointError(f"{stored}: bytes {begin} to {end} do not fit shape {entry['shape']}")
            if 8 + header_bytes + end > size:
                raise CheckpointError(f"{stored} is cut off: it ends at byte {8 + header_bytes + end} of {size}")
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{file} cannot be opened: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} has a damaged safetensors header: {error!r}") from error
    return header, 8 + header_bytes
