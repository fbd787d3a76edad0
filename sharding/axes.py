"""Logical axis names and the mesh axes they are split over."""

from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paxserve.sharding.mesh import MESH_AXES, TENSOR, MeshShape, shape_of

# Tensor parallelism runs over the joint (kv_head, kv_page) axes; the KV heads themselves split only over kv_head, and
# what is left of the tensor-parallel degree splits the pages of each sequence and, of q's, k's and v's weights, each
# head's width. Latent attention has no KV heads: its query heads take the whole degree ("heads"), and the ranks of its
# projections are not split. What comes out of attention, all heads side by side, is one axis ("attended"), which takes the
# whole degree. Experts: see `expert_axes`.
RULES: Mapping[str, tuple[str, ...]] = {
    "vocab": TENSOR,
    "mlp": TENSOR,
    "heads": TENSOR,
    "kv_heads": ("kv_head",),
    "kv_head_dim": ("kv_page",),
    "attended": TENSOR,
    "page": ("data", "kv_page"),
    "group": (),
    "head_dim": (),
    "embed": (),
    "latent": (),
    "layers": (),
}


def expert_axes(experts: int, mesh: MeshShape) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the mesh axes that so many experts are spread over, those that each expert's width is split over).

    Whole experts go over as many axes as their number divides by, so that a device reads no more of them than it must.
    """
    over: tuple[str, ...] = ()
    parts = 1
    for axis in MESH_AXES:
        size = getattr(mesh, axis)
        if experts % (parts * size) == 0:
            over, parts = (*over, axis), parts * size
    return over, tuple(axis for axis in MESH_AXES if axis not in over)


def split_over(axes: Sequence[str | None], shape: Sequence[int], mesh: MeshShape) -> list[tuple[str, ...]]:
    """For each dimension, the mesh axes that it is split over; None and the empty tuple are not split.

    axes: the dimensions' logical names. Raises KeyError for a name that has no rule, so that a misspelt axis is never
    silently replicated.
    """
    rules = dict(RULES)
    if "expert" in axes:
        rules["expert"], rules["expert_mlp"] = expert_axes(shape[axes.index("expert")], mesh)
    return [() if axis is None else rules[axis] for axis in axes]


def to_spec(axes: Sequence[str | None], shape: Sequence[int], mesh: MeshShape) -> PartitionSpec:
    """The PartitionSpec of an array of this shape whose dimensions carry these logical names."""
    return PartitionSpec(*(over or None for over in split_over(axes, shape, mesh)))


def named_sharding(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """`to_spec` bound to a mesh."""
    return NamedSharding(mesh, to_spec(axes, shape, shape_of(mesh)))
