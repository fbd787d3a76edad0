"""Gathers, scatters and sums of exponentials over a mesh, in one stage and in two, give what NumPy gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paxserve.sharding.collectives import _stages

CHECK = """
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from paxserve.sharding import MESH_AXES, gather, logsumexp_over, sum_scatter

rng = np.random.default_rng(0)
for sizes in ((1, 1, 16), (1, 2, 12), (2, 1, 12), (1, 3, 8), (1, 24, 1)):
    mesh = Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), MESH_AXES)
    for axes in (("kv_page",), ("kv_head", "kv_page")):
        for dimension in (0, 1, -1):
            spec = [None] * 3
            spec[dimension] = axes

            def run(function, x, before, after):
                mapped = jax.shard_map(function, mesh=mesh, in_specs=before, out_specs=after, check_vma=False)
                return np.asarray(jax.jit(mapped)(x))

            x = rng.standard_normal((48, 48, 48))
            np.testing.assert_array_equal(run(lambda x: gather(x, axes, dimension), x, P(*spec), P()), np.float32(x))
            parts = rng.integers(-9, 9, (np.prod([mesh.shape[axis] for axis in axes]), 48, 48, 48))
            summed = run(lambda x: sum_scatter(x[0], axes, dimension), parts, P(axes), P(*spec))
            np.testing.assert_array_equal(summed, parts.sum(axis=0))
            logs = np.where(parts[:, 0] < -5, -np.inf, parts[:, 0]).astype(np.float32)
            logs[:, 0, 0] = -np.inf
            with np.errstate(divide="ignore"):
                expected = np.log(np.exp(logs.astype(np.float64)).sum(axis=0))
            found = run(lambda x: logsumexp_over(x[0], axes), logs, P(axes), P())
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
"""


def test_on_24_devices() -> None:
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=24", "PYTHONPATH": "."}
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        env=os.environ | flags,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("devices", "group_sizes"), [(8, [0]), (13, [0]), (17, [0]), (16, [4, 4]), (24, [4, 6]), (64, [8, 8])]
)
def test_many_devices_go_in_two_stages(devices: int, group_sizes: list[int]) -> None:
    assert [len(groups[0]) if groups else 0 for groups in _stages(devices)] == group_sizes
