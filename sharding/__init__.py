"""The device mesh, the rules that map logical axis names onto it, and start-up on several hosts. Knows no model and no
request."""

from paxserve.sharding.axes import MESH_AXES, RULES, factor_tensor_parallel, logical_to_spec, make_mesh, named_sharding
from paxserve.sharding.distributed import ClusterError, Place, find_place, join, leave
from paxserve.sharding.link import Link

__all__ = [
    "MESH_AXES",
    "RULES",
    "ClusterError",
    "Link",
    "Place",
    "factor_tensor_parallel",
    "find_place",
    "join",
    "leave",
    "logical_to_spec",
    "make_mesh",
    "named_sharding",
]
