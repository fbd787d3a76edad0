"""The least time a step can take: a roofline (doi:10.1145/1498765.1498785) of this model on this machine, as measured."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from paxserve.models.config import ModelConfig
from paxserve.scheduler import PlannedRow

MATMUL_SIZE = 2048
MIN_STREAM_BYTES = 2**28
REPEATS = 10


@dataclass(frozen=True)
class StepCost:
    """Bytes that a step must move and floating-point operations it must do, padding left out."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Machine:
    """What a device reached on the simplest reading and computing programs.

    stream_bytes: size of the array that was read.
    """

    bytes_per_second: float
    flops_per_second: float
    stream_bytes: int

    def bound(self, cost: StepCost) -> float:
        """Seconds that a step takes at least: all of its reading, or all of its arithmetic, whichever is longer."""
        return max(cost.bytes / self.bytes_per_second, cost.flops / self.flops_per_second)


def step_cost(config: ModelConfig, itemsize: int, rows: Iterable[PlannedRow]) -> StepCost:
    """The cost of one step with weights and KV of `itemsize` bytes.

    Bytes: every matrix once, and K and V of each row's context once per layer (of its window, if the layer has one).
    FLOPs: 2 per weight and token in the layers, 2 per weight of the head and drawn token, 4 head_dim per query head, token
    and key it attends to.
    """
    rows = list(rows)
    tokens, drawn = sum(row.count for row in rows), sum(row.samples for row in rows)
    layer, head = layer_weights(config), config.hidden_size * config.vocab_size
    contexts = pairs = 0
    for window, layers in Counter(config.windows).items():
        for row in rows:
            end = row.start + row.count
            contexts += layers * (end if window is None else min(end, window - 1 + row.count))
            pairs += layers * (_causal_pairs(end, window) - _causal_pairs(row.start, window))
    weights = config.num_layers * layer + (head if drawn else 0)
    return StepCost(
        bytes=itemsize * (weights + contexts * 2 * config.num_kv_heads * config.head_dim),
        flops=2 * (config.num_layers * layer * tokens + head * drawn) + 4 * config.num_heads * config.head_dim * pairs,
    )


def layer_weights(config: ModelConfig) -> int:
    """Entries of one layer's matrices: q, k, v and output projections, gate, up and down."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    return config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)


def measure_machine(dtype: str, weight_bytes: int) -> Machine:
    """Measures the default device: the best of several runs each of a sum over an array and of a square matmul in `dtype`.

    The array is as large as the weights, so that a cache which holds them counts as the memory they are read from (but
    never so small that the time is that of starting the sum).
    """
    stream_bytes = max(weight_bytes, MIN_STREAM_BYTES)
    stream = jnp.ones(stream_bytes // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    read_seconds = _best_seconds(lambda: total(stream))
    square = jnp.ones((MATMUL_SIZE, MATMUL_SIZE), dtype)

    @jax.jit
    def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    matmul_seconds = _best_seconds(lambda: matmul(square, square))
    return Machine(stream.nbytes / read_seconds, 2 * MATMUL_SIZE**3 / matmul_seconds, stream.nbytes)


def describe_device() -> str:
    """The default device in words."""
    device = jax.devices()[0]
    cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
    return f"{device.device_kind}{cores}"


def _causal_pairs(tokens: int, window: int | None) -> int:
    """(query, key) pairs among the first `tokens` positions."""
    full = tokens if window is None else min(tokens, window)
    return full * (full + 1) // 2 + (tokens - full) * (window or 0)


def _best_seconds(run: Callable[[], jax.Array]) -> float:
    run().block_until_ready()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run().block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)
