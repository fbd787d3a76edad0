"""Logical axis names and the mesh axes they are split over."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "kv_head", "kv_page")

# Tensor parallelism runs over the joint (kv_head, kv_page) axes; the KV heads themselves split only over kv_head, and
# what is left of the tensor-parallel degree splits the pages of each sequence. Latent attention has no KV heads:
# its query heads take the whole degree ("heads"), and the ranks of its projections are not split.
RULES: Mapping[str, str | tuple[str, ...] | None] = {
    "vocab": ("kv_head", "kv_page"),
    "mlp": ("kv_head", "kv_page"),
    "heads": ("kv_head", "kv_page"),
    "expert": MESH_AXES,
    "kv_heads": "kv_head",
    "page": ("data", "kv_page"),
    "embed": None,
    "group": None,
    "head_dim": None,
    "latent": None,
    "layers": None,
}


def factor_tensor_parallel(degree: int, kv_heads: int) -> tuple[int, int]:
    """(kv_head, kv_page) of a tensor-parallel degree: heads are split as far as they go, what remains splits pages."""
    kv_head = math.gcd(degree, kv_heads)
    return kv_head, degree // kv_head


def make_mesh(
    data: int = 1, kv_head: int = 1, kv_page: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with the axes `MESH_AXES` over the first `data * kv_head * kv_page` devices.

    Raises ValueError if there are fewer devices than that.
    """
    devices = list(jax.devices() if devices is None else devices)
    needed = data * kv_head * kv_page
    if needed > len(devices):
        raise ValueError(
            f"a mesh of data={data}, kv_head={kv_head}, kv_page={kv_page} needs {needed} devices; there are {len(devices)}"
        )
    return Mesh(np.array(devices[:needed]).reshape(data, kv_head, kv_page), MESH_AXES)


def logical_to_spec(
    axes: Sequence[str | None], rules: Mapping[str, str | tuple[str, ...] | None] = RULES
) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions carry these logical names (None: not split).

    Raises KeyError for a name the rules do not know, so that a misspelt axis is never silently replicated.
    """
    return PartitionSpec(*(None if axis is None else rules[axis] for axis in axes))


def named_sharding(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
    """`logical_to_spec` bound to a mesh."""
    return NamedSharding(mesh, logical_to_spec(axes))
