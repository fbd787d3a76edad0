"""The public entry to paged attention: checks the arguments and picks an implementation."""

import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from paxserve.pallas_kernels.layout import Scale, page_size_of

IMPLEMENTATIONS = ("reference", "xla", "numba_cpu")
"""The modules with implementations; each is imported when it is used."""


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    kv_pages: Num[Array, "pages kv_heads slots width"],
    block_tables: Int[Array, "seqs max_pages"],
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    *,
    scale: float,
    window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    max_query_len: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """Causal attention of ragged queries over paged KV, after FlashAttention's block-table interface.

    Sequence `s` owns query tokens `query_starts[s]:query_starts[s + 1]`; the last of them is at position
    `context_lens[s] - 1`, and its KV is already in the pages. Logits are `scale * q @ k`, then
    `soft_cap * tanh(logits / soft_cap)`. A token at position `p` sees keys `p - window < key <= p`; `window` may be
    traced. `sinks` adds one logit per query head to the softmax's denominator, as in gpt-oss. `k_scale` and `v_scale`
    multiply what quantised pages hold. Tokens past `query_starts[-1]` and tokens of sequences with context 0 are
    padding. Block-table entries past a sequence's context, and the slots past it, may hold anything, NaN included.

    `max_query_len` is a static bound on the query tokens per sequence; 1 promises a decode step.
    `implementation` is one of IMPLEMENTATIONS, or None for the default backend's own.

    Returns the output in q's dtype and the float32 log-sum-exp of the logits (sinks included), by which outputs over
    disjoint keys can be merged. Padding tokens get 0 and -inf.

    Raises ValueError for shapes that disagree, an option out of range, or an unknown implementation.
    """
    if q.ndim != 3 or kv_pages.ndim != 4 or block_tables.ndim != 2:
        raise ValueError(
            "expected q [tokens, heads, head_dim], kv_pages of 4 axes (see layout.py) and "
            f"block_tables [seqs, max_pages], got {q.shape}, {kv_pages.shape} and {block_tables.shape}"
        )
    _, heads, head_dim = q.shape
    kv_heads, seqs = kv_pages.shape[1], block_tables.shape[0]
    page_size_of(kv_pages, head_dim)
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} kv heads")
    if context_lens.shape != (seqs,) or query_starts.shape != (seqs + 1,):
        raise ValueError(
            f"{seqs} block tables need context_lens [{seqs}] and query_starts [{seqs + 1}], "
            f"got {context_lens.shape} and {query_starts.shape}"
        )
    if isinstance(window, int) and window < 1:
        raise ValueError(f"window must be at least 1, got {window}; pass None for no window")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap must be positive, got {soft_cap}; pass None for no cap")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must have one logit per query head [{heads}], got {sinks.shape}")
    if max_query_len is not None and max_query_len < 1:
        raise ValueError(f"max_query_len must be at least 1, got {max_query_len}; pass None if it is not known")
    if kv_pages.dtype == jnp.int8 and (k_scale is None or v_scale is None):
        raise ValueError("int8 pages need k_scale and v_scale")
    chosen = choose_implementation(implementation, jax.default_backend(), q.dtype, kv_pages.dtype)
    return _module(chosen).paged_attention(
        q,
        kv_pages,
        block_tables,
        context_lens,
        query_starts,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        max_query_len=max_query_len,
    )


def choose_implementation(implementation: str | None, platform: str, *dtypes: jax.typing.DTypeLike) -> str:
    """The implementation in effect on a platform for queries and pages of these dtypes.

    None is "numba_cpu" on CPU where Numba is installed (the extra "cpu") and reads the dtypes, and "xla" elsewhere. Raises
    ValueError for an unknown implementation, and NotImplementedError, saying why, for one that cannot do what is asked.
    """
    if implementation is None:
        return "xla" if _why_not_numba_cpu(platform, *dtypes) else "numba_cpu"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown attention implementation {implementation!r}; there are {sorted(IMPLEMENTATIONS)}")
    if implementation == "numba_cpu" and (reason := _why_not_numba_cpu(platform, *dtypes)):
        raise NotImplementedError(f"attention implementation 'numba_cpu' is not available: {reason}")
    return implementation


def _why_not_numba_cpu(platform: str, *dtypes: jax.typing.DTypeLike) -> str | None:
    if platform != "cpu":
        return f"it runs on CPU, not on {platform}"
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed (pip install 'paxserve[cpu]')"
    for dtype in dtypes:
        if jnp.dtype(dtype).name not in _module("numba_cpu").DTYPES:
            return f"it does not read {jnp.dtype(dtype).name}"
    return None


def _module(implementation: str) -> Any:
    return importlib.import_module(f"paxserve.pallas_kernels.{implementation}")
