"""What every checkpoint format gives the loader: named tensors, their shapes, and slices of their values."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded as it is. The message names the file and, where there is one, the tensor."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file declares it; `dtype` is the format's own name for the stored type ("BF16", "Q4_K")."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


class TensorReader(Protocol):
    """An open checkpoint. Opening reads and checks the headers only; `read` touches nothing but what it returns.

    path: the file or directory that was opened. tensors: every tensor by its Hugging Face name, whatever the format
    calls it; names that the format's mapping does not know are kept as they are.
    """

    path: Path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """The values of `tensor[index]` (one slice of step 1 per axis) as float32, float16 or bfloat16."""
        ...


def listed(names: Iterable[str], limit: int = 5) -> str:
    """The names for an error message: the first `limit` of them and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
