"""How much memory the KV cache of a model takes: per token, sequence, batch and chip.

The bytes of a page are those that the engine sizes its pool by (`models/kv_shape.py`).
"""

from dataclasses import dataclass

from paxserve.models.kv_shape import KVShape
from paxserve.sharding import MeshShape, mesh_shape


@dataclass(frozen=True)
class Footprint:
    """The KV cache of `batch` sequences of `context` tokens each; all sizes in bytes unless they say otherwise.

    bytes_per_token, sequence_bytes: of the values themselves. With `expanded_bytes_per_token`, what MLA would take if it
        cached K and V of every head (None for other attention).
    pages_per_sequence, sequence_page_bytes, batch_bytes: in whole pages, as they are allocated, the scales left out. A pool
        has one more page, the null page.
    scale_bytes: the quantisation scales of the model, on every chip in full.
    bytes_per_chip: of the fullest chip, pages and scales, where each sequence begins on the chip after the one where the
        sequence before it ended.
    visible_bytes: of a sequence, what the next token can still see through sliding windows. All of its pages are kept, so
        this is a lower bound and not what is allocated.
    """

    model: str
    kv_dtype: str
    context: int
    batch: int
    page_size: int
    mesh: MeshShape
    values_per_token: int
    bytes_per_token: int
    expanded_bytes_per_token: int | None
    sequence_bytes: int
    visible_bytes: int
    pages_per_sequence: int
    sequence_page_bytes: int
    batch_bytes: int
    scale_bytes: int
    bytes_per_chip: int


def footprint(
    model: str,
    shape: KVShape,
    context: int,
    *,
    batch: int = 1,
    kv_dtype: str = "auto",
    page_size: int = 32,
    mesh: str = "1",
) -> Footprint:
    """The footprint of a model by its `KVShape`; `model` is the name to show.

    kv_dtype: one of KV_DTYPES, "auto" for the checkpoint's. mesh: what `mesh_shape` reads.
    Raises ValueError for a size below 1, a dtype or a mesh that cannot be.
    """
    for name, size in {"context": context, "batch": batch, "page_size": page_size}.items():
        if size < 1:
            raise ValueError(f"{name}={size}: must be at least 1")
    dtype = shape.dtype if kv_dtype == "auto" else kv_dtype
    axes = mesh_shape(mesh, shape.heads)
    page = shape.page_bytes(page_size, dtype)
    pages = -(-context // page_size)
    group_pages = -(-batch // axes.data) * pages
    return Footprint(
        model=model,
        kv_dtype=dtype,
        context=context,
        batch=batch,
        page_size=page_size,
        mesh=axes,
        values_per_token=shape.values_per_token,
        bytes_per_token=shape.bytes_per_token(dtype),
        expanded_bytes_per_token=shape.expanded_bytes_per_token(dtype),
        sequence_bytes=context * shape.bytes_per_token(dtype),
        visible_bytes=shape.visible_bytes(context, dtype),
        pages_per_sequence=pages,
        sequence_page_bytes=pages * page,
        batch_bytes=batch * pages * page,
        scale_bytes=shape.scale_bytes(dtype),
        bytes_per_chip=-(-group_pages // axes.kv_page) * page // axes.kv_head + shape.scale_bytes(dtype),
    )


def query_key_pairs(tokens: int, *, cached: bool) -> int:
    """Query-key products, per head and layer, of producing `tokens` tokens one by one under a causal mask.

    With a cache each token is a query once: T (T + 1) / 2. Without, every step computes its whole prefix again, which
    sums those triangles: T (T + 1) (T + 2) / 6.
    """
    triangle = tokens * (tokens + 1) // 2
    return triangle if cached else triangle * (tokens + 2) // 3
