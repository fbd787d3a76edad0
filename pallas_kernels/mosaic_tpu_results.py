"""Copies of results to HBM, behind the computation, for the TPU kernel whose tiles lie anywhere in the outputs.

A *tile* has a block of rows of every output. Tiles of one block follow one another, each with rows of its own in it: they
share a buffer in VMEM, which is copied after the last of them. There are two buffers, one being filled while the other is
copied. A tile without work is not copied: what lies in its block stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array


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
        for i in range(1 + 2 * self.tiles):
            self.state[i] = 0

    def open(self, step: Array, is_first: Array) -> Array:
        """The buffer for a step's results; it holds those of the tiles before that are of the same block."""
        before = self.blocks[jnp.maximum(step - 1, 0)]

        @pl.when(is_first | (self.tiles > 1) | (self.blocks[step] != before))
        def _() -> None:
            self.state[0] = 1 - self.state[0]
            self._wait(self.state[0])

        return self.state[0]

    def close(self, step: Array, is_last: Array, has_work: Sequence[Array]) -> None:
        """Copy a step's results if they are all there are of their blocks, and wait for all copies in a core's last step."""
        after = self.blocks[jnp.minimum(step + 1, self.blocks.shape[0] - 1)]
        slot = self.state[0]

        @pl.when(is_last | (self.tiles > 1) | (self.blocks[step] != after))
        def _() -> None:
            for tile in range(self.tiles):

                @pl.when(has_work[tile])
                def _(tile: int = tile) -> None:
                    self.state[1 + slot * self.tiles + tile] = 1
                    for copy in self._copies(slot, tile, self.blocks[step * self.tiles + tile]):
                        copy.start()

        @pl.when(is_last)
        def _() -> None:
            self._wait(jnp.int32(0))
            self._wait(jnp.int32(1))

    def _wait(self, slot: Array) -> None:
        for tile in range(self.tiles):
            at = 1 + slot * self.tiles + tile

            @pl.when(self.state[at] == 1)
            def _(tile: int = tile, at: Array = at) -> None:
                self.state[at] = 0
                for copy in self._copies(slot, tile, 0):
                    copy.wait()

    def _copies(self, slot: Array, tile: int, block: Array | int) -> list[Any]:
        return [
            pltpu.make_async_copy(buffer.at[slot, tile], out.at[block], self.sem.at[slot])
            for buffer, out in zip(self.buffers, self.outs, strict=True)
        ]


def scratch(tiles: int) -> tuple[Any, ...]:
    """What results keep in the kernel's memory beside the buffers."""
    return pltpu.SMEM((1 + 2 * tiles,), jnp.int32), pltpu.SemaphoreType.DMA((2,))
