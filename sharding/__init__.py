"""The device mesh, the rules that map logical axis names onto it, communication over it, and start-up on several hosts.

Knows no model and no request.
"""

from paxserve.sharding.axes import RULES, expert_axes, named_sharding, split_over, to_spec
from paxserve.sharding.collectives import axes_rank, axes_size, exchange, gather, logsumexp_over, sum_over, sum_scatter
from paxserve.sharding.distributed import ClusterError, Place, find_place, join, leave
from paxserve.sharding.link import Link
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
    "ClusterError",
    "Link",
    "MeshShape",
    "Place",
    "axes_rank",
    "axes_size",
    "exchange",
    "expert_axes",
    "factor_tensor_parallel",
    "find_place",
    "gather",
    "join",
    "leave",
    "logsumexp_over",
    "make_mesh",
    "mesh_shape",
    "named_sharding",
    "shape_of",
    "split_over",
    "sum_over",
    "sum_scatter",
    "to_spec",
]
