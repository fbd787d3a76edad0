"""Kernels kept in FP8, each block of values with a scale of its own (DeepSeek-V3, arXiv:2412.19437, section 3.3).

A parameter `kernel` of type float8_e4m3fn has beside it `kernel_scale` in float32, a value for every block. A checkpoint's
blocks are 128 x 128. Here the out axes of a kernel may be split (heads, head_dim), and a block must not straddle two rows of
what is split: along its last out axis and its in axis a block is as long as the greatest common divisor of 128 and what
a device has of the axis, which is 128 in most released models.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

BLOCK = 128
FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
SCALE_SUFFIX = "_scale"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockScaled:
    """A kernel in FP8 and its scales: `values` times the scale of the block. Indexing takes from the leading axes."""

    values: Float[Array, "*axes"]
    scales: Float[Array, "*blocks"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: object) -> "BlockScaled":
        return BlockScaled(self.values[index], self.scales[index])

    def dequantized(self, dtype: jnp.dtype) -> Float[Array, "*axes"]:
        """The kernel in `dtype`, multiplied in float32: the numbers that dequantising a checkpoint gives."""
        return self.split(dtype).reshape(self.shape)

    def split(self, dtype: jnp.dtype) -> Float[Array, "*split_axes"]:
        """As `dequantized`, an axis with several blocks of several values, except the last, as two axes.

        In this form, nothing reshaped after the product with the scales, XLA:TPU fuses it into the one that the kernel is
        for.
        """
        # Repeated along the last axis the scales are still few; along the others they are broadcast.
        scales = jnp.repeat(self.scales, self.shape[-1] // self.scales.shape[-1], axis=-1)
        blocks = scales.shape[:-1]
        cut = [axis for axis, count in enumerate(blocks) if 1 < count < self.shape[axis]]
        shape = [
            part
            for axis, size in enumerate(self.shape)
            for part in ((blocks[axis], size // blocks[axis]) if axis in cut else (size,))
        ]
        scales = jnp.expand_dims(scales, [axis + 1 + index for index, axis in enumerate(cut)])
        values = self.values.reshape(shape)
        if cut:  # XLA would move the reshape to after the product, and write out the broadcast scales for it
            values = jax.lax.optimization_barrier(values)
        return (values.astype(jnp.float32) * scales).astype(dtype)


Kernel = Array | BlockScaled


def kernel_value(kernel: nnx.Param, scale: nnx.Param | None) -> Kernel:
    """The kernel that a parameter holds, with its scales if it has any."""
    return kernel[...] if scale is None else BlockScaled(kernel[...], scale[...])


def block_size(axis: int, other: int = 0) -> int:
    """The length of a block along an axis, of which it is a divisor, as it is of `other`."""
    return math.gcd(BLOCK, axis, other)
