"""The public entry to paged attention and to writing pages: checks the arguments and picks an implementation."""

import functools
import importlib
import importlib.util
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice
from jaxtyping import Array, Float, Int, Num

from paxserve.pallas_kernels.layout import GQASizes, MLASizes, Scale, Sizes, latent_page_size, page_size_of
from paxserve.pallas_kernels.target import target

logger = logging.getLogger(__name__)

IMPLEMENTATIONS = ("reference", "xla", "numba_cpu", "mosaic_tpu", "mosaic_gpu")
"""The modules with implementations; each is imported when it is used."""

SCHEDULED = ("mosaic_tpu",)
"""Those that make a schedule of a batch, which the layers of a step can share."""

PLATFORMS_OWN = {"cpu": "numba_cpu", "tpu": "mosaic_tpu", "gpu": "mosaic_gpu"}
"""Those written for one platform. Their modules say by `why_not` what they cannot do."""


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
    page_stride: int = 1,
    page_offset: Int[Array, "seqs"] | None = None,
    schedule: Any = None,
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
    `page_stride` and `page_offset` are for sequences whose pages are dealt over several devices: entry `i` of a sequence's
    block table is its page `page_offset + i * page_stride`, with 0 <= page_offset < page_stride (None: all 0), and
    attention is over the keys in these pages alone. A token that sees none of them gets what padding gets.
    `schedule` is what `schedule_attention` makes of the same batch and options; None makes it anew.
    `implementation` is one of IMPLEMENTATIONS, or None for its target's own (see target.py).

    Returns the output in q's dtype and the float32 log-sum-exp of the logits (sinks included), by which outputs over
    disjoint keys can be merged. Padding tokens get 0 and -inf.

    Raises ValueError for shapes that disagree, an option out of range, an unknown implementation, or sinks with a
    page_stride above 1, since every device would count them; NotImplementedError for an implementation that does not run
    here or does not read the dtypes.
    """
    if q.ndim != 3 or kv_pages.ndim != 4 or block_tables.ndim != 2:
        raise ValueError(
            "expected q [tokens, heads, head_dim], kv_pages of 4 axes (see layout.py) and "
            f"block_tables [seqs, max_pages], got {q.shape}, {kv_pages.shape} and {block_tables.shape}"
        )
    _, heads, head_dim = q.shape
    kv_heads, seqs = kv_pages.shape[1], block_tables.shape[0]
    page_size = page_size_of(kv_pages, head_dim)
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} kv heads")
    _check_batch(seqs, context_lens, query_starts, soft_cap, max_query_len, page_stride, page_offset)
    if sinks is not None and page_stride > 1:
        raise ValueError(f"sinks cannot be counted with page_stride={page_stride}: add them to the merged output")
    if isinstance(window, int) and window < 1:
        raise ValueError(f"window must be at least 1, got {window}; pass None for no window")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must have one logit per query head [{heads}], got {sinks.shape}")
    if kv_pages.dtype == jnp.int8 and (k_scale is None or v_scale is None):
        raise ValueError("int8 pages need k_scale and v_scale")
    sizes = GQASizes(heads, kv_heads, head_dim, page_size)
    chosen = choose_implementation(implementation, target(), q.dtype, kv_pages.dtype, sizes=sizes)
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
        page_stride=page_stride,
        page_offset=page_offset,
        **_given(schedule, chosen),
    )


def mla_paged_attention(
    q_latent: Float[Array, "tokens heads kv_lora_rank"],
    q_rope: Float[Array, "tokens heads qk_rope_head_dim"],
    latent_pages: Num[Array, "pages *slots width"],
    block_tables: Int[Array, "seqs max_pages"],
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    *,
    scale: float,
    soft_cap: float | None = None,
    k_scale: Scale | None = None,
    max_query_len: int | None = None,
    page_stride: int = 1,
    page_offset: Int[Array, "seqs"] | None = None,
    schedule: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens heads kv_lora_rank"], Float[Array, "tokens heads"]]:
    """`paged_attention` over paged latents: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), absorbed form.

    `q_latent` is a head's query without RoPE, multiplied by the matrix that expands latents to that head's keys;
    `q_rope` its rotated part. Logits are `scale * (q_latent @ latent + q_rope @ k_rope)`, and the output is the weighted
    mean of the latents, which the caller expands to values: no head's keys and values ever exist. `scale` is the
    model's, by the width of an expanded key. `k_scale` multiplies what quantised pages hold.

    The batch, `soft_cap`, `max_query_len`, the pages dealt, `schedule`, `implementation`, what may lie in unused pages,
    and the log-sum-exp are as in `paged_attention`; the output is in q_latent's dtype.

    Raises ValueError for shapes that disagree, an option out of range, or an unknown implementation; NotImplementedError
    for one that does not run here or does not read the dtypes.
    """
    if q_latent.ndim != 3 or latent_pages.ndim not in (3, 4) or block_tables.ndim != 2:
        raise ValueError(
            "expected q_latent [tokens, heads, kv_lora_rank], latent_pages of 3 or 4 axes (see layout.py) and "
            f"block_tables [seqs, max_pages], got {q_latent.shape}, {latent_pages.shape} and {block_tables.shape}"
        )
    if q_rope.shape[:-1] != q_latent.shape[:-1] or q_rope.dtype != q_latent.dtype:
        raise ValueError(
            f"q_latent {q_latent.shape} {q_latent.dtype} and q_rope {q_rope.shape} {q_rope.dtype} must be of the same "
            "tokens and heads and of one dtype"
        )
    page_size = latent_page_size(latent_pages, q_latent.shape[-1] + q_rope.shape[-1])
    _check_batch(block_tables.shape[0], context_lens, query_starts, soft_cap, max_query_len, page_stride, page_offset)
    if latent_pages.dtype == jnp.int8 and k_scale is None:
        raise ValueError("int8 pages need k_scale")
    sizes = MLASizes(q_latent.shape[1], q_latent.shape[2], q_rope.shape[2], page_size)
    chosen = choose_implementation(implementation, target(), q_latent.dtype, latent_pages.dtype, sizes=sizes)
    return _module(chosen).mla_paged_attention(
        q_latent,
        q_rope,
        latent_pages,
        block_tables,
        context_lens,
        query_starts,
        scale=scale,
        soft_cap=soft_cap,
        k_scale=k_scale,
        max_query_len=max_query_len,
        page_stride=page_stride,
        page_offset=page_offset,
        **_given(schedule, chosen),
    )


def schedule_attention(
    sizes: Sizes,
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    *,
    tokens: int,
    max_pages: int,
    dtypes: tuple[jax.typing.DTypeLike, jax.typing.DTypeLike],
    window: int | Int[Array, ""] | None = None,
    max_query_len: int | None = None,
    page_stride: int = 1,
    page_offset: Int[Array, "seqs"] | None = None,
    implementation: str | None = None,
) -> Any:
    """What an implementation makes of a batch before it reads any page, for `schedule` of the attention of these sizes.

    All layers of a step can share it, as FlashInfer's `plan` is shared by its `run`s: in a scan over layers it would
    else be made anew in each. None if the implementation shares nothing. tokens: rows of the queries. max_pages: of a
    block table. dtypes: of the queries and of the pages array. The rest must be what `paged_attention` or
    `mla_paged_attention` is given, and so must the implementation.

    Raises ValueError and NotImplementedError as these do.
    """
    chosen = choose_implementation(implementation, target(), *dtypes, sizes=sizes)
    if chosen not in SCHEDULED:
        return None
    return _module(chosen).make_schedule(
        sizes,
        context_lens,
        query_starts,
        tokens=tokens,
        max_pages=max_pages,
        itemsize=jnp.dtype(dtypes[1]).itemsize,
        window=window,
        max_query_len=max_query_len,
        page_stride=page_stride,
        page_offset=page_offset,
    )


def _given(schedule: Any, chosen: str) -> dict[str, Any]:
    """The schedule as an argument, if there is one."""
    if schedule is not None and chosen not in SCHEDULED:
        raise ValueError(f"{chosen!r} takes no schedule: use the one that schedule_attention makes for it")
    return {} if schedule is None else {"schedule": schedule}


def _check_batch(
    seqs: int,
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    soft_cap: float | None,
    max_query_len: int | None,
    page_stride: int,
    page_offset: Int[Array, "seqs"] | None,
) -> None:
    """What both kinds of attention ask of a batch and its options."""
    if context_lens.shape != (seqs,) or query_starts.shape != (seqs + 1,):
        raise ValueError(
            f"{seqs} block tables need context_lens [{seqs}] and query_starts [{seqs + 1}], "
            f"got {context_lens.shape} and {query_starts.shape}"
        )
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap must be positive, got {soft_cap}; pass None for no cap")
    if max_query_len is not None and max_query_len < 1:
        raise ValueError(f"max_query_len must be at least 1, got {max_query_len}; pass None if it is not known")
    if page_stride < 1:
        raise ValueError(f"page_stride must be at least 1, got {page_stride}")
    if page_offset is not None and page_offset.shape != (seqs,):
        raise ValueError(f"page_offset must have one page per sequence [{seqs}], got {page_offset.shape}")


def write_pages(
    kv_pages: Num[Array, "pages kv_heads slots width"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    token_pages: Int[Array, "tokens"],
    token_offsets: Int[Array, "tokens"],
    *,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    implementation: str | None = None,
) -> Num[Array, "pages kv_heads slots width"]:
    """Writes each token's K and V to slot `token_offsets[t]` of page `token_pages[t]`; donate `kv_pages`.

    Several padding tokens may share a slot of the null page; all other slots must be distinct, and tokens of one page must
    follow one another. Tokens of a page past the last are not written. Quantised pages hold `k / k_scale` and `v / v_scale`,
    saturated.

    `implementation` is chosen as in `paged_attention`; "mosaic_tpu" has a kernel of its own, the others are a scatter.

    Raises ValueError if the shapes disagree, if int8 pages come without scales, or for an unknown implementation;
    NotImplementedError for one that does not run here or does not hold such pages.
    """
    kv_heads, head_dim = k.shape[1:]
    sizes = GQASizes(kv_heads, kv_heads, head_dim, page_size_of(kv_pages, head_dim))
    module = _writer(implementation, kv_pages.dtype, sizes)
    return module.write_pages(kv_pages, k, v, token_pages, token_offsets, k_scale=k_scale, v_scale=v_scale)


def write_latent_pages(
    latent_pages: Num[Array, "pages *slots width"],
    latent: Float[Array, "tokens kv_lora_rank"],
    k_rope: Float[Array, "tokens qk_rope_head_dim"],
    token_pages: Int[Array, "tokens"],
    token_offsets: Int[Array, "tokens"],
    *,
    k_scale: Scale | None = None,
    implementation: str | None = None,
) -> Num[Array, "pages *slots width"]:
    """Writes each token's latent and rotated key to slot `token_offsets[t]` of page `token_pages[t]`, as `write_pages`.

    Quantised pages hold both divided by `k_scale`, saturated. `implementation`, what may be asked and what is raised are as in
    `write_pages`.
    """
    sizes = MLASizes(
        1, latent.shape[1], k_rope.shape[1], latent_page_size(latent_pages, latent.shape[1] + k_rope.shape[1])
    )
    module = _writer(implementation, latent_pages.dtype, sizes)
    return module.write_latent_pages(latent_pages, latent, k_rope, token_pages, token_offsets, k_scale=k_scale)


def _writer(implementation: str | None, dtype: jax.typing.DTypeLike, sizes: Sizes) -> Any:
    """The module that writes pages of a dtype."""
    chosen = choose_implementation(implementation, target(), dtype, sizes=sizes)
    return _module("mosaic_tpu_write" if chosen == "mosaic_tpu" else "layout")


def choose_implementation(
    implementation: str | None, device: AbstractDevice, *dtypes: jax.typing.DTypeLike, sizes: Sizes
) -> str:
    """The implementation in effect on a kind of device for queries and pages of these dtypes and this kind of attention.

    None is the platform's own (PLATFORMS_OWN) if that can do what is asked, and else "xla"; the log says why, once. Raises
    ValueError for an unknown implementation, and NotImplementedError, saying why, for one that cannot do what is asked.
    """
    if implementation is None:
        own = PLATFORMS_OWN.get(device.platform, "xla")
        if reason := _why_not(own, device, *dtypes, sizes=sizes):
            _say_once(f"attention is computed by 'xla', not by {own!r}: {reason}")
            return "xla"
        return own
    if reason := _why_not(implementation, device, *dtypes, sizes=sizes):
        raise NotImplementedError(f"attention implementation {implementation!r} is not available: {reason}")
    return implementation


def supported(implementation: str, device: AbstractDevice, *dtypes: jax.typing.DTypeLike, sizes: Sizes) -> bool:
    """Whether an implementation can compute this kind of attention on a kind of device.

    dtypes: of the queries and of the pages array. Raises ValueError for an unknown implementation.
    """
    return _why_not(implementation, device, *dtypes, sizes=sizes) is None


@functools.cache
def _say_once(message: str) -> None:
    logger.info(message)


def _why_not(implementation: str, device: AbstractDevice, *dtypes: jax.typing.DTypeLike, sizes: Sizes) -> str | None:
    """Why an implementation is not `supported`, in words; None if it is."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown attention implementation {implementation!r}; there are {sorted(IMPLEMENTATIONS)}")
    if implementation not in PLATFORMS_OWN.values():
        return None
    if implementation == "numba_cpu" and importlib.util.find_spec("numba") is None:
        return "Numba is not installed (pip install 'paxserve[cpu]')"
    return _module(implementation).why_not(device, dtypes, sizes)


def _module(implementation: str) -> Any:
    return importlib.import_module(f"paxserve.pallas_kernels.{implementation}")
