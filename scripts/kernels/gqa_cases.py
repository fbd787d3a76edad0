"""The shapes of grouped-query attention that are compiled for TPUs, and what their schedules cost.

A decode is costed at a batch of full blocks, per cached token of one layer and all of its KV heads; a prefill on blocks
without a mask, as the share of the matrix units' peak.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from chips import TPUS
from figures import CONTEXT, SEQS, Figures, decode_cycles, stored_bytes
from schedule import Kernel, numbers_in

from paxserve.pallas_kernels import mosaic_tpu
from paxserve.pallas_kernels.mosaic_tpu_kernel import ISSUE
from paxserve.pallas_kernels.tuning import GQA_SHAPE

POOL = 2**19  # tokens that the pages hold: more than XLA would keep in VMEM, yet of 32 heads no more than a v5e has


@dataclass(frozen=True)
class Case:
    """heads and kv_heads of one shard; `queries` tokens per sequence."""

    heads: int
    kv_heads: int
    head_dim: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"
    pages: str = "bfloat16"
    queries: int = 1
    window: int | None = None
    soft_cap: float | None = None
    max_pages: int = CONTEXT // 16

    kernel = "mosaic_tpu"
    prefix = "paged_attention"
    module = mosaic_tpu

    def __str__(self) -> str:
        options = [f"window {self.window}"] * bool(self.window) + [f"soft cap {self.soft_cap}"] * bool(self.soft_cap)
        tables = ["tables of 1 M tokens"] * (self.max_pages * self.page_size >= 2**20)
        return ", ".join([self.shape, f"{self.dtype} on {self.pages}", *options, *tables])

    @property
    def shape(self) -> str:
        kind = "decode" if self.is_decode else "prefill"
        return f"{kind} {self.heads}/{self.kv_heads} heads of {self.head_dim}, page {self.page_size}"

    @property
    def is_decode(self) -> bool:
        return self.queries == 1

    def must_not_spill(self, target: str) -> bool:
        """In its hot loop. float32 has products of six passes, and v5e and v5p sums of several products, that do not fit."""
        if self.dtype == "float32" or (self.is_decode and self.pages == "float8_e4m3fn"):
            return False
        return target == "v6e" or (self.pages == "bfloat16" and (target == "tpu7x" or self.head_dim in (64, 128)))

    @property
    def tuned(self) -> str:
        """As what its block sizes are tuned."""
        return "mosaic_tpu decode" if self.is_decode else "mosaic_tpu prefill"

    @property
    def tuned_shape(self) -> dict[str, int]:
        itemsize = jnp.dtype(self.pages).itemsize
        return {name: getattr(self, name) for name in GQA_SHAPE if name != "itemsize"} | {"itemsize": itemsize}

    def program(self) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
        """What is compiled: a function and its arguments."""
        seqs = SEQS if self.is_decode else 4
        has_scales = self.pages != self.dtype

        def attend(*arrays: jax.Array) -> Any:
            return mosaic_tpu.paged_attention(
                *arrays,
                scale=self.head_dim**-0.5,
                window=self.window,
                soft_cap=self.soft_cap,
                sinks=None,
                k_scale=0.1 if has_scales else None,
                v_scale=0.1 if has_scales else None,
                max_query_len=1 if self.is_decode else None,
                page_stride=1,
                page_offset=None,
            )

        shapes = (
            ((seqs * self.queries, self.heads, self.head_dim), self.dtype),
            ((POOL // self.page_size, self.kv_heads, self.page_size, 2 * self.head_dim), self.pages),
            ((seqs, self.max_pages), "int32"),
            ((seqs,), "int32"),
            ((seqs + 1,), "int32"),
        )
        return attend, [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]

    def figures(self, kernels: dict[str, Kernel], target: str) -> Figures:
        for name, kernel in kernels.items():
            sizes = numbers_in(name, self.prefix)
            if ("units" in sizes) != self.is_decode:
                return self._figures(sizes, kernel, target)
        raise ValueError(f"none of the kernels {list(kernels)} is of a {self}")

    def _figures(self, sizes: dict[str, int], kernel: Kernel, target: str) -> Figures:
        tiles, pages = sizes["tiles"], sizes["pages"]
        step = next(loop for loop in kernel.within()[1:] if loop.matmuls)
        block = next(loop for loop in step.inner if loop.matmuls)
        computing = [loop for loop in block.within() if loop.matmuls]
        spills = sum(loop.spills for loop in computing)

        hot = block.cost(0, 0)
        pieces = pages * self.page_size // sizes["keys"]
        if self.is_decode:
            times = 1
            trips = (trip for trip in (self.kv_heads // sizes["heads"], pieces) if trip > 1)
            for loop, trip in zip(computing[1:], trips, strict=True):
                times *= trip
                hot += times * min(loop.walks.values())
        else:  # the loop's turns are parts of a block, of which one asks for pages
            hot *= self.kv_heads * pieces // sizes["units"]
        copies = block.issue(tiles, pages, ISSUE)
        least = 2 * self.kv_heads * self.head_dim * jnp.dtype(self.pages).itemsize
        moved = stored_bytes((self.kv_heads, self.page_size, 2 * self.head_dim), self.pages) / self.page_size
        resources = {"hot_spills": spills, "spills": kernel.all_spills, "vmem": kernel.vmem, "smem": kernel.smem}
        if not self.is_decode:
            flops = 4 * sizes["rows"] * self.head_dim * self.kv_heads * pages * self.page_size
            return {"peak": flops / (hot + copies) / TPUS[target].flops, **resources}

        return {
            **decode_cycles(hot, copies, step.cost(0, 0), tiles, pages * self.page_size),
            **resources,
            "cores": TPUS[target].cores,
            "bytes": moved,
            "least_bytes": least,
        }


QUICK = (
    Case(8, 4),
    Case(4, 1),
    Case(9, 3, head_dim=64),
    Case(8, 4, queries=512),
)
FULL = (
    *QUICK,
    Case(8, 4, page_size=16),
    Case(32, 8, page_size=32),
    Case(8, 1, page_size=256),
    Case(32, 32),
    Case(4, 2, head_dim=80),
    Case(4, 2, head_dim=96),
    Case(4, 2, head_dim=192),
    Case(8, 4, head_dim=256),
    Case(8, 4, dtype="float32", pages="float32"),
    Case(9, 3, head_dim=64, dtype="float32", pages="float32"),
    Case(8, 4, window=128, soft_cap=30.0),
    Case(8, 4, page_size=16, max_pages=2**16),
    Case(8, 4, pages="int8"),
    Case(8, 4, pages="float8_e4m3fn"),
    Case(9, 3, head_dim=64, queries=512),
    Case(4, 2, head_dim=80, queries=512),
    Case(8, 4, head_dim=256, queries=512),
    Case(8, 4, dtype="float32", pages="float32", queries=512),
    Case(8, 4, queries=512, window=128, soft_cap=30.0),
    Case(8, 4, pages="int8", queries=512),
    Case(8, 4, pages="float8_e4m3fn", queries=512),
    Case(4, 1, page_size=16, queries=512),
    Case(32, 32, queries=512),
    Case(64, 1),
    Case(8, 1, page_size=256, queries=512),
    Case(4, 2, head_dim=96, queries=512),
    Case(4, 2, head_dim=192, queries=512),
)
