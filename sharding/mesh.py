"""The device mesh: what its axes mean, how a number of devices is spread over them, and how users name it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

MESH_AXES = ("data", "kv_head", "kv_page")

TENSOR = ("kv_head", "kv_page")
"""The axes of tensor parallelism: what one data group spreads its weights and its sequences' KV over."""


@dataclass(frozen=True)
class MeshShape:
    """The sizes of the mesh axes: `data` groups with sequences of their own, and in each `kv_head * kv_page` chips."""

    data: int = 1
    kv_head: int = 1
    kv_page: int = 1

    def __str__(self) -> str:
        return f"data={self.data},kv_head={self.kv_head},kv_page={self.kv_page}"

    @property
    def chips(self) -> int:
        return self.data * self.kv_head * self.kv_page

    @property
    def tensor(self) -> int:
        """The tensor-parallel degree."""
        return self.kv_head * self.kv_page


ONE_DEVICE = MeshShape()


def factor_tensor_parallel(degree: int, kv_heads: int) -> tuple[int, int]:
    """(kv_head, kv_page) of a tensor-parallel degree: heads are split as far as they go, what remains splits pages."""
    kv_head = math.gcd(degree, kv_heads)
    return kv_head, degree // kv_head


def mesh_shape(text: str, kv_heads: int) -> MeshShape:
    """The mesh that a text names: "16", chips that share every sequence, or axes by name, "data=2,kv_head=8,kv_page=2".

    A number is split as far as the KV heads go, and what remains of it splits pages. Axes that are not named are 1.
    Raises ValueError for anything else and for a kv_head axis that the KV heads cannot be split over.
    """
    if text.isdecimal() and int(text):
        kv_head, kv_page = factor_tensor_parallel(int(text), kv_heads)
        return MeshShape(kv_head=kv_head, kv_page=kv_page)
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in MESH_AXES or axis in sizes or not size.isdecimal() or not int(size):
            raise ValueError(
                f"mesh {text!r}: give a number of chips, as in 16, or axes among {', '.join(MESH_AXES)} with their sizes, "
                "as in data=1,kv_head=8,kv_page=2"
            )
        sizes[axis] = int(size)
    mesh = MeshShape(**sizes)
    if kv_heads % mesh.kv_head:
        raise ValueError(
            f"mesh {text!r}: {kv_heads} KV heads cannot be split over kv_head={mesh.kv_head}; give the number of chips "
            "alone, and what the heads leave over splits pages"
        )
    return mesh


def shape_of(mesh: Mesh) -> MeshShape:
    """The sizes of a mesh with the axes `MESH_AXES`."""
    return MeshShape(**mesh.shape)


def make_mesh(shape: MeshShape = ONE_DEVICE, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes `MESH_AXES` over the first `shape.chips` devices.

    Raises ValueError if there are fewer devices than that.
    """
    devices = list(jax.devices() if devices is None else devices)
    if shape.chips > len(devices):
        raise ValueError(f"a mesh of {shape} needs {shape.chips} devices; there are {len(devices)}")
    sizes = (shape.data, shape.kv_head, shape.kv_page)
    if devices[0].platform == "tpu" and shape.chips == len(devices):
        return Mesh(
            mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True), MESH_AXES
        )  # neighbours in the torus are neighbours here
    return Mesh(np.array(devices[: shape.chips]).reshape(sizes), MESH_AXES)
