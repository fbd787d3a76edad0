"""Copies of results to HBM, behind the computation, for the TPU kernel whose tiles lie anywhere in the outputs.

A *tile* has a block of rows of every output. Tiles of one block follow one another, each with rows of its own in it: they
share a buffer in VMEM, which is copied after the last of them. There are two buffers, one being filled while the other is
copied. Tiles without work, which come last in a step, are not copied: what lies in their blocks stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

SLOT = 2  # in the state: the buffer in use, after how many tiles are being copied from each


@dataclass(frozen=True)
class Results:
    """Where the results of a kernel's steps go. All but the first are references into the kernel's memory.

    tiles: of a step, which are of different blocks if there are several.
    blocks: of each tile, its block of the outputs.
    outs: the outputs [blocks, ...]. buffers: of each output [2, tiles, ...]. state, sem: scratch, as listed by `scratch`.
    """

    tiles: int
    blocks: Any
    outs: Sequence[Any]
    buffers: Sequence[Any]
    state: Any
    sem: Any

    def start(self) -> None:
        """In a core's first step: nothing is being copied."""
        for i in range(SLOT + 1):
            self.state[i] = 0

    def open(self, step: Array, is_first: Array) -> Array:
        """The buffer for a step's results; it holds those of the tiles before that are of the same block."""
        before = self.blocks[jnp.maximum(step - 1, 0)]

        @pl.when(is_first | (self.tiles > 1) | (self.blocks[step] != before))
        def _() -> None:
            self.state[SLOT] = 1 - self.state[SLOT]
            self._wait(self.state[SLOT])

        return self.state[SLOT]

    def close(self, step: Array, is_last: Array, tiles: Array) -> None:
        """Copy a step's first `tiles` results if they are all there are of their blocks; in a core's last step wait for all."""
        after = self.blocks[jnp.minimum(step + 1, self.blocks.shape[0] - 1)]
        slot = self.state[SLOT]

        @pl.when(is_last | (self.tiles > 1) | (self.blocks[step] != after))
        def _() -> None:
            self.state[slot] = tiles

            @pl.loop(0, tiles)
            def _(tile: Array) -> None:
                for copy in self._copies(slot, tile, self.blocks[step * self.tiles + tile]):
                    copy.start()

        @pl.when(is_last)
        def _() -> None:
            self._wait(jnp.int32(0))
            self._wait(jnp.int32(1))

    def _wait(self, slot: Array) -> None:
        @pl.loop(0, self.state[slot])
        def _(tile: Array) -> None:
            for copy in self._copies(slot, tile, 0):
                copy.wait()

        self.state[slot] = 0

    def _copies(self, slot: Array, tile: Array, block: Array | int) -> list[Any]:
        return [
            pltpu.make_async_copy(buffer.at[slot, tile], out.at[block], self.sem.at[slot])
            for buffer, out in zip(self.buffers, self.outs, strict=True)
        ]


def scratch() -> tuple[Any, ...]:
    """What results keep in the kernel's memory beside the buffers."""
    return pltpu.SMEM((SLOT + 1,), jnp.int32), pltpu.SemaphoreType.DMA((2,))
