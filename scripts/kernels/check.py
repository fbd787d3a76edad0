"""Compiles the TPU attention kernels for chips that are described to libtpu, and prints a table of their schedules.

Cycles are read from the compiler's schedule (`schedule.py`), copies taken to be there when they are waited for. A decode's
are per cached token and layer, all KV heads together, at a batch of full blocks; a prefill's are given as the share of the
matrix units' peak, blocks without a mask. One process per chip: libtpu reads its flags when it is loaded.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from schedule import PASSES, Loop, read_kernels

from paxserve.pallas_kernels.mosaic_tpu_kernel import ISSUE

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
FLOPS_PER_CYCLE = {"v5e": 2**17, "v5p": 2**17, "v6e": 2**19, "tpu7x": 2**19}
"""Peak of one core, in bfloat16: 4 matrix units of 128 x 128, or 2 of 256 x 256 that take two rows per cycle."""

CONTEXT = 1536  # tokens, of the decodes
POOL = 2**20  # tokens that the pages hold: more than XLA would keep in VMEM


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

    def __str__(self) -> str:
        kind = "decode" if self.queries == 1 else "prefill"
        options = [f"window {self.window}"] * bool(self.window) + [f"soft cap {self.soft_cap}"] * bool(self.soft_cap)
        tables = ["tables of 1 M tokens"] * (self.max_pages * self.page_size >= 2**20)
        sizes = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}, page {self.page_size}"
        return ", ".join([f"{kind} {sizes}, {self.dtype} on {self.pages}", *options, *tables])


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


def compile_cases(target: str, cases: tuple[Case, ...], dump: Path) -> None:
    """In a process with libtpu's flags set: compile, and print what came of it, one JSON object per case."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from paxserve.pallas_kernels.mosaic_tpu import paged_attention

    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[target]).devices[0]
    mesh = Mesh(np.array([device]), ("x",))
    placed = NamedSharding(mesh, PartitionSpec())
    for case in cases:
        seqs = 128 if case.queries == 1 else 4

        def attend(q, pages, tables, lens, starts, case=case):
            has_scales = case.pages != case.dtype
            return paged_attention(
                q,
                pages,
                tables,
                lens,
                starts,
                scale=case.head_dim**-0.5,
                window=case.window,
                soft_cap=case.soft_cap,
                sinks=None,
                k_scale=0.1 if has_scales else None,
                v_scale=0.1 if has_scales else None,
                max_query_len=1 if case.queries == 1 else None,
                page_stride=1,
                page_offset=None,
            )

        shapes = (
            ((seqs * case.queries, case.heads, case.head_dim), case.dtype),
            ((POOL // case.page_size, case.kv_heads, case.page_size, 2 * case.head_dim), case.pages),
            ((seqs, case.max_pages), "int32"),
            ((seqs,), "int32"),
            ((seqs + 1,), "int32"),
        )
        args = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=placed) for shape, dtype in shapes]
        before = set(dump.iterdir())
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # by which Pallas knows the chip
                lowered = jax.jit(attend).lower(*args)
            lowered.compile()
        except Exception as error:
            print(json.dumps({"error": str(error).strip()[-400:]}), flush=True)
            continue
        kernels = read_kernels(dump, target, "paged_attention")
        result = {name: _figures(name, loop, case, target) for name, loop in kernels.items()}
        print(json.dumps({"kernels": result}), flush=True)
        for path in set(dump.iterdir()) - before:
            path.unlink()


def _figures(name: str, grid: Loop, case: Case, target: str) -> dict[str, float]:
    """Spills in the loops that do matrix work, and what a full block costs."""
    words = name.split("_")
    sizes = {unit: int(number) for number, unit in zip(words[2::2], words[3::2], strict=True)}
    rows, tiles, pages, keys = sizes["rows"], sizes["tiles"], sizes["pages"], sizes["keys"]
    step = next(loop for loop in grid.within()[1:] if loop.matmuls)
    block = next(loop for loop in step.inner if loop.matmuls)
    computing = [loop for loop in block.within() if loop.matmuls]
    spills = sum(loop.spills for loop in computing)

    in_loops = pages > ISSUE
    cycles = block.cost(tiles if in_loops else 0, 0 if in_loops else tiles * pages)
    if in_loops:
        turn = min(min(loop.walks.values()) for loop in block.inner if loop.copies > 1)
        cycles += tiles * (pages // ISSUE) * turn
    pieces = pages * case.page_size // keys
    if "units" in sizes:  # the loop's turns are parts of a block, of which one asks for pages
        turns = case.kv_heads * pieces // sizes["units"]
        cycles += (turns - 1) * block.cost(0, 0)
        flops = 4 * rows * case.head_dim * case.kv_heads * pages * case.page_size
        return {"spills": spills, "peak": flops / cycles / FLOPS_PER_CYCLE[target]}
    times = 1
    for loop, trip in zip(computing[1:], (x for x in (case.kv_heads // sizes["heads"], pieces) if x > 1), strict=True):
        times *= trip
        cycles += times * min(loop.walks.values())
    blocks = CONTEXT / (pages * case.page_size)
    cycles = blocks * cycles + step.cost(0, 0)
    return {"spills": spills, "cycles": cycles / (tiles * CONTEXT)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only a representative few of the shapes")
    parser.add_argument("--target", action="append", choices=TOPOLOGIES, help="a chip; all of them by default")
    parser.add_argument("--compile", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = QUICK if options.quick else FULL
    targets = options.target or list(TOPOLOGIES)
    if options.compile:
        compile_cases(targets[0], cases, options.compile)
        return 0

    lines = {target: _run(target, options.quick) for target in targets}
    head = "cycles per cached token or share of peak, spills in the hot loop"
    print(f"{head:90}" + "".join(f"{target:>16}" for target in targets))
    failed = False
    for number, case in enumerate(cases):
        cells = []
        for target in targets:
            is_there = number < len(lines[target])
            result = json.loads(lines[target][number]) if is_there else {"error": "the compiler ended"}
            if "error" in result:
                failed = True
                cells.append("FAILED")
                print(f"{target}, {case}: {result['error']}", file=sys.stderr)
                continue
            unit = "cycles" if case.queries == 1 else "peak"
            figures = next(figures for figures in result["kernels"].values() if unit in figures)
            value = f"{figures['cycles']:.2f}" if case.queries == 1 else f"{figures['peak']:.0%}"
            cells.append(f"{value}, {figures['spills']}")
        print(f"{case!s:90}" + "".join(f"{cell:>16}" for cell in cells))
    return int(failed)


def _run(target: str, quick: bool) -> list[str]:
    """The lines that the process for a target prints."""
    with tempfile.TemporaryDirectory() as dump:
        flags = {
            "xla_jf_dump_to": dump,
            "xla_jf_dump_llo_text": "true",
            "xla_jf_dump_llo_pass_label_regex": PASSES,
        }
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": " ".join(f"--{name}={value}" for name, value in flags.items()),
        }
        command = [sys.executable, __file__, "--target", target, "--compile", dump, *["--quick"] * quick]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        print(f"{target}: {done.stderr[-2000:]}", file=sys.stderr)
    return lines


if __name__ == "__main__":
    sys.exit(main())
