"""Compiles kernels for TPUs that are described to libtpu, and reads their figures from the schedules it writes.

One process per chip: libtpu reads its flags when it is loaded. A case has a name, `str(case)`; `program()`, the function and
the arguments to compile; `prefix`, with which its kernels' names begin; `figures(kernels, target)`; if it is ours
`must_not_spill(target)`; if its block sizes are tuned `tuned`, `tuned_shape` and `module`, which looks them up; and, if it
writes in place, `donated`, the numbers of those arguments.
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gqa_cases
import jax
import mla_cases
import numpy as np
import peers
import write_cases
from chips import TPUS
from figures import Figures
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from schedule import PASSES, read_kernels

QUICK = (*gqa_cases.QUICK, *mla_cases.QUICK, *write_cases.QUICK)
FULL = (*gqa_cases.FULL, *mla_cases.FULL, *write_cases.FULL)
CASES = {str(case): case for case in (*FULL, *peers.CASES)}

Sizes = dict[str, int]


def compilers() -> dict[str, str]:
    return {package: version(package) for package in ("jax", "libtpu")}


def run(target: str, names: list[str], sizes: list[Sizes] | None = None) -> list[Figures | str]:
    """The figures of each case on a chip, or what went wrong with it.

    sizes: block sizes, case by case, instead of those that are looked up.
    """
    jobs = [*zip(names, sizes or [None] * len(names), strict=True)]
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
        done = subprocess.run(
            [sys.executable, __file__, target, dump],
            input=json.dumps(jobs),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    results = [json.loads(line.removeprefix(RESULT)) for line in done.stdout.splitlines() if line.startswith(RESULT)]
    ended = f"the compiling process ended with status {done.returncode}: {done.stderr.strip()[-2000:]}"
    return results + [ended] * (len(jobs) - len(results))


RESULT = "result: "


def block_sizes(case: Any, sizes: Sizes) -> Any:
    """A context in which a case's kernel has these block sizes; the other that is compiled with it has those looked up."""
    look_up = case.module.block_sizes
    return patch.object(
        case.module, "block_sizes", lambda kernel, **shape: sizes if kernel == case.tuned else look_up(kernel, **shape)
    )


def _work(target: str, dump: Path) -> None:
    """In a process with libtpu's flags set: compile, and print what came of each job."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[target].topology).devices[0]
    mesh = Mesh(np.array([device]), ("x",))
    placed = NamedSharding(mesh, PartitionSpec())
    for name, sizes in json.load(sys.stdin):
        before = set(dump.iterdir())
        try:
            case = CASES[name]
            with block_sizes(case, sizes) if sizes else nullcontext():
                result = _compile(case, target, mesh, placed, dump)
        except Exception as error:
            result = f"{type(error).__name__}: {str(error).strip()[-400:]}"
        print(RESULT + json.dumps(result), flush=True)
        for path in set(dump.iterdir()) - before:
            path.unlink()


def _compile(case: Any, target: str, mesh: Mesh, placed: NamedSharding, dump: Path) -> Figures:
    function, args = case.program()
    donated = getattr(case, "donated", ())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placed), args)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # by which Pallas knows the chip
        lowered = jax.jit(function, donate_argnums=donated).lower(*args)
    temporary = lowered.compile().memory_analysis().temp_size_in_bytes
    if any(temporary > args[i].size * args[i].dtype.itemsize / 8 for i in donated):
        raise ValueError(f"pages are not written in place: {temporary} bytes of temporary arrays")
    return case.figures(read_kernels(dump, target, case.prefix), target)


if __name__ == "__main__":
    _work(sys.argv[1], Path(sys.argv[2]))
