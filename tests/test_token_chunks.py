"""Latent attention by some of a step's tokens at a time is that of all at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxserve.models.batch import AttentionBatch
from paxserve.models.token_chunks import in_chunks
from paxserve.pallas_kernels import mla_paged_attention

HEADS, RANK, ROPE, PAGE, PAGES = 2, 8, 4, 4, 32
QUERY_LENS, CONTEXTS = [1, 7, 1, 4, 0], [9, 20, 1, 4, 0]
TOKENS = 16  # three of them padding


def batch(max_query_len=None):
    tables = np.random.default_rng(0).permutation(np.arange(1, PAGES))[:25].reshape(5, 5)
    starts = np.cumsum([0, *QUERY_LENS])
    ints = [np.zeros(TOKENS), np.zeros(TOKENS), np.zeros(TOKENS), tables, CONTEXTS, starts]
    return AttentionBatch(*(jnp.asarray(x, jnp.int32) for x in ints), PAGES, max_query_len=max_query_len)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 15, 16, 100])
def test_chunks_are_the_whole(size):
    rng = np.random.default_rng(1)
    q_latent, q_rope, pages = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((TOKENS, HEADS, RANK), (TOKENS, HEADS, ROPE), (PAGES, PAGE, RANK + ROPE))
    )
    made = []

    def attend(q_latent, q_rope, context_lens, query_starts, schedule=None):
        made.append(len(q_latent))
        tables = batch().block_tables
        args = q_latent, q_rope, pages, tables, context_lens, query_starts
        return mla_paged_attention(*args, scale=0.3, implementation="reference")[0]

    expected = attend(q_latent, q_rope, batch().context_lens, batch().query_starts)
    found = jax.jit(lambda *queries: in_chunks(attend, queries, batch(), size))(q_latent, q_rope)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert max(made[1:]) <= size


def test_a_decode_step_is_not_cut():
    whole = in_chunks(
        lambda x, context_lens, query_starts, schedule: x, (jnp.arange(TOKENS),), batch(max_query_len=1), 1
    )
    np.testing.assert_array_equal(whole, np.arange(TOKENS))
