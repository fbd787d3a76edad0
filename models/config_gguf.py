"""`ModelConfig` from the metadata of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from paxserve.models import config_gguf_deepseek
from paxserve.models.config import ModelConfig, RopeConfig

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "deepseek2")
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
    fields = _Fields(f"{architecture}.", metadata)
    is_deepseek = architecture == "deepseek2"
    read = _READ | config_gguf_deepseek.READ if is_deepseek else _READ
    if unknown := {key for key in fields.keys() - read if fields[key]}:
        names = ", ".join(fields.prefix + key for key in sorted(unknown))
        raise NotImplementedError(f"GGUF keys not supported: {names}")

    num_layers, num_heads = fields["block_count"], fields["attention.head_count"]
    num_kv_heads = fields.get("attention.head_count_kv", num_heads)
    for key, value in (("attention.head_count", num_heads), ("attention.head_count_kv", num_kv_heads)):
        if not isinstance(value, int):
            raise NotImplementedError(f"{fields.prefix}{key} that differs by layer is not supported: {value}")
    mla = moe = None
    if is_deepseek:
        mla, moe = config_gguf_deepseek.mla_config(fields), config_gguf_deepseek.moe_config(fields, tensor_names)
        num_kv_heads, head_dim, rope_dim = num_heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.qk_rope_head_dim
        architecture = "deepseek_v3" if moe is not None and moe.scoring == "sigmoid" else "deepseek_v2"
    else:
        head_dim = rope_dim = fields.get("attention.key_length", fields["embedding_length"] // num_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if fields.get(key, head_dim) != head_dim:
                raise NotImplementedError(
                    f"{fields.prefix}{key}={fields[key]} other than the head_dim {head_dim} is not supported"
                )

    tokenizer = "tokenizer.ggml."
    stop_ids = (metadata.get(f"{tokenizer}{name}_token_id") for name in ("eos", "eot", "eom"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.get("vocab_size") or len(metadata[f"{tokenizer}tokens"]),
        hidden_size=fields["embedding_length"],
        intermediate_size=fields["feed_forward_length"],
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields["context_length"],
        rms_norm_eps=fields["attention.layer_norm_rms_epsilon"],
        rope=_rope(fields, rope_dim, tensor_names, rope_freqs),
        windows=(None,) * num_layers,
        tie_word_embeddings="output.weight" not in tensor_names,
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        out_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
        dtype={0: "float32", 1: "float16"}.get(metadata.get("general.file_type", 0), "bfloat16"),
        bos_token_id=metadata.get(f"{tokenizer}bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(token for token in stop_ids if token is not None)),
        mla=mla,
        moe=moe,
    )


class _Fields(dict[str, Any]):
    """The keys of an architecture without their prefix, as plain values. Raises ValueError for a key that is missing."""

    def __init__(self, prefix: str, metadata: Mapping[str, Any]) -> None:
        self.prefix = prefix
        keys = (key for key in metadata if key.startswith(prefix))
        super().__init__({key.removeprefix(prefix): _plain(metadata[key]) for key in keys})

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"the GGUF file lacks the key {self.prefix}{key}")


def _rope(
    fields: Mapping[str, Any], rope_dim: int, tensor_names: Collection[str], rope_freqs: Sequence[float] | None
) -> RopeConfig:
    if (_ROPE_FREQS in tensor_names) != (rope_freqs is not None):
        raise ValueError(f"rope_freqs must be given if, and only if, the file has the tensor {_ROPE_FREQS}")
    if rope_freqs is not None and len(rope_freqs) != rope_dim // 2:
        raise ValueError(f"{_ROPE_FREQS} holds {len(rope_freqs)} factors, head_dim {rope_dim} needs {rope_dim // 2}")
    frequency_factors = None if rope_freqs is None else tuple(float(value) for value in rope_freqs)
    theta, factor = fields.get("rope.freq_base", 10_000.0), fields.get("rope.scaling.factor", 1.0)
    log_multiplier = fields.get("rope.scaling.yarn_log_multiplier")
    # Stored as a tenth. What the file does not hold is the `mscale` of RoPE alone, which is the same in released models.
    mscale = _plain(10 * log_multiplier) if log_multiplier else None
    match fields.get("rope.scaling.type", "none"):
        case "none":
            return RopeConfig(theta=theta, frequency_factors=frequency_factors)
        case "linear" if mscale is None:
            return RopeConfig(theta=theta, kind="linear", factor=factor, frequency_factors=frequency_factors)
        case "yarn" if frequency_factors is None:
            return RopeConfig(
                theta=theta,
                kind="yarn",
                factor=factor,
                original_max_position=fields.get("rope.scaling.original_context_length", fields["context_length"]),
                beta_fast=fields.get("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=fields.get("rope.scaling.yarn_beta_slow", 1.0),
                mscale=mscale,
                mscale_all_dim=mscale,
            )
        case kind:
            raise NotImplementedError(f"rope.scaling.type {kind!r} is not supported with these tensors")


def _plain(value: Any) -> Any:
    """Python numbers. GGUF holds float32; the shortest decimal that rounds to it is the number that was meant (1e-05)."""
    if isinstance(value, float | np.floating):
        return float(str(np.float32(value)))
    return value.item() if isinstance(value, np.generic) else value
