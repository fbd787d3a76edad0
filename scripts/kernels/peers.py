"""Others' decode kernels, which the report compiles as it does ours: JAX's ragged paged attention and tpu-inference's.

tpu-inference is installed without what it depends on. Its kernels need none of it but a logger and the chip's name, which
stand in here, and `pltpu.reciprocal`, which JAX now has as `pl.reciprocal`.
"""

import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from figures import CONTEXT, SEQS, Figures, stored_bytes
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from schedule import Kernel, Loop

NAMES = {"TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e", "TPU7x": "TPU v7"}
GENERATIONS = {"TPU v5 lite": 5, "TPU v5": 5, "TPU v6 lite": 6, "TPU7x": 7}

Program = tuple[Any, list[jax.ShapeDtypeStruct]]


LATENT, ROPE = 512, 64  # of MLA


@dataclass(frozen=True)
class Origin:
    """Another's kernel.

    build: of heads, KV heads, head_dim and page_size, the function and its arguments, of which number `pages` is the pages.
    prefix: of the kernel's name. turns: given its name, those of its loops per sequence, from the outermost to the one that
    does the matrix work.
    """

    name: str
    build: Callable[[int, int, int, int], Program]
    pages: int
    prefix: str
    turns: Callable[[str], tuple[float, ...]]


@dataclass(frozen=True)
class Peer:
    """A decode by another's kernel; `kv_heads` is None if it is multi-head latent attention."""

    origin: Origin
    heads: int
    kv_heads: int | None
    head_dim: int = 128
    page_size: int = 64

    @property
    def kernel(self) -> str:
        return self.origin.name

    @property
    def prefix(self) -> str:
        return self.origin.prefix

    @property
    def shape(self) -> str:
        """As that of our case beside which it stands."""
        if self.kv_heads is None:
            return f"decode {self.heads} heads of {LATENT} + {ROPE}, page {self.page_size}"
        return f"decode {self.heads}/{self.kv_heads} heads of {self.head_dim}, page {self.page_size}"

    def __str__(self) -> str:
        return f"{self.kernel}, {self.shape}"

    def program(self) -> Program:
        return self.origin.build(self.heads, self.kv_heads or 1, self.head_dim, self.page_size)

    def figures(self, kernels: dict[str, Kernel], target: str) -> Figures:
        (name, kernel), *_ = kernels.items()
        loops, turns = _to_hot_loop(kernel), self.origin.turns(name)
        most_copies = [max(copies for _, copies in loop.walks) for loop in loops]
        filling = max(i for i, most in enumerate(most_copies) if most)  # the loop that starts a block's pages
        block_pages = CONTEXT / self.page_size / turns[filling]
        alone = [times * loop.cost(0, 0) for loop, times in zip(loops, turns, strict=True)]
        filled = turns[filling] * loops[filling].cost(0, min(int(block_pages), most_copies[filling]))
        copies = filled - alone[filling]
        pages = self.program()[1][self.origin.pages]
        row = LATENT + ROPE if self.kv_heads is None else 2 * self.kv_heads * self.head_dim
        return {
            "cycles": (sum(alone) + copies) / CONTEXT,
            "hot": alone[-1] / CONTEXT,
            "copies": copies / CONTEXT,
            "hot_spills": loops[-1].spills,
            "spills": kernel.all_spills,
            "vmem": kernel.vmem,
            "smem": kernel.smem,
            "bytes": stored_bytes(pages.shape[1:], "bfloat16") / self.page_size,
            "least_bytes": 2 * row,
        }


def _to_hot_loop(kernel: Kernel) -> list[Loop]:
    """The loops, one within the other, to the first that does matrix work itself: that of decodes."""
    loops: list[Loop] = []
    inner: list[Loop] = kernel.inner
    while inner := [loop for loop in inner if loop.matmuls]:
        loops.append(inner[0])
        inner = inner[0].inner
    return loops


def _turns(name: str) -> tuple[float, ...]:
    """Of tpu-inference's loops over sequences, blocks of keys, and the parts of a block if it has any."""
    if match := re.search(r"bkv_(\d+)_(\d+)", name):
        return (1, *(CONTEXT / int(keys) for keys in match.groups()))
    pages, page_size = re.search(r"bkvp_(\d+)-p_(\d+)", name).groups()  # type: ignore[union-attr]
    return 1, CONTEXT / (int(pages) * int(page_size))


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _batch(page_size: int, flat: bool) -> list[jax.ShapeDtypeStruct]:
    """Lengths, block tables and query starts."""
    pages = CONTEXT // page_size
    tables = (SEQS * pages,) if flat else (SEQS, pages)
    return [_array(SEQS, dtype=jnp.int32), _array(*tables, dtype=jnp.int32), _array(SEQS + 1, dtype=jnp.int32)]


def _num_pages(page_size: int) -> int:
    return SEQS * CONTEXT // page_size + 1


JAX_QUERIES, JAX_KEYS = 32, 512  # of a block


def _jax(heads: int, kv_heads: int, head_dim: int, page_size: int) -> Program:
    def attend(*arrays: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            *arrays,
            sm_scale=head_dim**-0.5,
            num_kv_pages_per_block=JAX_KEYS // page_size,
            num_queries_per_block=JAX_QUERIES,
            vmem_limit_bytes=64 * 2**20,
        )

    pages = _array(_num_pages(page_size), page_size, 2 * kv_heads, head_dim)
    return attend, [
        _array(SEQS, heads, head_dim),
        pages,
        *_batch(page_size, flat=False),
        _array(1, dtype=jnp.int32),
    ]


def _tpu_inference(module: str) -> Any:
    """One of tpu-inference's modules, its package's own start-up left out."""
    if "tpu_inference" not in sys.modules:
        found = importlib.util.find_spec("tpu_inference")
        if found is None:
            raise ModuleNotFoundError("tpu-inference is not installed; scripts/kernel_report installs it")

        def kind() -> str:
            return jax.sharding.get_abstract_mesh().abstract_device.device_kind

        package, logger, utils = (types.ModuleType(f"tpu_inference{name}") for name in ("", ".logger", ".utils"))
        package.__path__ = list(found.submodule_search_locations or ())
        logger.init_logger = lambda _: _Silent()  # type: ignore[attr-defined]
        utils.get_device_name = lambda *_: NAMES[kind()]  # type: ignore[attr-defined]
        sys.modules |= {each.__name__: each for each in (package, logger, utils)}
        if not hasattr(pltpu, "reciprocal"):
            pltpu.reciprocal = pl.reciprocal
        util = importlib.import_module("tpu_inference.kernels.ragged_paged_attention.v3.util")
        util.get_tpu_version = lambda: GENERATIONS[kind()]
    return importlib.import_module(f"tpu_inference.kernels.{module}")


class _Silent:
    """A logger."""

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _tpu_inference_gqa(heads: int, kv_heads: int, head_dim: int, page_size: int) -> Program:
    name = "kernel_hd64" if head_dim == 64 else "kernel"
    module = _tpu_inference(f"ragged_paged_attention.v3.{name}")
    function = module.ragged_paged_attention_hd64 if head_dim == 64 else module.ragged_paged_attention

    def attend(*arrays: jax.Array) -> Any:
        return function(*arrays, sm_scale=head_dim**-0.5)

    return attend, [
        _array(SEQS, heads, head_dim),
        _array(SEQS, kv_heads, head_dim),
        _array(SEQS, kv_heads, head_dim),
        _array(*module.get_kv_cache_shape(_num_pages(page_size), page_size, kv_heads, head_dim, jnp.bfloat16)),
        *_batch(page_size, flat=True),
        _array(3, dtype=jnp.int32),
    ]


MLA_KEYS = 512  # of a block


def _tpu_inference_mla(heads: int, _: int, __: int, page_size: int) -> Program:
    module = _tpu_inference("mla.v2.kernel")

    def attend(*arrays: jax.Array) -> Any:
        return module.mla_ragged_paged_attention(
            *arrays,
            sm_scale=(LATENT + ROPE) ** -0.5,
            num_kv_pages_per_block=MLA_KEYS // page_size,
            num_queries_per_block=1,
            vmem_limit_bytes=pltpu.get_tpu_info().vmem_capacity_bytes * 7 // 8,
        )

    return attend, [
        _array(heads, SEQS, LATENT),
        _array(SEQS, heads, ROPE),
        _array(SEQS, LATENT),
        _array(SEQS, ROPE),
        _array(*module.get_kv_cache_shape(_num_pages(page_size), page_size, 640, jnp.bfloat16)),
        *_batch(page_size, flat=True),
        _array(3, dtype=jnp.int32),
    ]


JAX = Origin(
    "jax ragged_paged_attention",
    _jax,
    pages=1,
    prefix="ragged_paged_attention_kernel",
    turns=lambda _: (1 / JAX_QUERIES, 1, CONTEXT / JAX_KEYS),
)
RPA = Origin("tpu-inference RPA v3", _tpu_inference_gqa, pages=3, prefix="RPAd", turns=_turns)
RPA_64 = Origin("tpu-inference RPA v3, head_dim 64", _tpu_inference_gqa, pages=3, prefix="RPA-HD_64", turns=_turns)
MLA = Origin("tpu-inference MLA v2", _tpu_inference_mla, pages=4, prefix="MLA-d", turns=_turns)

CASES = (
    Peer(JAX, 8, 4),
    Peer(RPA, 8, 4),
    Peer(JAX, 4, 1),
    Peer(RPA, 4, 1),
    Peer(RPA_64, 9, 3, head_dim=64),
    Peer(JAX, 8, 4, page_size=16),
    Peer(RPA, 8, 4, page_size=16),
    Peer(RPA, 32, 8, page_size=32),
    Peer(RPA, 8, 1, page_size=256),
    Peer(RPA, 8, 4, head_dim=256),
    Peer(MLA, 16, None, page_size=128),
    Peer(MLA, 128, None, page_size=128),
)
