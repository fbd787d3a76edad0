"""Attention of a step by some of its tokens at a time, where what is made of all of them at once would take much memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from paxserve.models.batch import AttentionBatch

Attend = Callable[..., Shaped[Array, "tokens ..."]]
"""Of some tokens' queries (arrays whose first axis is tokens), with the context_lens and query_starts of these tokens."""


def in_chunks(
    attend: Attend, queries: tuple[Shaped[Array, "tokens ..."], ...], batch: AttentionBatch, size: int
) -> Shaped[Array, "tokens ..."]:
    """What `attend(*queries, context_lens, query_starts)` gives, computed of at most `size` tokens at a time.

    A sequence whose tokens are in several chunks is in each as if its last token there were its last. A decode step, which
    has few tokens, is never cut.
    """
    tokens = len(queries[0])
    chunks = 1 if batch.max_query_len == 1 else -(-tokens // size)
    if chunks == 1:
        return attend(*queries, batch.context_lens, batch.query_starts)
    size = -(-tokens // chunks)

    def cut(x: Array) -> Shaped[Array, "chunks size ..."]:
        return jnp.pad(x, [(0, chunks * size - tokens)] + [(0, 0)] * (x.ndim - 1)).reshape(chunks, size, *x.shape[1:])

    def run(chunk: tuple[Int[Array, ""], tuple[Array, ...]]) -> Array:
        first, part = chunk
        starts = jnp.clip(batch.query_starts - first, 0, size)
        later = batch.query_starts[1:] - first - starts[1:]  # of each sequence's tokens, those after the chunk
        is_here = starts[1:] > starts[:-1]
        return attend(*part, jnp.where(is_here, batch.context_lens - later, 0), starts)

    firsts = jnp.arange(chunks, dtype=batch.query_starts.dtype) * size
    out = jax.lax.map(run, (firsts, tuple(map(cut, queries))))
    return out.reshape(-1, *out.shape[2:])[:tokens]
