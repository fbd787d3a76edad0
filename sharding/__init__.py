"""The device mesh, the rules that map logical axis names onto it, and communication over it. Knows no model, no request."""

from paxserve.sharding.axes import RULES, expert_axes, named_sharding, split_over, to_spec
from paxserve.sharding.collectives import axes_rank, axes_size, exchange, gather, max_over, sum_over, sum_scatter
from paxserve.sharding.mesh import (
    MESH_AXES,
    ONE_DEVICE,
    TENSOR,
    MeshShape,
    factor_tensor_parallel,
    make_mesh,
    mesh_shape,
    shape_of,
)

__all__ = [
    "MESH_AXES",
    "ONE_DEVICE",
    "RULES",
    "TENSOR",
    "MeshShape",
    "axes_rank",
    "axes_size",
    "exchange",
    "expert_axes",
    "factor_tensor_parallel",
    "gather",
    "make_mesh",
    "max_over",
    "mesh_shape",
    "named_sharding",
    "shape_of",
    "split_over",
    "sum_over",
    "sum_scatter",
    "to_spec",
]
