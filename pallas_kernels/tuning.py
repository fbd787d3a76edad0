"""Block sizes of kernels, as they were tuned: data in `tuning/*.json`, one file per kind of device.

    {"device_kind": "TPU v6 lite",
     "mosaic_tpu decode": [{"heads": 8, ..., "sizes": {"block_keys": 512, ...}}, ...]}

`scripts/tune_kernels` writes the files.
"""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_suffix("")
DEVICE_KINDS = ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x")
"""As JAX names them."""

GQA_SHAPE = ("heads", "kv_heads", "head_dim", "page_size", "itemsize")
MLA_SHAPE = ("heads", "kv_lora_rank", "page_size", "itemsize")
KERNELS = {
    "mosaic_tpu decode": (GQA_SHAPE, ("block_keys", "chains", "slots")),
    "mosaic_tpu prefill": (GQA_SHAPE, ("query_rows", "query_keys", "turn", "hoisting", "slots")),
    "mosaic_tpu mla decode": (MLA_SHAPE, ("decodes", "decode_keys", "slots")),
    "mosaic_tpu mla prefill": (MLA_SHAPE, ("query_rows", "query_keys", "parts", "hoisting", "slots")),
}
"""Of each kernel, the fields of a shape, itemsize being that of its pages, and the sizes that are tuned."""


@dataclass(frozen=True)
class Entry:
    device_kind: str
    kernel: str
    shape: Mapping[str, int]
    sizes: Mapping[str, int]


def block_sizes(kernel: str, device_kind: str, **shape: int) -> dict[str, int]:
    """The sizes tuned for the nearest shape.

    Candidates are the kernel's entries for this kind of device, or for all kinds if it has none for this one: a device that
    was never tuned for, or a CPU that simulates. The nearest has the least sum over the fields of a shape of |log(wanted /
    tuned)|; of equals the first, in the order of the files' names. Raises ValueError if there is no such kernel, or if
    `shape` does not give its fields, all of them positive.
    """
    if kernel not in KERNELS:
        raise ValueError(f"no kernel {kernel!r} is tuned; there are {', '.join(KERNELS)}")
    fields, _ = KERNELS[kernel]
    if set(shape) != set(fields) or min(shape.values()) < 1:
        raise ValueError(f"the shape of {kernel!r} is given by positive {', '.join(fields)}, not by {shape}")
    entries = [entry for entry in _entries() if entry.kernel == kernel]
    entries = [entry for entry in entries if entry.device_kind == device_kind] or entries

    def distance(entry: Entry) -> float:
        return sum(abs(math.log(shape[field] / entry.shape[field])) for field in fields)

    return dict(min(entries, key=distance).sizes)


@functools.cache
def _entries() -> list[Entry]:
    return [entry for path in sorted(FOLDER.glob("*.json")) for entry in read(path)]


def read(path: Path) -> list[Entry]:
    """The entries of a file. Raises ValueError, naming the file, if anything in it is unknown, missing or not positive."""
    contents = json.loads(path.read_text())
    kind = contents.pop("device_kind", None)
    if kind not in DEVICE_KINDS:
        raise ValueError(f"{path}: device_kind {kind!r} is none of {', '.join(DEVICE_KINDS)}")
    entries = []
    for kernel, tuned in contents.items():
        if kernel not in KERNELS:
            raise ValueError(f"{path}: {kernel!r} is none of the kernels {', '.join(KERNELS)}")
        fields, names = KERNELS[kernel]
        for each in tuned:
            shape = {name: value for name, value in each.items() if name != "sizes"}
            _check(path, f"a shape of {kernel!r}", shape, fields)
            _check(path, f"sizes of {kernel!r}", each.get("sizes", {}), names)
            entries.append(Entry(kind, kernel, shape, each["sizes"]))
    return entries


def _check(path: Path, what: str, given: Mapping[str, Any], names: tuple[str, ...]) -> None:
    if set(given) != set(names):
        raise ValueError(f"{path}: {what} must give {', '.join(names)}, not {', '.join(given) or 'nothing'}")
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{path}: {name} of {what} must be a positive whole number, not {value!r}")
