"""Drawing tokens on the device: penalties, temperature, truncation, logprobs. Rows do not influence each other.

A feature that no row of a step uses is skipped at run time (`lax.cond`), so one program serves every mix; a row that does
not use it gives the same numbers whether or not it ran.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num, UInt32

from paxserve.pallas_kernels.target import target
from paxserve.sampling_params import MAX_LOGPROBS

ARGMAX_BLOCKS = 64


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seeds",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "prompt_lens",
        "bias_ids",
        "bias_values",
        "wants_logprobs",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class SamplingBatch:
    """Per row of a step: `SamplingParams` as arrays; every field but those explained here carries its meaning over.

    seeds: the two halves of each row's 64-bit seed.
    prompt_lens: tokens of the prompt, to tell prompt from output in the penalties.
    bias_ids, bias_values: added to the logits; padding ids are out of the vocabulary.
    """

    temperature: Float[Array, "seqs"]
    top_k: Int[Array, "seqs"]
    top_p: Float[Array, "seqs"]
    min_p: Float[Array, "seqs"]
    seeds: UInt32[Array, "seqs 2"]
    presence_penalty: Float[Array, "seqs"]
    frequency_penalty: Float[Array, "seqs"]
    repetition_penalty: Float[Array, "seqs"]
    prompt_lens: Int[Array, "seqs"]
    bias_ids: Int[Array, "seqs biases"]
    bias_values: Float[Array, "seqs biases"]
    wants_logprobs: Bool[Array, "seqs"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["top_ids", "top_logprobs", "token_logprobs", "token_ranks"],
    meta_fields=[],
)
@dataclass(frozen=True)
class LogprobsBatch:
    """Per row: the MAX_LOGPROBS most likely tokens, and the logprob and rank (from 1) of the row's own token."""

    top_ids: Int[Array, "rows top"]
    top_logprobs: Float[Array, "rows top"]
    token_logprobs: Float[Array, "rows"]
    token_ranks: Int[Array, "rows"]


def sample(
    logits: Float[Array, "seqs vocab"],
    batch: SamplingBatch,
    history: Int[Array, "slots context"],
    slots: Int[Array, "seqs"],
    context_lens: Int[Array, "seqs"],
) -> tuple[Int[Array, "seqs"], LogprobsBatch]:
    """One token per row from float32 logits, and logprobs of the unmodified logits (zeros where no row wants any).

    history[slots]: the tokens of each row's sequence, of which the first context_lens count. The drawn token takes position
    context_lens; draws are keyed by (seed, position) alone.
    """
    modified = jnp.any(batch.bias_ids < logits.shape[-1]) | jnp.any(_is_penalised(batch))
    # A condition copies what it returns, and what does not lie row by row: on CPU logits of few rows lie token by token
    # (see `project`). So where all is greedy it takes them as they lie, and returns tokens.
    by_token = logits.T
    tokens = jax.lax.cond(
        modified | jnp.any(batch.temperature > 0),
        lambda: _draw_modified(by_token.T, batch, history, slots, context_lens, modified),
        lambda: _argmax(by_token),
    )
    return tokens, jax.lax.cond(
        jnp.any(batch.wants_logprobs), logprobs_of, lambda logits, tokens: _no_logprobs(tokens), logits, tokens
    )


def _draw_modified(
    logits: Float[Array, "seqs vocab"],
    batch: SamplingBatch,
    history: Int[Array, "slots context"],
    slots: Int[Array, "seqs"],
    context_lens: Int[Array, "seqs"],
    modified: Bool[Array, ""],
) -> Int[Array, "seqs"]:
    logits = jax.lax.cond(
        modified, lambda: _penalise(_add_bias(logits, batch), batch, history[slots], context_lens), lambda: logits
    )
    greedy = _argmax(logits.T)
    return jax.lax.cond(
        jnp.any(batch.temperature > 0),
        lambda: jnp.where(batch.temperature > 0, _draw(logits, batch, context_lens), greedy),
        lambda: greedy,
    )


def _argmax(by_token: Float[Array, "vocab seqs"]) -> Int[Array, "seqs"]:
    """The first of each column's largest. XLA:CPU is fast at plain maxima of blocks, slow at an argmax of everything."""
    vocab, seqs = by_token.shape
    blocks = by_token.reshape(math.gcd(vocab, ARGMAX_BLOCKS), -1, seqs)  # [blocks, ids, seqs]
    block = jnp.argmax(jnp.max(blocks, axis=1), axis=0)
    within = jnp.take_along_axis(blocks, block[None, None], axis=0)[0]  # [ids, seqs]
    return (block * blocks.shape[1] + jnp.argmax(within, axis=0)).astype(jnp.int32)


def logprobs_of(logits: Float[Array, "rows vocab"], tokens: Int[Array, "rows"]) -> LogprobsBatch:
    """Log-probabilities of the given tokens and of the most likely ones."""
    top = min(MAX_LOGPROBS, logits.shape[-1])
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top_logprobs, top_ids = jax.lax.top_k(logprobs, top)
    token_logprobs = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)
    ranks = 1 + jnp.sum(logprobs > token_logprobs, axis=-1, dtype=jnp.int32)
    missing = ((0, 0), (0, MAX_LOGPROBS - top))
    return LogprobsBatch(
        jnp.pad(top_ids.astype(jnp.int32), missing, constant_values=-1),
        jnp.pad(top_logprobs, missing, constant_values=-jnp.inf),
        token_logprobs[:, 0],
        ranks,
    )


def _no_logprobs(tokens: Int[Array, "rows"]) -> LogprobsBatch:
    rows = tokens.shape[0]
    return LogprobsBatch(
        jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((rows, MAX_LOGPROBS), jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(rows, jnp.int32),
    )


def _add_bias(logits: Float[Array, "seqs vocab"], batch: SamplingBatch) -> Float[Array, "seqs vocab"]:
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, batch.bias_ids].add(batch.bias_values, mode="drop")


def _is_penalised(batch: SamplingBatch) -> Bool[Array, "seqs"]:
    return (batch.presence_penalty != 0) | (batch.frequency_penalty != 0) | (batch.repetition_penalty != 1)


def _penalise(
    logits: Float[Array, "seqs vocab"],
    batch: SamplingBatch,
    history: Int[Array, "seqs context"],
    context_lens: Int[Array, "seqs"],
) -> Float[Array, "seqs vocab"]:
    rows = jnp.arange(logits.shape[0])[:, None]
    positions = jnp.arange(history.shape[1])[None]
    known = positions < context_lens[:, None]
    generated = known & (positions >= batch.prompt_lens[:, None])
    counts = jnp.zeros(logits.shape, jnp.float32).at[rows, history].add(generated)
    seen = jnp.zeros(logits.shape, bool).at[rows, history].max(known)

    repetition = jnp.where(seen, batch.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    return logits - batch.frequency_penalty[:, None] * counts - batch.presence_penalty[:, None] * (counts > 0)


def _draw(
    logits: Float[Array, "seqs vocab"], batch: SamplingBatch, positions: Int[Array, "seqs"]
) -> Int[Array, "seqs"]:
    """Temperature, min-p, top-k and top-p in this order (vLLM's), then the Gumbel-max trick."""
    below_max = logits - jnp.max(logits, axis=-1, keepdims=True)  # 0 at the top: no temperature makes it overflow
    scaled = below_max / jnp.where(batch.temperature > 0, batch.temperature, 1.0)[:, None]
    kept = scaled >= jnp.log(batch.min_p)[:, None]
    kept = jax.lax.cond(
        jnp.any(batch.top_k > 0),
        lambda: kept & _within_top_k(jnp.where(kept, scaled, -jnp.inf), batch.top_k),
        lambda: kept,
    )
    kept = jax.lax.cond(
        jnp.any(batch.top_p < 1),
        lambda: kept & _within_top_p(jnp.where(kept, scaled, -jnp.inf), batch.top_p),
        lambda: kept,
    )
    noise = jax.vmap(functools.partial(_gumbel, size=logits.shape[-1]))(batch.seeds, positions)
    return jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf), axis=-1).astype(jnp.int32)


def _gumbel(seed: UInt32[Array, "2"], position: Int[Array, ""], size: int) -> Float[Array, "size"]:
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (size,), jnp.float32)


def _within_top_k(logits: Float[Array, "seqs vocab"], k: Int[Array, "seqs"]) -> Bool[Array, "seqs vocab"]:
    """Logits not below the k-th largest; k = 0 keeps all."""
    return _at_least_largest(logits, lambda above: jnp.sum(above, axis=-1), k) | (k == 0)[:, None]


def _within_top_p(logits: Float[Array, "seqs vocab"], p: Float[Array, "seqs"]) -> Bool[Array, "seqs vocab"]:
    """The most likely tokens up to and including the one with which their probability reaches p; p = 1 keeps all."""
    probs = jax.nn.softmax(logits, axis=-1)
    return _at_least_largest(logits, lambda above: jnp.sum(probs, axis=-1, where=above), p) | (p >= 1)[:, None]


def _at_least_largest(
    logits: Float[Array, "seqs vocab"],
    measure: Callable[[Bool[Array, "seqs vocab"]], Num[Array, "seqs"]],
    enough: Num[Array, "seqs"],
) -> Bool[Array, "seqs vocab"]:
    """logits >= t for the largest t per row with `measure(logits >= t) >= enough`; all if there is none.

    The float32 numbers in their order, as integers: of `t` some bits are found per pass, the highest first. Exact, without
    sorting the vocabulary.
    """
    bits = _bits_per_pass()
    digits = jnp.arange(1, 2**bits, dtype=jnp.uint32)[:, None]

    def narrow(number: Array, found: UInt32[Array, "seqs"]) -> UInt32[Array, "seqs"]:
        unit = jnp.uint32(1) << (32 - bits * (number.astype(jnp.uint32) + 1))
        thresholds = _nth_float(found + digits * unit)
        measured = jnp.stack([measure(logits >= t[:, None]) for t in thresholds])
        return found + unit * jnp.sum(measured >= enough, axis=0, dtype=jnp.uint32)

    found = jax.lax.fori_loop(0, 32 // bits, narrow, jnp.zeros(len(logits), jnp.uint32))
    return logits >= _nth_float(found)[:, None]


def _bits_per_pass() -> int:
    """XLA computes the sums of several thresholds in one pass over memory, but for CPUs."""
    return 1 if target().platform == "cpu" else 4


def _nth_float(n: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The float32 numbers in their order, but for NaNs: -inf is the first."""
    least = jnp.uint32(0x007FFFFF)
    signed = jax.lax.bitcast_convert_type(jnp.maximum(n, least) ^ jnp.uint32(1 << 31), jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.where(signed < 0, signed ^ jnp.int32(0x7FFFFFFF), signed), jnp.float32)
