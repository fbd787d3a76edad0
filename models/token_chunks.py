"""Attention of a step by some of its tokens at a time, where what is made of all of them at once would take much memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from paxserve.models.batch import AttentionBatch

Attend = Callable[..., Shaped[Array, "tokens ..."]]
"""Of some tokens' queries (arrays whose first axis is tokens), with their context_lens, query_starts and schedule."""


def cut(
    batch: AttentionBatch, tokens: int, most: int
) -> tuple[int, Int[Array, "*chunks seqs"], Int[Array, "*chunks seqs_plus_1"]]:
    """(tokens of a chunk, at most `most`; context_lens; query_starts of each chunk of a step, without the axis if it is one).

    A sequence whose tokens are in several chunks is in each as if its last token there were its last. A decode step, which
    has few tokens, is never cut.
    """
    chunks = 1 if batch.max_query_len == 1 else -(-tokens // most)
    size = -(-tokens // chunks)
    if chunks == 1:
        return size, batch.context_lens, batch.query_starts
    first = jnp.arange(chunks, dtype=batch.query_starts.dtype)[:, None] * size
    starts = jnp.clip(batch.query_starts - first, 0, size)
    later = batch.query_starts[1:] - first - starts[:, 1:]  # of each sequence's tokens, those after the chunk
    is_here = starts[:, 1:] > starts[:, :-1]
    return size, jnp.where(is_here, batch.context_lens - later, 0), starts


def in_chunks(
    attend: Attend, queries: tuple[Shaped[Array, "tokens ..."], ...], batch: AttentionBatch, most: int
) -> Shaped[Array, "tokens ..."]:
    """What `attend(*queries, context_lens, query_starts, schedule)` gives of a step, computed by `cut`'s chunks.

    `batch.schedule` is made of the same, with the same first axis.
    """
    tokens = len(queries[0])
    size, *lens = cut(batch, tokens, most)
    if size == tokens:
        return attend(*queries, *lens, batch.schedule)

    def in_parts(x: Array) -> Shaped[Array, "chunks size ..."]:
        chunks = len(lens[0])
        return jnp.pad(x, [(0, chunks * size - tokens)] + [(0, 0)] * (x.ndim - 1)).reshape(chunks, size, *x.shape[1:])

    def run(chunk: tuple[list[Array], list[Array], Any]) -> Array:
        parts, lens, schedule = chunk
        return attend(*parts, *lens, schedule)

    out = jax.lax.map(run, ([in_parts(x) for x in queries], lens, batch.schedule))
    return out.reshape(-1, *out.shape[2:])[:tokens]
