"""Compiles mosaic_gpu's kernels for the H100 (sm_90a) without a GPU, and reads what they use of a multiprocessor.

It takes JAX's CUDA plugin and NVIDIA's compilers, but no driver. Each shape is a step that writes its tokens into donated
pages and attends. Faulty is one that does not compile or that copies the pages, and a kernel that spills registers, of which
fewer thread blocks fit a multiprocessor than the grid counts on, or, if it is attention, that has no TMA loads and no wgmma.
A process per shape: Mosaic may abort it.
"""

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from chips import GPUS
from figures import Figures
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from paxserve.pallas_kernels import mosaic_gpu, mosaic_gpu_mla, write_latent_pages, write_pages

H100 = GPUS["sm_90a"]
LATENT_KERNEL = "mla_paged_attention"


@dataclass(frozen=True)
class Shape:
    """A batch to compile for: sizes of attention, and of the bucket. A decode step has one token per sequence.

    pages: the dtype of the pages if it is not the queries'.
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 32
    seqs: int = 128
    tokens: int | None = None
    dtype: str = "bfloat16"
    pages: str | None = None
    page_stride: int = 1
    window: bool = False
    soft_cap: float | None = None


@dataclass(frozen=True)
class LatentShape(Shape):
    """Of latent attention: head_dim is the kv_lora_rank."""

    head_dim: int = 512
    rope_dim: int = 64
    page_size: int = 64
    seqs: int = 64


EVERYTHING: dict[str, Any] = {"seqs": 64, "tokens": 512, "window": True, "soft_cap": 30.0, "page_stride": 4}
SHAPES = {
    "decode": Shape(),
    "decode, float16": Shape(dtype="float16"),
    "decode, head_dim 64": Shape(head_dim=64),
    "decode, head_dim 64, pages of 16": Shape(head_dim=64, page_size=16),
    "decode, pages of 8": Shape(page_size=8),
    "decode, pages of 64": Shape(page_size=64),
    "decode, pages of 256": Shape(page_size=256),
    "decode, MHA": Shape(heads=32, kv_heads=32),
    "decode, MQA of 64": Shape(heads=64, kv_heads=1),
    "decode, groups of 7": Shape(heads=28, kv_heads=4),
    "decode, one sequence": Shape(seqs=1),
    "mixed": Shape(seqs=64, tokens=512),
    "mixed, head_dim 64": Shape(seqs=64, tokens=512, head_dim=64),
    "mixed, groups of 7, float16": Shape(seqs=64, tokens=512, heads=28, kv_heads=4, dtype="float16"),
    "mixed, everything": Shape(**EVERYTHING, page_size=16),
    "mixed, head_dim 64, everything": Shape(**EVERYTHING, head_dim=64, heads=64, page_size=16),
    "decode, dealt pages": Shape(page_stride=4),
    "decode, int8": Shape(pages="int8"),
    "decode, int8, head_dim 64": Shape(pages="int8", head_dim=64),
    "decode, fp8": Shape(pages="float8_e4m3fn"),
    "decode, head_dim 256": Shape(heads=16, head_dim=256),
    "mixed, head_dim 64, fp8, everything": Shape(**EVERYTHING, page_size=8, head_dim=64, pages="float8_e4m3fn"),
    "mixed, head_dim 80, everything": Shape(**EVERYTHING, page_size=8, heads=32, kv_heads=32, head_dim=80),
    "mixed, head_dim 80, int8, everything": Shape(
        **EVERYTHING, page_size=8, head_dim=80, pages="int8", dtype="float16"
    ),
    "mixed, head_dim 96, everything": Shape(**EVERYTHING, page_size=8, head_dim=96),
    "mixed, head_dim 96, fp8, everything": Shape(**EVERYTHING, page_size=8, head_dim=96, pages="float8_e4m3fn"),
    "mixed, fp8, everything": Shape(**EVERYTHING, page_size=8, pages="float8_e4m3fn"),
    "mixed, head_dim 192, everything": Shape(**EVERYTHING, page_size=8, heads=16, head_dim=192),
    "mixed, head_dim 192, fp8, everything": Shape(
        **EVERYTHING, page_size=8, heads=16, head_dim=192, pages="float8_e4m3fn"
    ),
    "mixed, head_dim 256, everything": Shape(**EVERYTHING, page_size=8, heads=16, head_dim=256),
    "mixed, head_dim 256, no dealt pages": Shape(**EVERYTHING | {"page_stride": 1}, heads=16, head_dim=256),
    "mixed, head_dim 256, pages of 256": Shape(**EVERYTHING, page_size=256, heads=16, head_dim=256, dtype="float16"),
    "mixed, head_dim 256, int8, everything": Shape(
        **EVERYTHING, page_size=8, heads=16, head_dim=256, pages="int8", dtype="float16"
    ),
    "mixed, head_dim 256, fp8, everything": Shape(
        **EVERYTHING, page_size=8, heads=16, head_dim=256, pages="float8_e4m3fn"
    ),
    "decode, head_dim 256, int8": Shape(heads=16, head_dim=256, pages="int8"),
    "prefill of 8192": Shape(seqs=4, tokens=8192),
    "latent decode, 16 heads": LatentShape(heads=16, page_size=16),
    "latent decode, 64 heads": LatentShape(heads=64),
    "latent decode, 128 heads": LatentShape(heads=128, page_size=128),
    "latent decode, 128 heads, pages of 8": LatentShape(heads=128, page_size=8),
    "latent decode, 64 heads, int8": LatentShape(heads=64, pages="int8"),
    "latent decode, 128 heads, fp8": LatentShape(heads=128, page_size=16, pages="float8_e4m3fn"),
    "latent mixed, 16 heads": LatentShape(heads=16, tokens=512, page_size=16, soft_cap=30.0, page_stride=4),
    "latent mixed, 16 heads, int8": LatentShape(heads=16, tokens=512, pages="int8", soft_cap=30.0, page_stride=4),
    "latent mixed, 128 heads, float16": LatentShape(heads=128, tokens=512, dtype="float16"),
    "latent mixed, 128 heads, fp8": LatentShape(heads=128, tokens=512, page_size=128, pages="float8_e4m3fn"),
    "latent prefill of 2048, 64 heads": LatentShape(heads=64, seqs=4, tokens=2048),
    "latent mixed, rank 256, RoPE 128": LatentShape(heads=32, head_dim=256, rope_dim=128, tokens=512),
}
QUICK = (
    "decode",
    "mixed, everything",
    "mixed, head_dim 64, everything",
    "latent decode, 128 heads",
    "latent mixed, 16 heads, int8",
)


@dataclass(frozen=True)
class Row:
    """What one kernel of one shape takes. shared_bytes: of a thread block; fitting: thread blocks on a multiprocessor."""

    shape: str
    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    fitting: int
    fault: str | None

    @property
    def name(self) -> str:
        return f"{self.shape}: {self.kernel or 'none'}"

    def figures(self) -> Figures:
        names = {"registers": "registers", "spill_bytes": "spill_bytes", "shared_bytes": "shared", "fitting": "fitting"}
        return {name: getattr(self, own) for own, name in names.items()}


def compilers() -> dict[str, str]:
    return {package: version(package) for package in ("jax", "nvidia-cuda-nvcc")}


def check(names: Iterable[str] = SHAPES) -> list[Row]:
    """Compiles each shape in a process of its own, two at a time: one row per kernel, or one that says why there is none."""
    with ThreadPoolExecutor(2) as pool:
        return [row for rows in pool.map(_check_shape, names) for row in rows]


def _check_shape(name: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as dump:
        run = subprocess.run(
            [sys.executable, __file__, name],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": dump},
            capture_output=True,
            text=True,
        )
        if run.returncode:
            return [Row(name, "", 0, 0, 0, 0, f"does not compile: {run.stderr.strip()[-2000:]}")]
        return [_read_row(name, report) for report in sorted(Path(dump).glob("*.ptxas"))]


def _read_row(shape: str, report: Path) -> Row:
    kernel = re.sub(r"_\d+$", "", report.stem)
    said, ptx = report.read_text(), report.with_suffix(".ptx").read_text()
    registers = int(re.search(r"Used (\d+) registers", said)[1])  # type: ignore[index]
    spilled = max((int(count) for count in re.findall(r"(\d+) bytes spill", said)), default=0)
    threads, shared = _LAUNCH.search(report.with_suffix(".mlir-passes.log").read_text()).groups()  # type: ignore[union-attr]
    by_registers = H100.registers // (-(-registers // 8) * 8 * int(threads))
    fitting = min(by_registers, H100.shared_bytes // (int(shared) + H100.block_shared_bytes))
    fault = None
    if spilled:
        fault = "spills"
    elif kernel != "merge_pieces":
        of = SHAPES[shape]
        expected = 1 if kernel == LATENT_KERNEL else mosaic_gpu.ctas_per_sm(of.head_dim, of.pages or of.dtype)
        if fitting < expected and jax.__version_info__ >= (0, 11):
            fault = f"{expected} thread blocks should fit"
        elif not ("wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx):
            fault = "no TMA or no wgmma"
    return Row(shape, kernel, registers, spilled, int(shared), fitting, fault)


_LAUNCH = re.compile(r"gpu\.launch .*threads\([^)]*\) in \(%\w+ = %c(\d+),.*dynamic_shared_memory_size %c(\d+)_i32")


def _compile(shape: Shape) -> None:
    device = topologies.get_topology_desc(platform="cuda", target_config=H100.config, topology="1x1x1").devices[0]
    like = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    tokens, seqs = shape.tokens or shape.seqs, shape.seqs
    num_pages = (
        2 ** (23 if isinstance(shape, LatentShape) else 20) // shape.page_size
    )  # beside which temporaries are small
    dtype, pages_dtype = jnp.dtype(shape.dtype), jnp.dtype(shape.pages or shape.dtype)
    q = like((tokens, shape.heads, shape.head_dim), dtype)
    scales = {"k_scale": like((), jnp.float32)} if shape.pages else {}
    options: dict[str, Any] = {"page_offset": like((seqs,), jnp.int32) if shape.page_stride > 1 else None}
    write: Callable[..., jax.Array]
    if isinstance(shape, LatentShape):
        queries = q, like((tokens, shape.heads, shape.rope_dim), dtype)
        new = like((tokens, shape.head_dim), dtype), like((tokens, shape.rope_dim), dtype)
        pages = like((num_pages, shape.page_size, shape.head_dim + shape.rope_dim), pages_dtype)
        write, attend = write_latent_pages, functools.partial(mosaic_gpu_mla.attend, ctas=H100.multiprocessors)
    else:
        queries, new = (q,), (like((tokens, shape.kv_heads, shape.head_dim), dtype),) * 2
        pages = like((num_pages, shape.kv_heads, shape.page_size, 2 * shape.head_dim), pages_dtype)
        ctas = mosaic_gpu.ctas_per_sm(shape.head_dim, pages_dtype) * H100.multiprocessors
        write, attend = write_pages, functools.partial(mosaic_gpu.attend, ctas=ctas)
        scales |= {"v_scale": like((), jnp.float32)} if shape.pages else {}
        options["window"] = like((), jnp.int32) if shape.window else None

    def step(pages: Any, new: Any, places: Any, queries: Any, batch: Any, scales: Any, options: Any) -> Any:
        pages = write(pages, *new, *places, **scales)
        return pages, attend(
            *queries,
            pages,
            *batch,
            scale=shape.head_dim**-0.5,
            soft_cap=shape.soft_cap,
            page_stride=shape.page_stride,
            max_query_len=None if shape.tokens else 1,
            **{"k_scale": None} | scales,
            **options,
        )

    places = (like((tokens,), jnp.int32),) * 2
    batch = like((seqs, 2**15 // shape.page_size), jnp.int32), like((seqs,), jnp.int32), like((seqs + 1,), jnp.int32)
    with jax.default_device(device):  # Mosaic asks it for its architecture
        compiled = jax.jit(step, donate_argnums=0).lower(pages, new, places, queries, batch, scales, options).compile()
    memory: Any = compiled.memory_analysis()
    pool_bytes = pages.size * pages.dtype.itemsize
    if memory.alias_size_in_bytes < pool_bytes or memory.temp_size_in_bytes > pool_bytes / 4:
        raise RuntimeError(
            f"pages are copied: {memory.temp_size_in_bytes} bytes of temporaries for {pool_bytes} of pages"
        )


if __name__ == "__main__":
    _compile(SHAPES[sys.argv[1]])
