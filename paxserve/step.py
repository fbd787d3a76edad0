"""The one function that runs on the device: a model step with sampling, over fixed shapes."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Num

from paxserve.models.batch import AttentionBatch
from paxserve.models.page_ranks import PAGES
from paxserve.pallas_kernels import copy_pages
from paxserve.sampler import LogprobsBatch, SamplingBatch, logprobs_of, sample
from paxserve.sharding import TENSOR, axes_rank, axes_size, exchange, gather


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kv_pages", "history"], meta_fields=[])
@dataclass(frozen=True)
class DeviceState:
    """What stays on the devices from step to step and is donated to each.

    kv_pages: every device's pages of all layers, one after the other along the first axis.
    history: the tokens of the sequence in each slot, so that a token the host has not seen can be an input, and for the
        penalties. The last slot is for padding.
    """

    kv_pages: Num[Array, "..."]
    history: Int[Array, "data slots_plus_1 context"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "slots", "block_tables", "page_offset", "context_lens", "query_starts"],
    meta_fields=[],
)
@dataclass(frozen=True)
class StepInputs:
    """The data groups' plans, padded to one bucket; all int32. Sequence s owns tokens query_starts[s] : query_starts[s + 1].

    The first axis is the data group's. Within `step` a device has its own group's and its own pages' parts, without the axes
    that name them.

    tokens: token ids; -1 for one that the step before drew and the host has not seen.
    slots: each sequence's row in the history.
    block_tables: of each of the devices that a sequence's pages are dealt to, its pages of the sequence in order.
    page_offset: the number in its sequence of the first of them.
    context_lens: tokens of each sequence, this step's included; 0 for padding.
    """

    tokens: Int[Array, "data tokens"]
    slots: Int[Array, "data seqs"]
    block_tables: Int[Array, "data kv_page seqs entries"]
    page_offset: Int[Array, "data kv_page seqs"]
    context_lens: Int[Array, "data seqs"]
    query_starts: Int[Array, "data seqs_plus_1"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tokens", "logprobs", "hidden"], meta_fields=[])
@dataclass(frozen=True)
class StepOutputs:
    """Per sequence the drawn token (meaningless in the middle of a prefill) and its logprobs; hidden states per token.

    The first axis of every array is the data group's.
    """

    tokens: Int[Array, "data seqs"]
    logprobs: LogprobsBatch
    hidden: Float[Array, "data tokens embed"]


@dataclass(frozen=True)
class StepSpec:
    """The static side of a step: the model's graph and what the compiled program depends on.

    mesh, params: the devices and how the parameters lie on them.
    num_pages: of a device, per layer.
    pages: how the pages array lies on the devices.
    """

    graph: nnx.GraphDef
    params_tree: jax.tree_util.PyTreeDef
    mesh: Mesh
    params: tuple[PartitionSpec, ...]
    pages: PartitionSpec
    num_pages: int
    page_size: int
    attention: str | None

    @property
    def state(self) -> DeviceState:
        """How the state lies on the devices."""
        return DeviceState(self.pages, GROUP)  # type: ignore[arg-type]


EVERYWHERE, GROUP, GROUP_AND_PAGES = PartitionSpec(), PartitionSpec("data"), PartitionSpec("data", "kv_page")

INPUTS: Any = StepInputs(GROUP, GROUP, GROUP_AND_PAGES, GROUP_AND_PAGES, GROUP, GROUP)  # type: ignore[arg-type]
OUTPUTS: Any = StepOutputs(EVERYWHERE, EVERYWHERE, GROUP)  # type: ignore[arg-type]
"""How a step's inputs and outputs lie on the devices."""


def step(
    spec: StepSpec,
    decode: bool,
    params: tuple[Array, ...],
    state: DeviceState,
    inputs: StepInputs,
    sampling: SamplingBatch,
) -> tuple[DeviceState, StepOutputs]:
    """Writes the tokens' KV, attends, and draws the token after each sequence's last one.

    `params` are the leaves of the model's state (a flat tuple costs little to pass). With `decode` every sequence has at
    most one token, sequence s's at index s.
    """
    specs = spec.params, spec.state, INPUTS, GROUP
    mapped = _on_devices(spec, functools.partial(_device_step, spec, decode), specs, (spec.state, OUTPUTS))
    return mapped(params, state, inputs, sampling)


def _on_devices(spec: StepSpec, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function`, which is of one device's parts of arrays, as one of the whole arrays."""
    device = spec.mesh.devices.flat[0]
    if spec.mesh.size == 1 and device.platform == "cpu":
        return function  # the same, and XLA:CPU's code for it is faster by a sixth
    return jax.shard_map(function, mesh=spec.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _device_step(
    spec: StepSpec,
    decode: bool,
    params: tuple[Array, ...],
    state: DeviceState,
    inputs: StepInputs,
    sampling: SamplingBatch,
) -> tuple[DeviceState, StepOutputs]:
    """What one device does of a step."""
    model = _model(spec, params)
    own_group = functools.partial(jax.tree.map, lambda array: array[0])
    inputs, sampling, history = own_group(inputs), own_group(sampling), state.history[0]
    offset, stride = inputs.page_offset[0], axes_size(PAGES)

    rows, positions, valid = _locate_tokens(inputs)
    slots = jnp.where(valid, inputs.slots[rows], history.shape[0] - 1)  # [tokens]
    tokens = jnp.where(inputs.tokens < 0, history[slots, positions], inputs.tokens)
    history = history.at[slots, positions].set(tokens)

    page = positions // spec.page_size - offset[rows]
    is_own = valid & (page >= 0) & (page % stride == 0)
    batch = AttentionBatch(
        positions=positions,
        token_pages=jnp.where(is_own, inputs.block_tables[0, rows, page // stride], 0),
        token_offsets=positions % spec.page_size,
        block_tables=inputs.block_tables[0],
        context_lens=inputs.context_lens,
        query_starts=inputs.query_starts,
        page_offset=offset,
        num_pages=spec.num_pages,
        page_stride=stride,
        max_query_len=1 if decode else None,
        attention=spec.attention,
    )
    hidden, kv_pages = model(tokens, state.kv_pages, batch)

    last = jnp.maximum(inputs.query_starts[1:] - 1, 0)
    logits = model.logits(hidden[last])  # [seqs, this device's part of the vocabulary]
    with jax.named_scope("sample"):
        drawn, logprobs = _sample(logits, sampling, history, inputs.slots, inputs.context_lens)
    # In the middle of a prefill this leaves a token that the next chunk's first one replaces.
    history = history.at[inputs.slots, inputs.context_lens].set(drawn)
    # Every host is told every group's tokens.
    tokens, logprobs = jax.tree.map(lambda array: gather(array[None], ("data",), 0), (drawn, logprobs))
    return DeviceState(kv_pages, history[None]), StepOutputs(tokens, logprobs, hidden[None])


def _sample(
    logits: Float[Array, "seqs part_of_vocab"],
    sampling: SamplingBatch,
    history: Int[Array, "slots context"],
    slots: Int[Array, "seqs"],
    context_lens: Int[Array, "seqs"],
) -> tuple[Int[Array, "seqs"], LogprobsBatch]:
    """`sample`, each of a group's devices drawing for some of the sequences: logits of all the vocabulary go to it."""
    if (parts := axes_size(TENSOR)) == 1:
        return sample(logits, sampling, history, slots, context_lens)
    seqs = len(slots)
    share = -(-seqs // parts)
    start = axes_rank(TENSOR) * share

    def own(x: Array) -> Array:
        """This device's sequences; where they do not divide evenly, the last one over again."""
        return x[jnp.minimum(start + jnp.arange(share), seqs - 1)]

    logits = jnp.pad(logits, ((0, parts * share - seqs), (0, 0)))
    logits = exchange(logits, TENSOR, split=0, concat=1)  # [share, vocab]
    drawn = sample(logits, jax.tree.map(own, sampling), history, own(slots), own(context_lens))
    return jax.tree.map(lambda x: gather(x, TENSOR, 0)[:seqs], drawn)


def prompt_logprobs(
    spec: StepSpec, params: tuple[Array, ...], hidden: Float[Array, "rows embed"], targets: Int[Array, "rows"]
) -> LogprobsBatch:
    """Logprobs of given next tokens, from the hidden states of the tokens before them."""

    def on_device(params: tuple[Array, ...], hidden: Array, targets: Array) -> LogprobsBatch:
        return logprobs_of(gather(_model(spec, params).logits(hidden), TENSOR, 1), targets)

    specs = spec.params, EVERYWHERE, EVERYWHERE
    return _on_devices(spec, on_device, specs, EVERYWHERE)(params, hidden, targets)


def copy_in_groups(
    spec: StepSpec, num_layers: int, state: DeviceState, src: Int[Array, "data kv_page copies"], dst: Int[Array, "..."]
) -> DeviceState:
    """Copies pages, each device its own."""

    def on_device(kv_pages: Array, src: Array, dst: Array) -> Array:
        return copy_pages(kv_pages, src[0, 0], dst[0, 0], num_layers=num_layers)

    specs = spec.pages, GROUP_AND_PAGES, GROUP_AND_PAGES
    return replace(state, kv_pages=_on_devices(spec, on_device, specs, spec.pages)(state.kv_pages, src, dst))


def _model(spec: StepSpec, params: tuple[Array, ...]) -> Any:
    return nnx.merge(spec.graph, jax.tree.unflatten(spec.params_tree, params))


def _locate_tokens(inputs: StepInputs) -> tuple[Int[Array, "tokens"], Int[Array, "tokens"], Array]:
    """Each token's sequence, its position, and whether it is one (padding gets sequence and position 0)."""
    indices = jnp.arange(inputs.tokens.shape[0], dtype=jnp.int32)
    starts = inputs.query_starts
    valid = indices < starts[-1]
    rows = jnp.searchsorted(starts[1:], indices, side="right", method="compare_all").astype(jnp.int32)
    rows = jnp.where(valid, rows, 0)
    positions = inputs.context_lens[rows] - starts[rows + 1] + indices
    return rows, jnp.where(valid, positions, 0), valid
