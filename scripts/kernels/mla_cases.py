"""The shapes of latent attention that are compiled for TPUs, and what their schedules cost, as those in `gqa_cases`."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from chips import TPUS
from figures import CONTEXT, SEQS, Figures, decode_cycles, stored_bytes
from schedule import Kernel, numbers_in

from paxserve.pallas_kernels import mla_pages_shape, mosaic_tpu, mosaic_tpu_mla
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
    module = mosaic_tpu_mla

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
        """In its hot loop."""
        if self.dtype == "float32":
            return False
        is_usual = self.pages == "bfloat16" and (self.heads <= 16 or target != "tpu7x")
        return target == "v6e" or (self.is_decode and is_usual)

    @property
    def tuned(self) -> str:
        """As what its block sizes are tuned."""
        return "mosaic_tpu mla decode" if self.is_decode else "mosaic_tpu mla prefill"

    @property
    def tuned_shape(self) -> dict[str, int]:
        itemsize = jnp.dtype(self.pages).itemsize
        return {"heads": self.heads, "kv_lora_rank": self.rank, "page_size": self.page_size, "itemsize": itemsize}

    @property
    def pages_shape(self) -> tuple[int, ...]:
        return mla_pages_shape(1, 4096, self.page_size, self.rank + self.rope, paired=True)

    def program(self) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
        """What is compiled: a function and its arguments."""
        seqs = SEQS if self.is_decode else 4
        tokens = seqs * self.queries

        def attend(*arrays: jax.Array) -> Any:
            return mosaic_tpu.mla_paged_attention(
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
        sizes = {name: numbers_in(name, self.prefix) for name in kernels}
        name = next(name for name in kernels if (sizes[name]["tiles"] > 1) == self.is_decode)
        rows, tiles, pages = (sizes[name][unit] for unit in ("rows", "tiles", "pages"))
        kernel = kernels[name]
        step = next(loop for loop in kernel.within()[1:] if loop.matmuls)
        block = next(loop for loop in step.inner if loop.matmuls)
        hot, copies = block.cost(0, 0), block.issue(tiles, pages, ISSUE)
        resources = {"hot_spills": block.spills, "spills": kernel.all_spills, "vmem": kernel.vmem, "smem": kernel.smem}
        block_keys = pages * self.page_size
        if not self.is_decode:
            flops = 2 * rows * (2 * self.rank + self.rope) * block_keys
            return {"peak": flops / (hot + copies) / TPUS[target].flops, **resources}
        return {
            **decode_cycles(hot, copies, step.cost(0, 0), tiles, block_keys),
            **resources,
            "cores": TPUS[target].cores,
            "bytes": stored_bytes(self.pages_shape[1:], self.pages) / self.page_size,
            "least_bytes": (self.rank + self.rope) * jnp.dtype(self.pages).itemsize,
        }


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
    MLACase(128, queries=512),
    MLACase(16, pages="int8", queries=512),
    MLACase(16, dtype="float32", pages="float32", queries=64),
)
