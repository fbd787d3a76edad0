"""What kernels cost, as it is stored in docs/kernels.json and compared with what is found now.

Figures of a TPU kernel: cycles per cached token of its hot loop (`hot`), of issuing page copies (`copies`) and of the
whole kernel (`cycles`; `ragged` is the same at contexts from 64 to twice as long), or for a prefill the share of a core's
peak in matrix products (`peak`); spills in the hot loop and in all; the `cores` that share its work, if not one; `vmem` and
`smem` in bytes; `bytes` of KV read per cached token, and the `least_bytes` it can be. Of a GPU kernel: `registers` of a
thread, `shared` bytes of a thread block, thread blocks `fitting` on a multiprocessor, `spill_bytes`.
"""

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp

Figures = dict[str, float]
Found = dict[str, dict[str, Figures]]
"""By target and case."""

PATH = Path(__file__).resolve().parents[2] / "docs" / "kernels.json"
CONTEXT, SEQS = 1536, 128  # tokens of each sequence of a decode, and sequences
COSTS = ("cycles", "registers", "shared", "spill_bytes")
TOLERANCE = 1.05


def stored_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Of an array in a TPU's memory, the last two axes filled up to tiles of 128 lanes and of 32 bytes or few rows."""
    itemsize = jnp.dtype(dtype).itemsize
    *others, rows, lanes = shape
    tile_rows = min(32 // itemsize, max(4 // itemsize, 2 ** (rows - 1).bit_length()))
    return math.prod(others) * -(-rows // tile_rows) * tile_rows * -(-lanes // 128) * 128 * itemsize


def decode_cycles(hot: float, copies: float, around: float, tiles: int, block_keys: int) -> Figures:
    """The figures in cycles of a decode that computes blocks of `tiles` sequences side by side.

    hot, copies: of a block, its matrix work and the starting of its pages' copies; around: of what comes once for all blocks of
    these sequences. A block that is filled in part is computed as a whole.
    """

    def at(*contexts: int) -> float:
        blocks, read = sum(-(-context // block_keys) for context in contexts), sum(contexts) / block_keys
        return (blocks * hot + read * copies + len(contexts) * around) / (tiles * sum(contexts))

    tokens = tiles * block_keys
    ragged = range(64, 2 * CONTEXT + 1, 64)
    return {"cycles": at(CONTEXT), "ragged": at(*ragged), "hot": hot / tokens, "copies": copies / tokens}


def read() -> dict[str, Any]:
    """`compilers`: versions by target; `figures`: Found; `peers`: the same of others' kernels."""
    return json.loads(PATH.read_text())


def write(stored: dict[str, Any]) -> None:
    def rounded(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: rounded(value) for key, value in x.items()}
        return float(f"{x:.5g}") if isinstance(x, float) else x

    PATH.write_text(json.dumps(rounded(stored), indent=1, sort_keys=True) + "\n")


def compare(stored: dict[str, Any], found: Found, compilers: dict[str, dict[str, str]]) -> tuple[list[str], list[str]]:
    """What costs more than 5 % more than is stored, and what cannot be compared, in words.

    A kernel's cost is compared with what the same versions of the same compilers made of it.
    """
    rises, remarks = [], []
    for target, cases in found.items():
        before = stored["compilers"].get(target)
        if before != compilers[target]:
            remarks.append(f"{target}: the stored figures are of {before}, these are of {compilers[target]}")
            continue
        for case, figures in cases.items():
            old = stored["figures"][target].get(case)
            if old is None:
                remarks.append(f"{target}, {case}: it has no stored figures; scripts/kernel_report makes them")
                continue
            for name in COSTS:
                if name in old and figures[name] > TOLERANCE * old[name]:
                    rises.append(f"{target}, {case}: {name} rose from {old[name]:.4g} to {figures[name]:.4g}")
            if "peak" in old and TOLERANCE * figures["peak"] < old["peak"]:
                rises.append(
                    f"{target}, {case}: the share of the peak fell from {old['peak']:.1%} to {figures['peak']:.1%}"
                )
    return rises, remarks
