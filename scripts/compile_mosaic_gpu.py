"""Compiles mosaic_gpu's kernels for the H100 (sm_90a) without a GPU, and says what they use of a multiprocessor.

    PYTHONPATH=. python scripts/compile_mosaic_gpu.py [--quick] [SHAPE ...]

needs JAX's CUDA plugin and NVIDIA's compilers in the same environment, but no driver:
`pip install --no-deps jax-cuda13-plugin==V jax-cuda13-pjrt==V nvidia-cuda-nvcc nvidia-nvvm`, V being JAX's version. Each
shape is a step that writes its tokens into donated pages and attends. Fails if one does not compile or copies the pages, if
a kernel spills registers, if fewer thread blocks fit a multiprocessor than the grid counts on, or if attention's code has no
TMA loads and no wgmma. `check` gives the same as rows of a table.
"""

import argparse
import functools
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 } runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
MULTIPROCESSORS, REGISTERS, SHARED_BYTES, THREADS = 132, 65536, 233472, 128
BLOCK_SHARED_BYTES = 1024  # that the system takes of each thread block's


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
    "mixed, head_dim 256, everything": Shape(**EVERYTHING, page_size=32, heads=16, head_dim=256),
    "mixed, head_dim 256, no dealt pages": Shape(**EVERYTHING | {"page_stride": 1}, heads=16, head_dim=256),
    "mixed, head_dim 256, pages of 256": Shape(**EVERYTHING, page_size=256, heads=16, head_dim=256, dtype="float16"),
    "prefill of 8192": Shape(seqs=4, tokens=8192),
}
QUICK = ("decode", "mixed, everything", "mixed, head_dim 64, everything")


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


def check(names: Iterable[str] = SHAPES) -> list[Row]:
    """Compiles each shape in a process of its own, two at a time: one row per kernel.

    Raises RuntimeError with the compiler's words if a shape does not compile.
    """
    with ThreadPoolExecutor(2) as pool:
        return [row for rows in pool.map(_check_shape, names) for row in rows]


def _check_shape(name: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as dump:
        run = subprocess.run(
            [sys.executable, __file__, "--compile", name],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": dump},
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise RuntimeError(f"{name} does not compile for sm_90a:\n{run.stderr[-3000:]}")
        return [_read_row(name, report) for report in sorted(Path(dump).glob("*.ptxas"))]


def _read_row(shape: str, report: Path) -> Row:
    from paxserve.pallas_kernels.mosaic_gpu import ctas_per_sm

    of, kernel = SHAPES[shape], re.sub(r"_\d+$", "", report.stem)
    said, ptx = report.read_text(), report.with_suffix(".ptx").read_text()
    registers = int(re.search(r"Used (\d+) registers", said)[1])  # type: ignore[index]
    spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill", said))
    shared = int(re.search(r"smem_scratch_bytes=(\d+)", report.with_suffix(".resources.txt").read_text())[1])  # type: ignore[index]
    by_registers = REGISTERS // (-(-registers // 8) * 8 * THREADS)
    fitting = min(by_registers, SHARED_BYTES // (shared + BLOCK_SHARED_BYTES))
    fault = None
    if spilled:
        fault = "spills"
    elif kernel == "paged_attention":
        if fitting < (expected := ctas_per_sm(of.head_dim, of.pages or of.dtype)):
            fault = f"{expected} thread blocks should fit"
        elif not ("wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx):
            fault = "no TMA or no wgmma"
    return Row(shape, kernel, registers, spilled, shared, fitting, fault)


def _compile(shape: Shape) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from paxserve.pallas_kernels import mosaic_gpu, write_pages

    device = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1").devices[0]
    like = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    tokens, seqs = shape.tokens or shape.seqs, shape.seqs

    def step(pages: Any, new: Any, places: Any, q: Any, batch: Any, window: Any, scale: Any) -> Any:
        pages = write_pages(pages, *new, *places, k_scale=scale, v_scale=scale)
        return pages, mosaic_gpu.attend(
            q,
            pages,
            *batch,
            scale=shape.head_dim**-0.5,
            window=window,
            soft_cap=shape.soft_cap,
            k_scale=scale,
            v_scale=scale,
            max_query_len=None if shape.tokens else 1,
            page_stride=shape.page_stride,
            ctas=mosaic_gpu.ctas_per_sm(shape.head_dim, pages.dtype) * MULTIPROCESSORS,
        )

    pool = (2**20 // shape.page_size, shape.kv_heads, shape.page_size, 2 * shape.head_dim)
    arguments = (
        like(pool, jnp.dtype(shape.pages or shape.dtype)),
        [like((tokens, shape.kv_heads, shape.head_dim), jnp.dtype(shape.dtype))] * 2,
        [like((tokens,), jnp.int32)] * 2,
        like((tokens, shape.heads, shape.head_dim), jnp.dtype(shape.dtype)),
        [like(of_batch, jnp.int32) for of_batch in ((seqs, 2**15 // shape.page_size), (seqs,), (seqs + 1,))],
        like((), jnp.int32) if shape.window else None,
        like((), jnp.float32) if shape.pages else None,
    )
    with jax.default_device(device):  # Mosaic asks it for its architecture
        memory = jax.jit(step, donate_argnums=0).lower(*arguments).compile().memory_analysis()
    pool_bytes = math.prod(pool) * arguments[0].dtype.itemsize
    if memory.alias_size_in_bytes < pool_bytes or memory.temp_size_in_bytes > pool_bytes / 10:
        raise RuntimeError(
            f"pages are copied: {memory.temp_size_in_bytes} bytes of temporaries for {pool_bytes} of pages"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shapes", nargs="*", help="names of shapes; all by default")
    parser.add_argument("--quick", action="store_true", help="only a few shapes")
    parser.add_argument("--compile", metavar="SHAPE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        _compile(SHAPES[args.compile])
        return 0
    rows = check(args.shapes or (QUICK if args.quick else SHAPES))
    print(f"{'shape':38} {'kernel':16} registers  spills  shared  blocks per SM")
    for row in rows:
        numbers = f"{row.registers:9} {row.spill_bytes:7} {row.shared_bytes:7} {row.fitting:14}"
        print(f"{row.shape:38} {row.kernel:16} {numbers}  {row.fault or ''}")
    return any(row.fault for row in rows)


if __name__ == "__main__":
    sys.exit(main())
