"""The batches of scripts/gpu_check: ragged queries over shuffled pages, and what attention over them is in float64."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxserve.pallas_kernels import load, mla_paged_attention, paged_attention, storage_dtype

LATENT: dict[str, Any] = {"kv_heads": 1, "head_dim": 576, "latent_dim": 512, "page_size": 64}
SCALE_8_BIT = 2.0**-5  # of int8 and fp8 pages


@dataclass(frozen=True)
class Batch:
    """Query tokens and contexts of each sequence, and the sizes. Free slots hold NaN (int8: the largest value), and
    block-table entries past a context anything.

    pages: the dtype of the pages if it is not the queries'. latent_dim: of latent attention, the values of a cached row of
    `head_dim` that are the latent.
    """

    queries: Sequence[int]
    contexts: Sequence[int]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 32
    dtype: str = "bfloat16"
    pages: str | None = None
    latent_dim: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def shrunk(self) -> "Batch":
        """A tiny batch of the same kind, for a rehearsal."""
        group = min(self.heads // self.kv_heads, 16)
        queries = [min(query, 5) for query in self.queries[:3]]
        contexts = [max(min(context, 70), query) for query, context in zip(queries, self.contexts, strict=False)]
        sizes: dict[str, Any] = {"heads": group, "kv_heads": 1, "page_size": min(self.page_size, 64)}
        if "sinks" in self.options:
            sizes["options"] = self.options | {"sinks": self.options["sinks"][:group]}
        return dataclasses.replace(self, queries=queries, contexts=contexts, **sizes)

    @property
    def row(self) -> int:
        """Values that a token's K and V take, per KV head."""
        return self.head_dim if self.latent_dim else 2 * self.head_dim

    @property
    def pages_dtype(self) -> Any:
        return jnp.dtype(self.pages or self.dtype)

    def arrays(self) -> tuple[jax.Array, ...]:
        """Queries, pages, block tables, contexts and query starts."""
        rng = np.random.default_rng(0)
        page_counts = [-(-context // self.page_size) for context in self.contexts]
        num_pages = sum(page_counts) + 2
        ids = iter(rng.permutation(np.arange(1, num_pages)))
        tables = rng.choice([-7, 0, 10**6], (len(self.contexts), max(page_counts) + 1))
        filled = np.zeros(num_pages, np.int32)
        for seq, count in enumerate(page_counts):
            for j in range(count):
                page = tables[seq, j] = next(ids)
                filled[page] = min(self.contexts[seq] - j * self.page_size, self.page_size)

        @jax.jit
        def draw(filled: jax.Array) -> tuple[jax.Array, jax.Array]:
            q_key, kv_key = jax.random.split(jax.random.key(0))
            q = jax.random.normal(q_key, (sum(self.queries) + 3, self.heads, self.head_dim), self.dtype)
            is_filled = (jnp.arange(self.page_size) < filled[:, None])[:, None, :, None]
            values = jax.random.normal(kv_key, (num_pages, self.kv_heads, self.page_size, self.row), self.dtype)
            if self.pages is not None:
                values /= SCALE_8_BIT
            free = jnp.nan
            if self.pages == "int8":
                values, free = jnp.clip(jnp.round(values), -127, 127), 127
            pages = jnp.where(is_filled, values, free).astype(self.pages_dtype)
            if storage_dtype(self.pages_dtype) != self.pages_dtype:
                pages = jax.lax.bitcast_convert_type(pages, storage_dtype(self.pages_dtype))
            return q, pages[:, 0] if self.latent_dim else pages

        starts = np.cumsum([0, *self.queries])
        return (*draw(filled), *(jnp.asarray(each, jnp.int32) for each in (tables, self.contexts, starts)))

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def attention(self, implementation: str) -> Callable[..., Any]:
        """The jitted function of `arrays` that gives output and log-sum-exp."""
        options = {"scale": self.scale, "implementation": implementation} | self.options
        if self.pages is not None:
            options |= {name: jnp.float32(SCALE_8_BIT) for name in ("k_scale", "v_scale")[: 2 - bool(self.latent_dim)]}
        if max(self.queries) == 1:
            options["max_query_len"] = 1
        if self.latent_dim is None:
            return jax.jit(lambda *arrays: paged_attention(*arrays, **options))
        rank = self.latent_dim
        return jax.jit(lambda q, *rest: mla_paged_attention(q[..., :rank], q[..., rank:], *rest, **options))

    def expected(self, arrays: tuple[jax.Array, ...], tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Output and log-sum-exp of these tokens in float64; 0 and -inf for padding."""
        q, pages, tables, contexts, starts = (arrays[0], arrays[1], *(np.asarray(each) for each in arrays[2:]))
        out = np.zeros((len(tokens), self.heads, self.latent_dim or self.head_dim))
        lse = np.full((len(tokens), self.heads), -np.inf)
        seqs = np.searchsorted(starts, tokens, side="right") - 1
        for seq in set(seqs[np.asarray(tokens) < starts[-1]].tolist()):
            ids = tables[seq, : -(-contexts[seq] // self.page_size)]
            own = [place for place in range(len(tokens)) if seqs[place] == seq]
            queries = np.asarray(q[np.asarray(tokens)[own]], np.float64).reshape(
                len(own), self.kv_heads, -1, self.head_dim
            )
            for head in range(self.kv_heads):
                stored = load(pages[ids] if self.latent_dim else pages[ids, head])
                kv = np.asarray(stored, np.float64).reshape(-1, self.row) * (1.0 if self.pages is None else SCALE_8_BIT)
                for place, rows in zip(own, queries[:, head], strict=True):
                    end = contexts[seq] - starts[seq + 1] + tokens[place] + 1
                    of_head = slice(head * len(rows), (head + 1) * len(rows))
                    seen = kv[max(end - self.options.get("window", end), 0) : end]
                    values = seen[:, : self.latent_dim] if self.latent_dim else seen[:, self.head_dim :]
                    logits = rows @ seen[:, : self.head_dim].T * self.scale
                    if cap := self.options.get("soft_cap"):
                        logits = cap * np.tanh(logits / cap)
                    total = np.exp(logits).sum(1)
                    if "sinks" in self.options:
                        total += np.exp(np.asarray(self.options["sinks"], np.float64)[of_head])
                    out[place, of_head] = np.exp(logits) @ values / total[:, None]
                    lse[place, of_head] = np.log(total)
        return out, lse

    @property
    def bytes(self) -> int:
        """Of the keys and values that some token sees."""
        seen = (
            min(c, self.options.get("window", c) + q - 1) for q, c in zip(self.queries, self.contexts, strict=True) if q
        )
        return sum(seen) * self.kv_heads * self.row * self.pages_dtype.itemsize

    @property
    def flops(self) -> int:
        pairs = sum(q * c - q * (q - 1) // 2 for q, c in zip(self.queries, self.contexts, strict=True))
        return 2 * pairs * self.heads * (self.head_dim + (self.latent_dim or self.head_dim))


def ragged(seqs: int, longest: int) -> list[int]:
    return [int(c) for c in np.random.default_rng(1).integers(1, longest + 1, seqs)]


EDGES = [1, 31, 32, 33, 63, 64, 65, 500]
MIXED: dict[str, Any] = {"queries": [1, 0, 5, 33, 1, 200, 16], "contexts": [1, 0, 65, 49, 64, 200, 700]}
CHECKS = {
    "decode": Batch([1] * 8, EDGES),
    "decode, empty rows": Batch([1, 0, 1, 0], [40, 0, 300, 0]),
    "decode, head_dim 64, pages of 16": Batch([1] * 8, EDGES, head_dim=64, page_size=16),
    "decode, pages of 256, float16": Batch([1] * 8, EDGES, page_size=256, dtype="float16"),
    "decode, MQA of 64, one of 3000": Batch([1], [3000], heads=64, kv_heads=1),
    "decode, one of 70000": Batch([1], [70000], heads=2, kv_heads=1, head_dim=64),
    "mixed": Batch(**MIXED),
    "mixed, MHA, pages of 8": Batch(**MIXED, heads=8, page_size=8),
    "mixed, groups of 7, head_dim 64": Batch(**MIXED, heads=28, kv_heads=4, head_dim=64, page_size=64),
    "mixed, head_dim 80, MHA": Batch(**MIXED, heads=8, head_dim=80),
    "mixed, head_dim 96": Batch(**MIXED, head_dim=96),
    "mixed, head_dim 192": Batch(**MIXED, heads=16, head_dim=192),
    "mixed, head_dim 256": Batch(**MIXED, heads=16, head_dim=256),
    "mixed, head_dim 256, pages of 16": Batch(**MIXED, heads=16, head_dim=256, page_size=16),
    "mixed, fp8 pages of 16, head_dim 192": Batch(**MIXED, heads=16, head_dim=192, page_size=16, pages="float8_e4m3fn"),
    "mixed, int8 pages of 16, head_dim 256": Batch(**MIXED, heads=16, head_dim=256, page_size=16, pages="int8"),
    "mixed, window": Batch(**MIXED, options={"window": 40}),
    "mixed, soft cap and sinks": Batch(**MIXED, options={"soft_cap": 3.0, "sinks": jnp.linspace(-2.0, 4.0, 32)}),
    "mixed, int8 pages": Batch(**MIXED, pages="int8"),
    "mixed, fp8 pages": Batch(**MIXED, pages="float8_e4m3fn"),
    "mixed, fp8 pages, float16, head_dim 64": Batch(**MIXED, head_dim=64, dtype="float16", pages="float8_e4m3fn"),
    "mixed, int8 pages, head_dim 96": Batch(**MIXED, head_dim=96, pages="int8"),
    "latent, decode of 16 heads": Batch([1] * 8, EDGES, heads=16, **LATENT),
    "latent, decode of 128 heads": Batch([1] * 8, EDGES, heads=128, **LATENT),
    "latent, mixed": Batch(**MIXED, heads=16, **LATENT),
    "latent, mixed, 128 heads, pages of 16": Batch(**MIXED, heads=128, **(LATENT | {"page_size": 16})),
    "latent, mixed, 48 heads, float16, cap": Batch(
        **MIXED, heads=48, dtype="float16", **LATENT, options={"soft_cap": 3.0}
    ),
    "latent, decode, 100 heads, pages of 8": Batch([1] * 8, EDGES, heads=100, **(LATENT | {"page_size": 8})),
    "latent, rank 256, RoPE 128": Batch(
        **MIXED, heads=64, **(LATENT | {"head_dim": 384, "latent_dim": 256, "page_size": 128})
    ),
    "latent, fp8 pages": Batch(**MIXED, heads=16, pages="float8_e4m3fn", **LATENT),
    "latent, int8 pages, 128 heads": Batch(**MIXED, heads=128, pages="int8", **LATENT),
}
TIMES = {
    "decode 1 x 32768": Batch([1], [32768]),
    "decode 32 x 4096": Batch([1] * 32, [4096] * 32),
    "decode 128 x 1..8192": Batch([1] * 128, ragged(128, 8192)),
    "decode 128 x 1..8192, pages of 16": Batch([1] * 128, ragged(128, 8192), page_size=16),
    "decode 128 x 1..8192, head_dim 64": Batch([1] * 128, ragged(128, 8192), head_dim=64),
    "decode 128 x 1..8192, head_dim 256": Batch([1] * 128, ragged(128, 8192), heads=16, head_dim=256),
    "decode 128 x 1..8192, int8 pages": Batch([1] * 128, ragged(128, 8192), pages="int8"),
    "decode 128 x 1..8192, fp8 pages": Batch([1] * 128, ragged(128, 8192), pages="float8_e4m3fn"),
    "decode 127 x 512 and 1 x 131072": Batch([1] * 128, [512] * 127 + [131072]),
    "mixed, 64 decodes and 512 of prefill": Batch([1] * 64 + [512], [4096] * 64 + [2048]),
    "prefill 8192": Batch([8192], [8192]),
    "prefill 4 x 2048": Batch([2048] * 4, [2048] * 4),
    "latent, decode 128 x 4096, 16 heads": Batch([1] * 128, [4096] * 128, heads=16, **LATENT),
    "latent, decode 128 x 4096, 64 heads": Batch([1] * 128, [4096] * 128, heads=64, **LATENT),
    "latent, decode 128 x 4096, 128 heads": Batch([1] * 128, [4096] * 128, heads=128, **LATENT),
    "latent, decode 128 x 1..8192, 128, fp8": Batch(
        [1] * 128, ragged(128, 8192), heads=128, pages="float8_e4m3fn", **LATENT
    ),
    "latent, prefill 4 x 2048, 128 heads": Batch([2048] * 4, [2048] * 4, heads=128, **LATENT),
}
