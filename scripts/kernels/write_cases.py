"""The shapes in which K and V are written into pages on TPUs; what that costs is per token, each in a tile of its own."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from figures import SEQS, Figures
from mla_cases import MLACase
from schedule import Kernel

from paxserve.pallas_kernels.mosaic_tpu_write import write_latent_pages, write_pages


@dataclass(frozen=True)
class WriteCase:
    """kv_heads of one shard."""

    kv_heads: int
    head_dim: int = 128
    page_size: int = 64
    pages: str = "bfloat16"
    tokens: int = SEQS

    kernel = "mosaic_tpu"
    prefix = "write_pages"
    donated = (0,)

    def __str__(self) -> str:
        return f"write {self.tokens} tokens of {self.kv_heads} heads of {self.head_dim}, page {self.page_size}, {self.pages}"

    def must_not_spill(self, target: str) -> bool:
        return True

    @property
    def new(self) -> str:
        """The dtype of what is written."""
        return "float32" if self.pages == "float32" else "bfloat16"

    def program(self) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
        """What is compiled: a function and its arguments."""
        scale = None if self.pages in ("bfloat16", "float32") else 0.1

        def write(*arrays: jax.Array) -> jax.Array:
            return write_pages(*arrays, k_scale=scale, v_scale=scale)

        shapes = (
            ((4096, self.kv_heads, self.page_size, 2 * self.head_dim), self.pages),
            ((self.tokens, self.kv_heads, self.head_dim), self.new),
            ((self.tokens, self.kv_heads, self.head_dim), self.new),
            ((self.tokens,), "int32"),
            ((self.tokens,), "int32"),
        )
        return write, [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]

    def figures(self, kernels: dict[str, Kernel], target: str) -> Figures:
        (kernel,) = kernels.values()
        over_tokens = kernel.within()[2:]  # within the grid's: read, wait, put into place and write, wait
        return {
            "cycles": sum(loop.cost(0, loop.copies) for loop in over_tokens),
            "hot_spills": sum(loop.spills for loop in over_tokens),
            "spills": kernel.all_spills,
            "vmem": kernel.vmem,
            "smem": kernel.smem,
        }


@dataclass(frozen=True)
class LatentWriteCase(WriteCase):
    """With the attention of a decode step, by which all pages would be copied if the two disagreed on their layout."""

    kv_heads: int = 1
    heads: int = 16
    rank: int = 512
    rope: int = 64

    def __str__(self) -> str:
        return f"write {self.tokens} latents of {self.rank} + {self.rope}, page {self.page_size}, {self.pages}"

    def program(self) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
        attention = MLACase(self.heads, self.rank, self.rope, self.page_size, self.new, self.pages)
        attend, (q_latent, q_rope, latent_pages, *batch) = attention.program()
        k_scale = None if self.pages == self.new else 0.1

        def step(pages: jax.Array, *arrays: jax.Array) -> Any:
            pages = write_latent_pages(pages, *arrays[:4], k_scale=k_scale)
            return pages, attend(*arrays[4:6], pages, *arrays[6:])

        shapes = ((self.tokens, self.rank), self.new), ((self.tokens, self.rope), self.new)
        new = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
        places = [jax.ShapeDtypeStruct((self.tokens,), jnp.int32)] * 2
        return step, [latent_pages, *new, *places, q_latent, q_rope, *batch]


QUICK = (WriteCase(4), LatentWriteCase())
FULL = (
    *QUICK,
    WriteCase(1),
    WriteCase(3, head_dim=64),
    WriteCase(4, pages="int8"),
    WriteCase(4, pages="float8_e4m3fn"),
    WriteCase(4, pages="float32"),
    WriteCase(8, page_size=16, tokens=2048),
    LatentWriteCase(page_size=16),
    LatentWriteCase(pages="int8"),
    LatentWriteCase(pages="float8_e4m3fn"),
    LatentWriteCase(pages="float32"),
)
