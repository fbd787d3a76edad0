"""FP8 weights with a scale for every block, the format in which DeepSeek-V3 was released (arXiv:2412.19437, section 3.3).

Beside a weight [..., out, in] of type float8_e4m3fn there is a tensor `<weight>_scale_inv` [..., ceil(out / 128),
ceil(in / 128)]; a value is the float8 number times its block's scale. The last blocks may be smaller.
"""

import ml_dtypes
import numpy as np

from paxserve.models.fp8 import BLOCK

SCALE_SUFFIX = "_scale_inv"
FLOAT8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight of two or more axes."""
    return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


def scales_of(scales: np.ndarray, index: tuple[slice, ...], blocks: tuple[int, int] = (1, 1)) -> np.ndarray:
    """The scale of every value of `weight[index]`, in float32.

    scales: those of the whole weight. index: slices with a start and a stop, in steps of `blocks` values along the last
    two axes; `blocks` that divide the format's own lie in one each, and get its scale.
    """
    rows, columns = (
        np.arange(part.start, part.stop) * block // BLOCK for part, block in zip(index[-2:], blocks, strict=True)
    )
    return scales[index[:-2]][..., rows[:, None], columns].astype(np.float32)
