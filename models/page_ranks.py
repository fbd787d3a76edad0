"""Attention over a sequence whose pages are dealt over several devices: each has its own keys' part of the result."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from paxserve.sharding import axes_size, logsumexp_over, sum_scatter

PAGES = ("kv_page",)
"""The mesh axis that pages are dealt over."""


def merge_pages(
    out: Float[Array, "tokens heads dim"], lse: Float[Array, "tokens heads"], shape: tuple[int, ...]
) -> Float[Array, "tokens ..."]:
    """The attention output over all devices' keys, in out's dtype, in a shape of which a device gets its part along axis 1.

    Outputs are weighed by their share of the softmax's denominator, which is known by the log-sum-exp `lse`; a device that
    holds no key of a token has 0 and -inf.
    """
    if axes_size(PAGES) == 1:
        return out.reshape(shape)
    total = logsumexp_over(lse, PAGES)
    share = jnp.exp(lse - jnp.where(jnp.isneginf(total), 0, total))  # [tokens, heads]
    return sum_scatter((out * share[..., None]).astype(out.dtype).reshape(shape), PAGES, 1)
