"""FP8 weights with a scale for every block, the format in which DeepSeek-V3 was released (arXiv:2412.19437, section 3.3).

Beside a weight [..., out, in] of type float8_e4m3fn there is a tensor `<weight>_scale_inv` [..., ceil(out / 128),
ceil(in / 128)]; a value is the float8 number times its block's scale. The last blocks may be smaller.
"""

import ml_dtypes
import numpy as np

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
FLOAT8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight of two or more axes."""
    return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


def scales_index(index: tuple[slice, ...]) -> tuple[slice, ...]:
    """The scales that `weight[index]` needs; every slice has a start and a stop."""
    return (*index[:-2], *(slice(part.start // BLOCK, -(-part.stop // BLOCK)) for part in index[-2:]))


def dequantize(stored: np.ndarray, scales: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
    """`weight[index]` in float32 from its bytes and `scales[scales_index(index)]`."""
    factors = scales.astype(np.float32)
    for axis in (-2, -1):
        first, size = index[axis].start % BLOCK, stored.shape[axis]
        factors = np.take(factors, (np.arange(size) + first) // BLOCK, axis=axis)
    return FLOAT8_VALUES[stored] * factors
