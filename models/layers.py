"""The building blocks of a decoder layer. Kernels are out-major: y = x @ kernel.T."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from paxserve.models.fp8 import BlockScaled, Kernel, kernel_value
from paxserve.models.params import Declare, Normal, ones, zeros
from paxserve.sharding import TENSOR, axes_rank, axes_size, split_over, sum_over

Axes = tuple[str | None, ...]


FEW_TOKENS = 64  # up to which repacking a kernel outweighs multiplying by it, on CPU


def project(x: Float[Array, "tokens inputs"], kernel: Kernel) -> Float[Array, "tokens *outputs"]:
    """x times an out-major kernel [*outputs, inputs], accumulated and returned in float32.

    float32 operands are multiplied at full precision (TPUs would otherwise round them to bfloat16). A kernel in FP8 is
    dequantised to x's dtype for the product.

    XLA:CPU transposes a kernel of more than two axes anew in every call, several times the cost of the product, so there
    the kernel is viewed as a matrix. Elsewhere its axes are left alone: merging a split axis into one that is not split
    (gate_up's "mlp") would gather the kernel on every device.
    """
    if isinstance(kernel, BlockScaled):
        return project(x, kernel.split(x.dtype)).reshape(-1, *kernel.shape[:-1])
    return jax.lax.platform_dependent(x, kernel, cpu=_project_as_matrix, default=_contract)


def _project_as_matrix(x: Array, kernel: Array) -> Array:
    outputs, kernel = kernel.shape[:-1], kernel.reshape(-1, kernel.shape[-1])
    if x.shape[0] > FEW_TOKENS:
        return _contract(x, kernel).reshape(-1, *outputs)
    # XLA:CPU repacks the right operand of a product: with few tokens that costs more than the product itself, so the
    # kernel goes to the left. The barrier keeps XLA from turning the product around again.
    return jax.lax.optimization_barrier(_contract(kernel, x)).T.reshape(-1, *outputs)


def _contract(x: Array, kernel: Array) -> Array:
    return jax.lax.dot_general(
        x,
        kernel,
        (((1,), (kernel.ndim - 1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


class Linear(nnx.Module):
    """kernel [*out, in], in FP8 with kernel_scale beside it, and, if asked for, bias [*out]; maps [tokens, in] to
    [tokens, *out] in x's dtype.

    The input is one axis: a TPU keeps an array in tiles of its last two axes, and to contract over several of a kernel's
    XLA first copies the layer's whole kernel into tiles of another shape.

    On a mesh a device maps its part of the inputs to its part of the outputs; inputs that are split over devices are summed
    over them, in x's dtype.
    """

    def __init__(
        self,
        declare: Declare,
        out_shape: tuple[int, ...],
        in_size: int,
        out_axes: Axes,
        in_axis: str,
        *,
        use_bias: bool = False,
    ) -> None:
        self.kernel, self.kernel_scale = declare.kernel(out_shape, in_size, out_axes, in_axis)
        self.bias = declare(out_shape, out_axes, zeros) if use_bias else None
        (self.summed,) = split_over([in_axis], [in_size], declare.mesh)

    def __call__(self, x: Float[Array, "tokens inputs"]) -> Float[Array, "tokens *outputs"]:
        y = project(x, kernel_value(self.kernel, self.kernel_scale))
        if axes_size(self.summed) > 1:
            y = sum_over(y.astype(x.dtype), self.summed)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class Embedding(nnx.Module):
    """embedding [vocab, embed]: token ids to vectors; the same table is the output kernel of tied models.

    On a mesh a device looks up the ids of its part of the vocabulary, and the vectors are summed.
    """

    def __init__(self, declare: Declare, vocab_size: int, hidden_size: int) -> None:
        self.embedding = declare((vocab_size, hidden_size), ("vocab", "embed"), Normal(hidden_size))

    def __call__(self, tokens: Int[Array, "tokens"]) -> Float[Array, "tokens embed"]:
        table = self.embedding[...]
        if axes_size(TENSOR) == 1:
            return jnp.take(table, tokens, axis=0)
        rows = tokens - axes_rank(TENSOR) * len(table)
        is_own = (rows >= 0) & (rows < len(table))
        x = jnp.take(table, jnp.where(is_own, rows, 0), axis=0)
        return sum_over(jnp.where(is_own[:, None], x, 0), TENSOR)


class RMSNorm(nnx.Module):
    """Root mean square normalisation (arXiv:1910.07467) over the last axis, computed in float32."""

    def __init__(self, declare: Declare, size: int, axis: str, epsilon: float) -> None:
        self.scale = declare((size,), (axis,), ones)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        return (y * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202) with gate and up fused into one projection."""

    def __init__(self, declare: Declare, hidden_size: int, intermediate_size: int, *, use_bias: bool) -> None:
        self.gate_up = Linear(declare, (2, intermediate_size), hidden_size, (None, "mlp"), "embed", use_bias=use_bias)
        self.down = Linear(declare, (hidden_size,), intermediate_size, ("embed",), "mlp", use_bias=use_bias)

    def __call__(self, x: Float[Array, "tokens embed"]) -> Float[Array, "tokens embed"]:
        return self.down(swiglu(self.gate_up(x)).astype(x.dtype))


def swiglu(gate_up: Float[Array, "tokens 2 mlp"]) -> Float[Array, "tokens mlp"]:
    """silu(gate) * up in float32 (arXiv:2002.05202)."""
    gate, up = gate_up[:, 0].astype(jnp.float32), gate_up[:, 1].astype(jnp.float32)
    return jax.nn.silu(gate) * up
