"""Attention over paged KV and the pages' layout: pure functions of arrays that know no model, request or mesh."""

from paxserve.pallas_kernels.api import (
    IMPLEMENTATIONS,
    choose_implementation,
    mla_paged_attention,
    paged_attention,
    schedule_attention,
    supported,
    write_latent_pages,
    write_pages,
)
from paxserve.pallas_kernels.check_batch import check_batch
from paxserve.pallas_kernels.layout import (
    GQASizes,
    MLASizes,
    copy_pages,
    gqa_pages_shape,
    init_gqa_pages,
    latent_page_size,
    load,
    mla_pages_shape,
    page_size_of,
    pairs_latents,
    stacks_kv,
    storage_dtype,
)
from paxserve.pallas_kernels.target import target

__all__ = [
    "IMPLEMENTATIONS",
    "GQASizes",
    "MLASizes",
    "check_batch",
    "choose_implementation",
    "copy_pages",
    "gqa_pages_shape",
    "init_gqa_pages",
    "latent_page_size",
    "load",
    "mla_paged_attention",
    "mla_pages_shape",
    "page_size_of",
    "paged_attention",
    "pairs_latents",
    "schedule_attention",
    "stacks_kv",
    "storage_dtype",
    "supported",
    "target",
    "write_latent_pages",
    "write_pages",
]
