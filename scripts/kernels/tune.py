"""Finds block sizes for the TPU kernels and writes them to pallas_kernels/tuning, by their schedules or by time on a TPU.

One size after the other is varied while the others stay, from what is stored, until none is better. By schedule the number
of blocks in VMEM cannot be told apart, since copies take no time there: it stays.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tpu
from chips import TPUS
from figures import CONTEXT, Figures
from gqa_cases import Case
from mla_cases import MLACase

from paxserve.pallas_kernels import tuning

CANDIDATES = {
    "block_keys": (256, 512, 1024),
    "chains": (8, 10, 11, 12, 16, 24),
    "query_rows": (128, 256, 512),
    "query_keys": (256, 512, 1024),
    "turn": (2, 4, 8),
    "hoisting": (25, 40, 50, 64, 100, 128),
    "decodes": (2, 4, 8),
    "decode_keys": (1024, 2048, 4096),
    "parts": (1, 2, 4),
    "slots": (2, 3, 4),
}
CASES = (
    Case(8, 4),
    Case(4, 1),
    Case(9, 3, head_dim=64),
    Case(8, 1, page_size=256),
    Case(32, 8, page_size=32),
    Case(4, 2),
    Case(4, 2, head_dim=96),
    Case(4, 2, head_dim=192),
    Case(8, 4, head_dim=256),
    Case(8, 4, pages="int8"),
    Case(8, 4, queries=512),
    Case(32, 32, queries=512),
    Case(9, 3, head_dim=64, queries=512),
    Case(8, 4, head_dim=256, queries=512),
    MLACase(16),
    MLACase(128),
    MLACase(16, queries=512),
    MLACase(128, queries=512),
)
GAIN = 0.99  # of the cost, at least, for which sizes are changed
ROUNDS, CALLS = 7, 10

Sizes = dict[str, int]
Costs = Callable[[Any, list[Sizes]], list[float]]
"""Of a case with each of several sizes: infinite if it does not compile, or spills where it must not."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=TPUS, help="a chip; all of them by default")
    parser.add_argument("--on-device", action="store_true", help="by time, on the TPU that is here")
    options = parser.parse_args()
    if not options.on_device:
        for target in options.target or TPUS:
            tune(target, functools.partial(schedules, target), [name for name in CANDIDATES if name != "slots"])
        return 0
    kind = jax.devices()[0].device_kind
    here = [target for target, chip in TPUS.items() if chip.kind == kind]
    if here != (options.target or here) or not here:
        parser.error(f"--on-device: here is {kind}, not {' or '.join(options.target or TPUS)}")
    tune(*here, times, list(CANDIDATES))
    return 0


def tune(target: str, costs: Costs, names: list[str]) -> None:
    """Writes the file of a chip."""
    kind = TPUS[target].kind
    tuned: dict[str, Any] = {kernel: [] for kernel in tuning.KERNELS}
    for case in CASES:
        start = tuning.block_sizes(case.tuned, kind, **case.tuned_shape)
        sizes = improve(case, start, costs, [name for name in names if name in start])
        print(f"{target}, {case}: {sizes}", flush=True)
        tuned[case.tuned].append(case.tuned_shape | {"sizes": sizes})
    path = tuning.FOLDER / f"{target}.json"
    lines = (
        f"{json.dumps(kernel)}: [\n  " + ",\n  ".join(map(json.dumps, each)) + "\n ]" for kernel, each in tuned.items()
    )
    path.write_text("{\n " + ",\n ".join([f'"device_kind": {json.dumps(kind)}', *lines]) + "\n}\n")
    tuning.read(path)


def improve(case: Any, sizes: Sizes, costs: Costs, names: list[str]) -> Sizes:
    """Varies a size at a time until all have been varied around the same others."""
    (best,) = costs(case, [sizes])
    if best == float("inf"):
        raise RuntimeError(
            f"{case} does not do with the sizes that are stored: {sizes}; scripts/check_kernels says why"
        )
    untried = list(names)
    while untried:
        name = untried.pop(0)
        options = [sizes | {name: value} for value in CANDIDATES[name] if value != sizes[name]]
        found = costs(case, options)
        cost, option = min(zip(found, options, strict=True), key=lambda each: each[0])
        if cost < GAIN * best:
            best, sizes = cost, option
            untried = [other for other in names if other != name]
    return sizes


def schedules(target: str, case: Any, options: list[Sizes]) -> list[float]:
    """By the compiler's schedule: cycles per token of ragged contexts, or the inverse of a prefill's share of the peak."""

    def cost(found: Figures | str) -> float:
        if isinstance(found, str) or (found["hot_spills"] and case.must_not_spill(target)):
            return float("inf")
        return found["ragged"] if case.is_decode else 1 / found["peak"]

    return [cost(found) for found in tpu.run(target, [str(case)] * len(options), options)]


def times(case: Any, options: list[Sizes]) -> list[float]:
    """Median seconds on the device that is here."""
    return [_time(case, sizes) for sizes in options]


def _time(case: Any, sizes: Sizes) -> float:
    function, _ = case.program()
    args = _arguments(case)
    with tpu.block_sizes(case, sizes):
        try:
            run = jax.jit(function).lower(*args).compile()
        except jax.errors.JaxRuntimeError:  # the sizes do not fit
            return float("inf")
    jax.block_until_ready(run(*args))
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([run(*args) for _ in range(CALLS)])
        rounds.append(time.perf_counter() - start)
    return statistics.median(rounds) / CALLS


def _arguments(case: Any) -> list[jax.Array]:
    """To run a case with: full pages in disorder."""
    rng = np.random.default_rng(0)
    *values, tables, lens, starts = case.program()[1]
    pages = values[-1].shape[0]
    return [
        *(jnp.asarray(rng.standard_normal(x.shape, np.float32), x.dtype) for x in values),
        jnp.asarray(rng.integers(1, pages, tables.shape), tables.dtype),
        jnp.full(lens.shape, min(CONTEXT, case.max_pages * case.page_size), lens.dtype),
        jnp.arange(starts.shape[0], dtype=starts.dtype) * case.queries,
    ]


if __name__ == "__main__":
    sys.exit(main())
