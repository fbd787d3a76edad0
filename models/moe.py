"""Mixture of experts: a router picks a few experts for each token, and each expert works on its tokens as one group.

No token is dropped and no expert has a capacity: the (token, expert) pairs are sorted by expert, and the groups' sizes
are data, not shapes. What a token gets does not depend on which others, padding among them, are in the step.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from paxserve.models.config import MoEConfig
from paxserve.models.fp8 import BlockScaled, Kernel, kernel_value
from paxserve.models.layers import GatedMLP, project, swiglu
from paxserve.models.params import Declare, Normal, zeros
from paxserve.sharding import MESH_AXES, TENSOR, axes_rank, axes_size, expert_axes, gather, sum_over, sum_scatter

OUT_MAJOR = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)


GROUPS = ("data",)
"""The mesh axis whose devices have different tokens."""


class MoE(nnx.Module):
    """Routed experts, each a GatedMLP, and shared ones that see every token: the sum of what they make of it.

    router [experts, embed] and score_bias [experts], always float32; gate_up [experts, 2, mlp, embed] and down [experts,
    embed, mlp]; `shared`, which alone may have biases, is one GatedMLP of the shared experts' joint width.

    On a mesh the experts are spread over all devices, whole ones as far as they go. Each device works on what its experts get
    of the tokens of all data groups, and what they make of them is summed.

    With layers stacked under a scan, the experts' kernels stay whole, and a call says which layer's are meant: a loop
    inside the scan picks single experts, and a layer's slice of the kernels would be copied for it.
    """

    def __init__(self, declare: Declare, hidden_size: int, moe: MoEConfig, *, shared_bias: bool = False) -> None:
        self.moe = moe
        self.spread, _ = expert_axes(moe.num_experts, declare.mesh)
        experts, width = moe.num_experts, moe.intermediate_size
        in_float32 = dataclasses.replace(declare, dtype=jnp.float32)
        self.router = in_float32((experts, hidden_size), (None, "embed"), Normal(hidden_size))
        self.score_bias = in_float32((experts,), (None,), zeros) if moe.score_bias else None
        self.gate_up, self.gate_up_scale = declare.kernel(
            (experts, 2, width), hidden_size, ("expert", None, "expert_mlp"), "embed"
        )
        self.down, self.down_scale = declare.kernel((experts, hidden_size), width, ("expert", "embed"), "expert_mlp")
        shared = moe.shared_intermediate_size
        self.shared = GatedMLP(declare, hidden_size, shared, use_bias=shared_bias) if shared else None

    def __call__(
        self, x: Float[Array, "tokens embed"], layer: Int[Array, ""] | int = 0
    ) -> Float[Array, "tokens embed"]:
        with jax.named_scope("route"):
            bias = None if self.score_bias is None else self.score_bias[...]
            logits = project(x.astype(jnp.float32), self.router[...])
            experts, weights = route(logits, bias, self.moe)
        with jax.named_scope("experts"):
            gate_up, down = kernel_value(self.gate_up, self.gate_up_scale), kernel_value(self.down, self.down_scale)
            stack = self.gate_up.layers
            if stack is None:
                layer, gate_up, down = 0, gate_up[None], down[None]
            else:
                layer = layer - stack.start
            first = axes_rank(self.spread) * gate_up.shape[1]
            everyones_x, experts, weights = (gather(each, GROUPS, 0) for each in (x, experts, weights))
            y = apply_experts(
                everyones_x, experts - first, weights, layer, gate_up, down, num_experts=self.moe.num_experts
            )
            if axes_size(MESH_AXES) > 1:
                y = sum_over(sum_scatter(y.astype(x.dtype), GROUPS, 0), TENSOR).astype(jnp.float32)
        if self.shared is not None:
            with jax.named_scope("shared_experts"):
                y = y + self.shared(x).astype(jnp.float32)
        return y.astype(x.dtype)


def route(
    logits: Float[Array, "tokens experts"], bias: Float[Array, "experts"] | None, moe: MoEConfig
) -> tuple[Int[Array, "tokens k"], Float[Array, "tokens k"]]:
    """(the experts chosen for each token, best first, as int32; their weights in float32) from float32 logits.

    Scores are a softmax or sigmoid of the logits. Experts are chosen by score plus `bias` (arXiv:2408.15664), only from
    the `top_groups` best groups (arXiv:2405.04434) if there are several; they are weighed by score alone. Of equals the
    lower index is chosen.
    """
    scores = jax.nn.softmax(logits) if moe.scoring == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if moe.top_groups < moe.groups:
        grouped = choice.reshape(len(choice), moe.groups, -1)  # [tokens, groups, experts of a group]
        best, _ = jax.lax.top_k(grouped, 1 if moe.group_score == "max" else 2)
        _, groups = jax.lax.top_k(best.sum(axis=-1), moe.top_groups)  # [tokens, top_groups]
        open_groups = jax.nn.one_hot(groups, moe.groups, dtype=bool).any(axis=1)  # [tokens, groups]
        choice = jnp.where(open_groups[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
    _, experts = jax.lax.top_k(choice, moe.experts_per_token)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if moe.normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return experts, weights * moe.scaling


def apply_experts(
    x: Float[Array, "tokens embed"],
    experts: Int[Array, "tokens k"],
    weights: Float[Array, "tokens k"],
    layer: Int[Array, ""] | int,
    gate_up: Kernel,
    down: Kernel,
    *,
    num_experts: int | None = None,
) -> Float[Array, "tokens embed"]:
    """The weighted sum of what each token's experts in `layer` make of it, in float32.

    gate_up [layers, experts, 2, mlp, embed], down [layers, experts, embed, mlp]: of all experts, or of some of `num_experts`.
    Experts that are not among these add 0.
    """
    is_here = (experts >= 0) & (experts < gate_up.shape[1])
    chosen = jnp.where(is_here, experts, gate_up.shape[1]).reshape(-1)  # [tokens * k]
    order = jnp.argsort(chosen)  # the others' last
    sizes = jnp.bincount(chosen, length=gate_up.shape[1]).astype(jnp.int32)
    args = x, weights.reshape(-1)[order], order, sizes, layer, gate_up, down
    # About an expert's share, for most experts to need one block. A block of 8 rows costs little more than one of 1.
    block = min(max(8, 1 << (len(order) // (num_experts or len(sizes))).bit_length()), 256)
    in_blocks, on_cpu = (functools.partial(grouped_in_blocks, block, sum_at_end=cpu) for cpu in (False, True))
    if isinstance(gate_up, BlockScaled):  # a ragged dot would want all experts dequantised
        return jax.lax.platform_dependent(*args, cpu=on_cpu, default=in_blocks)
    return jax.lax.platform_dependent(*args, cpu=on_cpu, tpu=in_blocks, default=grouped_ragged)


def grouped_ragged(
    x: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens_k"],
    order: Int[Array, "tokens_k"],
    sizes: Int[Array, "experts"],
    layer: Int[Array, ""] | int,
    gate_up: Float[Array, "layers experts 2 mlp embed"],
    down: Float[Array, "layers experts embed mlp"],
) -> Float[Array, "tokens embed"]:
    """The sum of what a layer's experts make of their tokens, in float32.

    order: pairs of a token and an expert, sorted by expert, as token * k + choice. The first sizes[0] are expert 0's, the next
    sizes[1] expert 1's, ...; those after the last expert's add nothing. weights: of the pairs in this order.
    """
    _, experts, _, width, embed = gate_up.shape
    rows = x[order // (len(order) // len(x))]  # [tokens_k, embed]
    gates_ups = _ragged_dot(rows, gate_up[layer].reshape(experts, 2 * width, embed), sizes)
    y = _ragged_dot(swiglu(gates_ups.reshape(-1, 2, width)).astype(x.dtype), down[layer], sizes)
    return sum_pairs(y * weights[:, None], order, sizes, len(x))


def sum_pairs(
    y: Float[Array, "tokens_k embed"], order: Int[Array, "tokens_k"], sizes: Int[Array, "experts"], tokens: int
) -> Float[Array, "tokens embed"]:
    """Each token's sum over its pairs; `order` and `sizes` as in `grouped_ragged`."""
    y = jnp.where((jnp.arange(len(order)) < jnp.sum(sizes))[:, None], y, 0)
    return jnp.sum(y[jnp.argsort(order)].reshape(tokens, -1, y.shape[1]), axis=1)


def _ragged_dot(rows: Array, kernels: Array, sizes: Array) -> Array:
    return jax.lax.ragged_dot_general(
        rows,
        kernels,
        sizes,
        OUT_MAJOR,
        precision=jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def grouped_in_blocks(
    block: int,
    x: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens_k"],
    order: Int[Array, "tokens_k"],
    sizes: Int[Array, "experts"],
    layer: Int[Array, ""] | int,
    gate_up: Kernel,
    down: Kernel,
    *,
    sum_at_end: bool,
) -> Float[Array, "tokens embed"]:
    """As `grouped_ragged`, by a loop over blocks of `block` pairs that have one expert; experts without tokens cost nothing.

    For XLA:CPU, where a ragged dot multiplies every row by every expert, and for TPU, where it copies all kernels to
    have them in-major. A block is added to its tokens' sums at once, so a device that has few of the experts touches its
    own pairs' rows alone; XLA:CPU's scatters are slow, so there blocks are stored, and summed at the end.
    """
    blocks = -(-sizes // block)  # [experts]
    last = jnp.cumsum(blocks)  # [experts], the block after an expert's last
    ends = jnp.cumsum(sizes)  # [experts], the pair after an expert's last
    # Block b of expert e starts at pair shift[e] + b * block.
    shift = ends - sizes - (last - blocks) * block
    tokens = jnp.pad(order // (len(order) // len(x)), (0, block))
    weights = jnp.pad(weights, (0, block))

    def body(index: Array, out: Array) -> Array:
        # The barrier ties the kernels to the iteration: XLA:CPU slices bfloat16 by way of float32 and would convert all
        # experts ahead of the loop.
        index, gate_ups, downs = jax.lax.optimization_barrier((index, gate_up, down))
        expert = jnp.searchsorted(last, index, side="right", method="compare_all")
        start = shift[expert] + index * block
        rows, weight = (jax.lax.dynamic_slice_in_dim(each, start, block) for each in (tokens, weights))
        y = project(swiglu(project(x[rows], gate_ups[layer, expert])).astype(x.dtype), downs[layer, expert])
        y *= weight[:, None]
        if sum_at_end:  # what an expert's last block has of the next one's is overwritten
            return jax.lax.dynamic_update_slice_in_dim(out, y, start, axis=0)
        # What an expert's last block has of the next one's is dropped.
        rows = jnp.where(start + jnp.arange(block) < ends[expert], rows, len(x) + jnp.arange(block))
        return out.at[rows].add(y, mode="drop", unique_indices=True)

    rows = len(tokens) if sum_at_end else len(x)
    out = jax.lax.fori_loop(0, last[-1], body, jnp.zeros((rows, x.shape[1]), jnp.float32))
    return sum_pairs(out[: len(order)], order, sizes, len(x)) if sum_at_end else out
