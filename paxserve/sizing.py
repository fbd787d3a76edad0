"""How large the KV pool is, and with it everything else on the device."""

from collections.abc import Callable
from dataclasses import replace

import jax

from paxserve.config import EngineConfig
from paxserve.limits import Limits
from paxserve.models.config import ModelConfig
from paxserve.models.kv_shape import kv_shape
from paxserve.sharding import MeshShape

CPU_KV_CACHE_BYTES = 2**30
"""Size of the KV pool on CPU unless the options say otherwise, or all that max_num_seqs sequences can use if that is less."""


MEMORY_FRACTION = 0.9
"""Of a TPU's or GPU's memory, what the engine uses unless the options say otherwise."""


def device_memory(device: jax.Device) -> int | None:
    """Bytes of a device's memory that can be allocated; None on CPU, which shares the host's."""
    return None if device.platform == "cpu" else int((device.memory_stats() or {})["bytes_limit"])


def bytes_per_page(model: ModelConfig, page_size: int, dtype: str, mesh: MeshShape) -> int:
    """KV bytes of one page over all layers on the device that holds it."""
    return kv_shape(model).page_bytes(page_size, dtype) // mesh.kv_head


def size_limits(
    config: EngineConfig,
    model: ModelConfig,
    dtype: str,
    mesh: MeshShape,
    memory: int | None,
    step_bytes: Callable[[Limits], int],
) -> Limits:
    """The sizes in effect on a mesh of devices alike.

    memory: bytes of a device's memory; None on CPU, where the pool does not follow from it.
    step_bytes: bytes that the largest step needs of a device, weights and a pool of the given limits included; asked only
    where the pool takes what is left of the device's memory.
    Raises ValueError if the pool cannot hold one sequence of max_model_len.
    """
    on_cpu = memory is None
    if on_cpu and config.memory_fraction is not None:
        raise ValueError(
            f"memory_fraction={config.memory_fraction}: on CPU the pool does not follow from the memory; "
            "set kv_cache_bytes or num_pages"
        )
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len={max_model_len}: the model's context ends at {model.max_position_embeddings} tokens"
        )
    max_num_seqs = config.max_num_seqs or (32 if on_cpu else 256)
    limits = Limits(
        page_size=config.page_size,
        num_pages=config.num_pages or 2,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max(1024 if on_cpu else 2048, max_num_seqs),
        mesh=mesh,
    )
    if limits.max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens={limits.max_num_batched_tokens}: a step must hold one token of each of "
            f"{max_num_seqs} sequences; raise it or lower max_num_seqs"
        )
    if config.num_pages is None:
        page = bytes_per_page(model, config.page_size, dtype, mesh)
        if config.kv_cache_bytes is not None:
            pool = config.kv_cache_bytes
        elif memory is None:
            pool = min(CPU_KV_CACHE_BYTES, (max_num_seqs * limits.entries_per_seq + 1) * page)
        else:
            # The largest step's needs beside the pool do not depend on the pool's size: ask with the smallest one.
            usable_bytes = int(memory * (config.memory_fraction or MEMORY_FRACTION))
            pool = usable_bytes - step_bytes(limits) + limits.num_pages * page
        limits = replace(limits, num_pages=pool // page)
    if limits.num_pages < 2:
        raise ValueError(
            f"the KV pool would have {limits.num_pages} pages of {config.page_size} tokens; it needs at least 2, as the "
            "first one is the null page: give it more memory (num_pages, kv_cache_bytes), or lower page_size"
        )
    if config.max_model_len is None:
        return replace(limits, max_model_len=min(max_model_len, limits.pool_tokens))
    if limits.pool_tokens < max_model_len:
        raise ValueError(
            f"the KV pool of {limits.num_pages} pages holds {limits.pool_tokens} tokens, less than "
            f"max_model_len={max_model_len}: lower max_model_len, or raise num_pages or kv_cache_bytes"
        )
    return limits
