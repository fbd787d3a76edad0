"""Rotary position embedding and its context-length scalings, computed as Hugging Face transformers computes them."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from paxserve.models.config import RopeConfig


class RopeTable(NamedTuple):
    """cos and sin of every token's rotation angles, [tokens, head_dim // 2] float32, attention factor included."""

    cos: Float[Array, "tokens half"]
    sin: Float[Array, "tokens half"]


def rope_table(rope: RopeConfig, head_dim: int, positions: Int[Array, "tokens"]) -> RopeTable:
    """The rotations for tokens at `positions`.

    Raises NotImplementedError for a kind of scaling that is not known.
    """
    if rope.kind == "dynamic":
        inverse_frequencies = _dynamic_frequencies(rope, head_dim, positions)  # [tokens, half]
    else:
        inverse_frequencies = jnp.asarray(_static_frequencies(rope, head_dim))  # [half]
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies  # [tokens, half]
    factor = _attention_factor(rope)

    def compute(angles: Float[Array, "tokens half"]) -> RopeTable:
        return RopeTable(jnp.cos(angles) * factor, jnp.sin(angles) * factor)

    def unit(angles: Float[Array, "tokens half"]) -> RopeTable:
        return RopeTable(jnp.ones_like(angles), jnp.zeros_like(angles))

    # The condition is a fence: XLA:CPU would fuse the table into every layer, and compute each sine anew in all of them.
    return jax.lax.cond(jnp.any(positions > 0), compute, unit, angles)


def apply_rope(
    x: Float[Array, "tokens heads head_dim"], table: RopeTable, *, interleaved: bool = False
) -> Float[Array, "tokens heads head_dim"]:
    """x with each pair (x[i], x[i + head_dim // 2]) rotated by its token's angle i, computed in float32.

    interleaved: the pairs are (x[2i], x[2i + 1]). They come out as (i, i + head_dim // 2) all the same: a product of two
    vectors rotated alike does not depend on the order.
    """
    x32 = x.astype(jnp.float32)
    first, second = (
        (x32[..., ::2], x32[..., 1::2]) if interleaved else jnp.split(x32, 2, axis=-1)
    )  # [tokens, heads, half]
    cos, sin = table.cos[:, None], table.sin[:, None]  # [tokens, 1, half]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _static_frequencies(rope: RopeConfig, head_dim: int) -> Float[np.ndarray, "half"]:
    """Radians per position of each pair, for the kinds whose frequencies do not depend on the position."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = 1.0 / np.power(np.float32(rope.theta), exponents)
    match rope.kind:
        case "default":
            scaled = plain
        case "linear":
            scaled = plain / np.float32(rope.factor)
        case "llama3":
            scaled = _llama3_frequencies(rope, plain)
        case "yarn":
            scaled = _yarn_frequencies(rope, plain, head_dim)
        case kind:
            raise NotImplementedError(f"RoPE scaling {kind!r} is not supported")
    if rope.frequency_factors is not None:
        scaled = scaled / np.array(rope.frequency_factors, np.float32)
    return scaled.astype(np.float32)


def _dynamic_frequencies(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "tokens"]
) -> Float[Array, "tokens half"]:
    """Dynamic NTK: beyond the original context the base grows with the length of the sequence.

    Position p uses the base for a sequence of p + 1 tokens. That is what transformers does when it generates token by
    token; it does not depend on how a prompt is cut into chunks, so that cached keys stay valid as the sequence grows.
    """
    original = _original_max_position(rope)
    length = jnp.maximum(positions + 1, original).astype(jnp.float32)
    stretch = rope.factor * length / original - (rope.factor - 1.0)  # [tokens]
    base = rope.theta * stretch ** (head_dim / (head_dim - 2))
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return 1.0 / base[:, None] ** exponents


def _llama3_frequencies(rope: RopeConfig, plain: Float[np.ndarray, "half"]) -> Float[np.ndarray, "half"]:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between interpolated smoothly."""
    original = _original_max_position(rope)
    wavelengths = 2 * math.pi / plain
    smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _yarn_frequencies(rope: RopeConfig, plain: Float[np.ndarray, "half"], head_dim: int) -> Float[np.ndarray, "half"]:
    """YaRN (arXiv:2309.00071, section 3.2): a linear ramp over the pairs from extrapolation to interpolation."""
    original = _original_max_position(rope)

    def pair_with_rotations(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with_rotations(rope.beta_fast), pair_with_rotations(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0)
    return plain / rope.factor * interpolated + plain * (1 - interpolated)


def _attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: YaRN's temperature on q and k (1 for every other kind)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    if rope.mscale and rope.mscale_all_dim:
        return _temperature(rope, rope.mscale) / _temperature(rope, rope.mscale_all_dim)
    return _temperature(rope, 1.0)


def softmax_factor(rope: RopeConfig) -> float:
    """What DeepSeek's attention multiplies its logits by: YaRN's temperature on all dimensions of q and k, not RoPE's
    alone (1 where there is no `mscale_all_dim`)."""
    return _temperature(rope, rope.mscale_all_dim) ** 2 if rope.mscale_all_dim else 1.0


def _temperature(rope: RopeConfig, mscale: float) -> float:
    return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0


def _original_max_position(rope: RopeConfig) -> int:
    if rope.original_max_position is None:
        raise ValueError(f"RoPE scaling {rope.kind!r} needs original_max_position")
    return rope.original_max_position
