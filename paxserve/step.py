"""The one function that runs on the device: a model step with sampling, over fixed shapes."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Num

from paxserve.models.batch import AttentionBatch
from paxserve.sampler import LogprobsBatch, SamplingBatch, logprobs_of, sample


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kv_pages", "history"], meta_fields=[])
@dataclass(frozen=True)
class DeviceState:
    """What stays on the device from step to step and is donated to each.

    history: the tokens of the sequence in each slot, so that a token the host has not seen can be an input, and for the
        penalties. The last slot is for padding.
    """

    kv_pages: Num[Array, "..."]
    history: Int[Array, "slots_plus_1 context"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "slots", "block_tables", "context_lens", "query_starts"],
    meta_fields=[],
)
@dataclass(frozen=True)
class StepInputs:
    """A plan, padded to a bucket; all int32. Sequence s owns tokens query_starts[s] : query_starts[s + 1].

    tokens: token ids; -1 for one that the step before drew and the host has not seen.
    slots: each sequence's row in the history.
    context_lens: tokens of each sequence, this step's included; 0 for padding.
    """

    tokens: Int[Array, "tokens"]
    slots: Int[Array, "seqs"]
    block_tables: Int[Array, "seqs pages_per_seq"]
    context_lens: Int[Array, "seqs"]
    query_starts: Int[Array, "seqs_plus_1"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tokens", "logprobs", "hidden"], meta_fields=[])
@dataclass(frozen=True)
class StepOutputs:
    """Per sequence the drawn token (meaningless in the middle of a prefill) and its logprobs; hidden states per token."""

    tokens: Int[Array, "seqs"]
    logprobs: LogprobsBatch
    hidden: Float[Array, "tokens embed"]


@dataclass(frozen=True)
class StepSpec:
    """The static side of a step: the model's graph and what the compiled program depends on."""

    graph: nnx.GraphDef
    params_tree: jax.tree_util.PyTreeDef
    num_pages: int
    page_size: int
    attention: str | None


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
    model = _model(spec, params)
    rows, positions, valid = _locate_tokens(inputs)
    slots = jnp.where(valid, inputs.slots[rows], state.history.shape[0] - 1)  # [tokens]
    tokens = jnp.where(inputs.tokens < 0, state.history[slots, positions], inputs.tokens)
    history = state.history.at[slots, positions].set(tokens)

    batch = AttentionBatch(
        positions=positions,
        token_pages=jnp.where(valid, inputs.block_tables[rows, positions // spec.page_size], 0),
        token_offsets=positions % spec.page_size,
        block_tables=inputs.block_tables,
        context_lens=inputs.context_lens,
        query_starts=inputs.query_starts,
        num_pages=spec.num_pages,
        max_query_len=1 if decode else None,
        attention=spec.attention,
    )
    hidden, kv_pages = model(tokens, state.kv_pages, batch)

    last = jnp.maximum(inputs.query_starts[1:] - 1, 0)
    logits = model.logits(hidden[last])  # [seqs, vocab]
    with jax.named_scope("sample"):
        drawn, logprobs = sample(logits, sampling, history, inputs.slots, inputs.context_lens)
    # In the middle of a prefill this leaves a token that the next chunk's first one replaces.
    history = history.at[inputs.slots, inputs.context_lens].set(drawn)
    return DeviceState(kv_pages, history), StepOutputs(drawn, logprobs, hidden)


def prompt_logprobs(
    spec: StepSpec, params: tuple[Array, ...], hidden: Float[Array, "rows embed"], targets: Int[Array, "rows"]
) -> LogprobsBatch:
    """Logprobs of given next tokens, from the hidden states of the tokens before them."""
    return logprobs_of(_model(spec, params).logits(hidden), targets)


def _model(spec: StepSpec, params: tuple[Array, ...]) -> Any:
    return nnx.merge(spec.graph, jax.tree.unflatten(spec.params_tree, params))


def _locate_tokens(inputs: StepInputs) -> tuple[Int[Array, "tokens"], Int[Array, "tokens"], Array]:
    """Each token's sequence, its position, and whether it is one (padding gets sequence and position 0)."""
    indices = jnp.arange(inputs.tokens.shape[0], dtype=jnp.int32)
    starts = inputs.query_starts
    valid = indices < starts[-1]
    rows = jnp.searchsorted(starts[1:], indices, side="right").astype(jnp.int32)
    rows = jnp.where(valid, rows, 0)
    positions = inputs.context_lens[rows] - starts[rows + 1] + indices
    return rows, jnp.where(valid, positions, 0), valid
