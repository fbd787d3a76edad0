"""Run by test_load_memory.py in one or more processes: loads a model in several formats and measures what that takes."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paxserve.model_source import resolve_model
from paxserve.models.registry import model_class
from paxserve.sharding import make_mesh, mesh_shape


def status(field):
    """Bytes of memory of this process, by the kernel's account."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def bytes_read():
    """By calls of read; what is mapped is not among them."""
    return int(Path("/proc/self/io").read_text().split()[1])


def load(path, mesh, scan_layers):
    """(parameters, figures in bytes)"""
    source = resolve_model(path)
    config = source.config
    declared = nnx.state(model_class(config)(config, dtype="bfloat16", scan_layers=scan_layers))
    read = bytes_read()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = status("VmRSS")
    params = jax.block_until_ready(source.load(declared, make_mesh(mesh_shape(mesh, config.num_kv_heads))))
    peak = status("VmHWM") - before
    own = [sum(shard.data.nbytes for shard in leaf.addressable_shards) for leaf in jax.tree.leaves(params)]
    return params, {"own": sum(own), "own_largest": max(own), "peak": peak, "read": bytes_read() - read}


def main():
    mesh, scan_layers, paths, *place = sys.argv[1:]
    if place:
        address, count, number = place
        jax.distributed.initialize(address, int(count), int(number))
    jax.block_until_ready(jax.jit(jnp.ones, static_argnums=0)(3))  # starts the compiler
    figures, first = {}, None
    for path in paths.split(","):
        params, figures[Path(path).name] = load(path, mesh, scan_layers == "scan")
        shards = [np.asarray(shard.data) for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards]
        if first is not None:
            assert all(np.array_equal(a, b) for a, b in zip(first, shards, strict=True)), path
        first = shards
        del params
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
