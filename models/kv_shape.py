"""What a model caches of each token: the one place where the bytes of a KV cache are worked out.

The engine sizes its pool by it, and `paxserve footprint` prints it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paxserve.models.config import ModelConfig
from paxserve.models.config_hf import config_from_hf

KV_DTYPES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
"""Bytes of one cached value."""

_QUANTISED = ("float8_e4m3fn", "int8")
_SCALE_BYTES = 4


@dataclass(frozen=True)
class KVShape:
    """What is cached of a token in each layer: `heads` times `head_values` values.

    dtype: the checkpoint's, which the cache has unless told otherwise.
    heads: KV heads, which tensor parallelism can split. MLA has one: its latent serves all query heads.
    head_values: K and V of a head; for MLA the latent and the RoPE part of the key.
    tensors: what has a quantisation scale of its own in each layer: K and V, or MLA's latent and key as one.
    windows: by layer, the sliding window in tokens, None for full attention.
    expanded_values: for MLA, the values of a layer if K and V of every head were cached instead; None otherwise.
    """

    dtype: str
    heads: int
    head_values: int
    tensors: int
    windows: tuple[int | None, ...]
    expanded_values: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def values_per_token(self) -> int:
        """Over all layers."""
        return self.num_layers * self.heads * self.head_values

    def bytes_per_token(self, dtype: str) -> int:
        """Over all layers. Raises ValueError for a dtype that is not one of KV_DTYPES."""
        return self.values_per_token * _value_bytes(dtype)

    def page_bytes(self, page_size: int, dtype: str) -> int:
        """Bytes of a page of `page_size` tokens over all layers: what one more page in the pool costs."""
        return self.bytes_per_token(dtype) * page_size

    def expanded_bytes_per_token(self, dtype: str) -> int | None:
        """For MLA, over all layers, if K and V of every head were cached; None otherwise."""
        return None if self.expanded_values is None else self.num_layers * self.expanded_values * _value_bytes(dtype)

    def visible_bytes(self, tokens: int, dtype: str) -> int:
        """Bytes of what the next token can still see of a sequence: windowed layers see no more than their windows."""
        seen = sum(tokens if window is None else min(tokens, window) for window in self.windows)
        return seen * self.heads * self.head_values * _value_bytes(dtype)

    def scale_bytes(self, dtype: str) -> int:
        """Bytes of the quantisation scales, one float32 per layer and tensor however many tokens are cached; 0 if none."""
        return _SCALE_BYTES * self.tensors * self.num_layers if dtype in _QUANTISED else 0


def _value_bytes(dtype: str) -> int:
    """Bytes of one cached value. Raises ValueError for a dtype that is not one of KV_DTYPES."""
    if dtype not in KV_DTYPES:
        raise ValueError(f"KV dtype {dtype!r}: must be one of {', '.join(KV_DTYPES)}")
    return KV_DTYPES[dtype]


def kv_shape(config: ModelConfig) -> KVShape:
    """What a model that can be served caches."""
    if config.mla is None:
        return KVShape(config.dtype, config.num_kv_heads, 2 * config.head_dim, 2, config.windows)
    expanded = config.num_heads * (config.head_dim + config.mla.v_head_dim)
    return KVShape(config.dtype, 1, config.mla.cached_dim, 1, config.windows, expanded)


def kv_shape_from_hf(config: Mapping[str, Any]) -> KVShape:
    """What the model of a parsed config.json caches.

    Beside the models that can be served it knows OPT (arXiv:2205.01068): multi-head attention, whose cache is like any
    other's. Raises what `config_from_hf` raises.
    """
    if config.get("model_type") != "opt":
        return kv_shape(config_from_hf(config))
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    dtype = config.get("dtype") or config["torch_dtype"]
    return KVShape(dtype, heads, 2 * config["hidden_size"] // heads, 2, (None,) * layers)
