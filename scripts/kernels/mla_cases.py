"""The shapes of latent attention that are compiled for TPUs, and what their schedules cost, as those in `gqa_cases`."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from chips import TPUS
from figures import CONTEXT, SEQS, Figures, stored_bytes
from schedule import Kernel

from paxserve.pallas_kernels import mla_pages_shape
from paxserve.pallas_kernels.mosaic_tpu import mla_paged_attention
from paxserve.pallas_kernels.mosaic_tpu_kernel import ISSUE


@dataclass(frozen=True)
class MLACase:
    """heads of one shard; `queries` tokens per sequence."""

    heads: int
    rank: int = 512
    rope: int = 64
    page_size: int = 64
    dtype: str = "bfloat16"
    pages: str = "bfloat16"
    queries: int = 1
    max_pages: int = CONTEXT // 16

    kernel = "mosaic_tpu"
    prefix = "mla_paged_attention"

    def __str__(self) -> str:
        tables = ["tables of 1 M tokens"] * (self.max_pages * self.page_size >= 2**20)
        return ", ".join([self.shape, f"{self.dtype} on {self.pages}", *tables])

    @property
    def shape(self) -> str:
        kind = "decode" if self.is_decode else "prefill"
        return f"{kind} {self.heads} heads of {self.rank} + {self.rope}, page {self.page_size}"

    @property
    def is_decode(self) -> bool:
        return self.queries == 1

    def must_not_spill(self, target: str) -> bool:
        """In its hot loop; with more heads the sums of the tiles side by side take more than all registers."""
        is_usual = self.dtype == self.pages == "bfloat16" and self.rank == 512
        return self.is_decode and is_usual and self.heads <= 16 and target in ("v6e", "tpu7x")

    @property
    def pages_shape(self) -> tuple[int, ...]:
        return mla_pages_shape(1, 4096, self.page_size, self.rank + self.rope, paired=True)

    def program(self) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
        """What is compiled: a function and its arguments."""
        seqs = SEQS if self.is_decode else 4
        tokens = seqs * self.queries

        def attend(*arrays: jax.Array) -> Any:
            return mla_paged_attention(
                *arrays,
                scale=0.1,
                soft_cap=None,
                k_scale=None if self.pages == self.dtype else 0.1,
                max_query_len=1 if self.is_decode else None,
                page_stride=1,
                page_offset=None,
            )

        shapes = (
            ((tokens, self.heads, self.rank), self.dtype),
            ((tokens, self.heads, self.rope), self.dtype),
            (self.pages_shape, self.pages),
            ((seqs, self.max_pages), "int32"),
            ((seqs,), "int32"),
            ((seqs + 1,), "int32"),
        )
        return attend, [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]

    def figures(self, kernels: dict[str, Kernel], target: str) -> Figures:
        sizes = {name: _sizes(name) for name in kernels}
        name = next(name for name in kernels if (sizes[name]["tiles"] > 1) == self.is_decode)
        rows, tiles, pages = (sizes[name][unit] for unit in ("rows", "tiles", "pages"))
        kernel = kernels[name]
        step = next(loop for loop in kernel.within()[1:] if loop.matmuls)
        block = next(loop for loop in step.inner if loop.matmuls)
        hot = block.cost(0, 0)
        in_loops = pages > ISSUE
        copies = block.cost(tiles if in_loops else 0, 0 if in_loops else tiles * pages) - hot
        if in_loops:
            turn = min(min(loop.walks.values()) for loop in block.inner if loop.copies > 1)
            copies += tiles * (pages // ISSUE) * turn
        resources = {"hot_spills": block.spills, "spills": kernel.all_spills, "vmem": kernel.vmem, "smem": kernel.smem}
        block_keys = pages * self.page_size
        if not self.is_decode:
            flops = 2 * rows * (2 * self.rank + self.rope) * block_keys
            return {"peak": flops / (hot + copies) / TPUS[target].flops, **resources}

        def cycles(*contexts: int) -> float:
            """Per token; a block that is filled in part is computed as a whole."""
            blocks, read = sum(-(-context // block_keys) for context in contexts), sum(contexts) / block_keys
            return (blocks * hot + read * copies + len(contexts) * step.cost(0, 0)) / (tiles * sum(contexts))

        return {
            "cycles": cycles(CONTEXT),
            "ragged": cycles(*range(64, 2 * CONTEXT + 1, 64)),
            "hot": hot / (tiles * block_keys),
            "copies": copies / (tiles * block_keys),
            **resources,
            "bytes": stored_bytes(self.pages_shape[1:], self.pages) / self.page_size,
            "least_bytes": (self.rank + self.rope) * jnp.dtype(self.pages).itemsize,
        }


def _sizes(name: str) -> dict[str, int]:
    """Of a kernel, which its name gives: rows, tiles and pages."""
    words = name.removeprefix(f"{MLACase.prefix}_").split("_")
    return {unit: int(number) for number, unit in zip(words[::2], words[1::2], strict=True)}


QUICK = (
    MLACase(16, page_size=128),
    MLACase(16, page_size=128, queries=512),
)
FULL = (
    *QUICK,
    MLACase(16),
    MLACase(16, page_size=16),
    MLACase(16, page_size=16, max_pages=2**16),
    MLACase(16, page_size=256),
    MLACase(8),
    MLACase(128),
    MLACase(128, page_size=128),
    MLACase(16, pages="int8"),
    MLACase(16, pages="float8_e4m3fn"),
    MLACase(16, dtype="float32", pages="float32"),
    MLACase(6, rank=24, rope=8, page_size=16),
    MLACase(128, queries=512),
    MLACase(16, pages="int8", queries=512),
    MLACase(16, dtype="float32", pages="float32", queries=64),
)
