"""`ModelConfig` from the metadata of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from paxserve.models.config import ModelConfig, RopeConfig

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_FREQS = "rope_freqs.weight"
_READ = frozenset(
    {
        "vocab_size",
        "context_length",
        "block_count",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        # Says that a scaling was trained in, not how to compute it.
        "rope.scaling.finetuned",
    }
)


def config_from_gguf(
    metadata: Mapping[str, Any], tensor_names: Collection[str], rope_freqs: Sequence[float] | None = None
) -> ModelConfig:
    """The architecture that a GGUF file describes.

    metadata: the file's key/value pairs as plain Python values.
    tensor_names: the names of its tensors; optional parts (an untied output, biases, q and k norms) show only there.
    rope_freqs: the values of the tensor "rope_freqs.weight", by which Llama 3.1's RoPE scaling is stored; required if
        the file has it.

    The dtype is that of an unquantised file, bfloat16 for a quantised one. Raises NotImplementedError, naming the key,
    for what is not implemented; ValueError for a key that is missing.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise NotImplementedError(
            f"general.architecture {architecture!r} is not supported; supported are {', '.join(_ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    fields = {key.removeprefix(prefix): _plain(value) for key, value in metadata.items() if key.startswith(prefix)}
    if unknown := {key for key in fields.keys() - _READ if fields[key]}:
        raise NotImplementedError(f"GGUF keys not supported: {', '.join(prefix + key for key in sorted(unknown))}")

    def required(key: str) -> Any:
        if key not in fields:
            raise ValueError(f"the GGUF file lacks the key {prefix}{key}")
        return fields[key]

    num_layers, num_heads = required("block_count"), required("attention.head_count")
    num_kv_heads = fields.get("attention.head_count_kv", num_heads)
    for key, value in (("attention.head_count", num_heads), ("attention.head_count_kv", num_kv_heads)):
        if not isinstance(value, int):
            raise NotImplementedError(f"{prefix}{key} that differs by layer is not supported: {value}")
    head_dim = fields.get("attention.key_length", required("embedding_length") // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise NotImplementedError(
                f"{prefix}{key}={fields[key]} other than the head_dim {head_dim} is not supported"
            )

    tokenizer = "tokenizer.ggml."
    stop_ids = (metadata.get(f"{tokenizer}{name}_token_id") for name in ("eos", "eot", "eom"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.get("vocab_size") or len(metadata[f"{tokenizer}tokens"]),
        hidden_size=required("embedding_length"),
        intermediate_size=required("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=required("context_length"),
        rms_norm_eps=required("attention.layer_norm_rms_epsilon"),
        rope=_rope(fields, head_dim, tensor_names, rope_freqs),
        windows=(None,) * num_layers,
        tie_word_embeddings="output.weight" not in tensor_names,
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        out_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
        dtype={0: "float32", 1: "float16"}.get(metadata.get("general.file_type", 0), "bfloat16"),
        bos_token_id=metadata.get(f"{tokenizer}bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(token for token in stop_ids if token is not None)),
    )


def _rope(
    fields: Mapping[str, Any], head_dim: int, tensor_names: Collection[str], rope_freqs: Sequence[float] | None
) -> RopeConfig:
    if (_ROPE_FREQS in tensor_names) != (rope_freqs is not None):
        raise ValueError(f"rope_freqs must be given if, and only if, the file has the tensor {_ROPE_FREQS}")
    if rope_freqs is not None and len(rope_freqs) != head_dim // 2:
        raise ValueError(f"{_ROPE_FREQS} holds {len(rope_freqs)} factors, head_dim {head_dim} needs {head_dim // 2}")
    frequency_factors = None if rope_freqs is None else tuple(float(value) for value in rope_freqs)
    theta, factor = fields.get("rope.freq_base", 10_000.0), fields.get("rope.scaling.factor", 1.0)
    match fields.get("rope.scaling.type", "none"):
        case "none":
            return RopeConfig(theta=theta, frequency_factors=frequency_factors)
        case "linear":
            return RopeConfig(theta=theta, kind="linear", factor=factor, frequency_factors=frequency_factors)
        case "yarn" if frequency_factors is None:
            return RopeConfig(
                theta=theta,
                kind="yarn",
                factor=factor,
                original_max_position=fields.get("rope.scaling.original_context_length", fields["context_length"]),
                beta_fast=fields.get("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=fields.get("rope.scaling.yarn_beta_slow", 1.0),
            )
        case kind:
            raise NotImplementedError(f"rope.scaling.type {kind!r} is not supported with these tensors")


def _plain(value: Any) -> Any:
    """Python numbers. GGUF holds float32; the shortest decimal that rounds to it is the number that was meant (1e-05)."""
    if isinstance(value, float | np.floating):
        return float(str(np.float32(value)))
    return value.item() if isinstance(value, np.generic) else value
