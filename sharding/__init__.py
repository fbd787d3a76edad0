"""The device mesh and the rules that map logical axis names onto it. Knows no model and no request."""

from paxserve.sharding.axes import MESH_AXES, RULES, factor_tensor_parallel, logical_to_spec, make_mesh, named_sharding

__all__ = ["MESH_AXES", "RULES", "factor_tensor_parallel", "logical_to_spec", "make_mesh", "named_sharding"]
