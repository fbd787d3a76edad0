"""`ModelConfig` from a Hugging Face config.json.

Follows transformers: a field that is missing takes the default of its model type there. Whatever would change the
numbers and is not implemented is refused by name, never ignored.
"""

from collections.abc import Mapping
from typing import Any

from paxserve.models import config_deepseek, config_moe
from paxserve.models.config import ModelConfig, MoEConfig, RopeConfig
from paxserve.models.config_quantization import read_quantization

_SHARED_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
_QWEN_DEFAULTS: Mapping[str, Any] = {
    **_SHARED_DEFAULTS,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        **_SHARED_DEFAULTS,
        "vocab_size": 32_000,
        "intermediate_size": 11_008,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral": {
        **_SHARED_DEFAULTS,
        "vocab_size": 32_000,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {**_QWEN_DEFAULTS, "attention_bias": True},
    "qwen3": {**_QWEN_DEFAULTS, "head_dim": 128},
    "mixtral": {**_SHARED_DEFAULTS, **config_moe.MIXTRAL_DEFAULTS},
    "qwen3_moe": {**_SHARED_DEFAULTS, **config_moe.QWEN3_MOE_DEFAULTS},
    "deepseek_v2": {**_SHARED_DEFAULTS, **config_deepseek.V2_DEFAULTS},
    "deepseek_v3": {**_SHARED_DEFAULTS, **config_deepseek.V3_DEFAULTS},
    "kimi_k2": {**_SHARED_DEFAULTS, **config_deepseek.V3_DEFAULTS},
}
# Model types that are another one's architecture under their own name.
_SAME_AS = {"kimi_k2": "deepseek_v3"}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}

# Fields of any model type with the only values that are implemented.
_IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1.0),
    "rope_interleaved": (None, False),
    "use_mrope": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
# Fields that a model type does not have, or has fixed.
_FIXED: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"attention_bias": True, "mlp_bias": False},
    "qwen3": {"mlp_bias": False},
    "mixtral": {"attention_bias": False, "mlp_bias": False},
    "qwen3_moe": {"mlp_bias": False},
    "deepseek_v2": config_deepseek.V2_FIXED,
    "deepseek_v3": config_deepseek.V3_FIXED,
}
_ROPE_FIELDS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_DTYPES = ("float32", "bfloat16", "float16")


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The architecture that a parsed config.json describes.

    Reads the classic spelling (rope_theta and rope_scaling, torch_dtype) and that of transformers 5 (rope_parameters,
    dtype). Raises NotImplementedError, naming the field, for what is not implemented, ValueError for a malformed field.
    """
    model_type: str = config.get("model_type", "")
    if model_type not in _DEFAULTS:
        raise NotImplementedError(f"model_type {model_type!r} is not supported; supported are {', '.join(_DEFAULTS)}")
    fields = {**_DEFAULTS[model_type], **config}
    model_type = _SAME_AS.get(model_type, model_type)
    architectures = config.get("architectures")
    if architectures and architectures != [_CLASSES[model_type]]:
        raise NotImplementedError(f"architectures {architectures} is not supported, only {_CLASSES[model_type]}")
    for field, values in _IMPLEMENTED.items():
        if fields.get(field) not in values:
            raise NotImplementedError(f"{field}={fields[field]!r} is not supported, only {values[-1]!r}")
    for field, value in _FIXED[model_type].items():
        if fields[field] != value:
            raise NotImplementedError(f"{field}={fields[field]!r} is not supported for {model_type}, only {value}")

    num_heads = fields["num_attention_heads"]
    is_deepseek = model_type in ("deepseek_v2", "deepseek_v3")
    mla = config_deepseek.mla_config(fields) if is_deepseek else None
    # transformers' own head_dim of a DeepSeek model is the RoPE part alone.
    head_dim = fields["head_dim"] if mla is None else mla.qk_nope_head_dim + mla.qk_rope_head_dim
    return ModelConfig(
        architecture=model_type,
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=fields["num_key_value_heads"] or num_heads,
        head_dim=head_dim or fields["hidden_size"] // num_heads,
        max_position_embeddings=fields["max_position_embeddings"],
        rms_norm_eps=fields["rms_norm_eps"],
        rope=_rope(fields),
        windows=_windows(model_type, fields),
        tie_word_embeddings=fields["tie_word_embeddings"],
        qkv_bias=fields["attention_bias"],
        out_bias=fields["attention_bias"] and model_type != "qwen2",
        mlp_bias=fields["mlp_bias"],
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        dtype=_dtype(fields),
        bos_token_id=fields["bos_token_id"],
        eos_token_ids=_token_ids(fields["eos_token_id"]),
        mla=mla,
        moe=_moe(model_type, fields),
        mtp_layers=(fields["num_nextn_predict_layers"] or 0) if is_deepseek else 0,
        quantization=read_quantization(fields.get("quantization_config")),
    )


def _moe(model_type: str, fields: Mapping[str, Any]) -> MoEConfig | None:
    match model_type:
        case "mixtral":
            return config_moe.mixtral_moe(fields)
        case "qwen3_moe":
            return config_moe.qwen3_moe(fields)
        case "deepseek_v2" | "deepseek_v3":
            return config_deepseek.moe_config(fields)
        case _:
            return None


def _rope(fields: Mapping[str, Any]) -> RopeConfig:
    """RoPE from `rope_scaling`, or else `rope_parameters`, or else `rope_theta` alone."""
    rope = _unnest(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    rope = {name: value for name, value in rope.items() if value is not None}
    theta = rope.pop("rope_theta", None) or fields.get("rope_theta") or 10_000.0
    legacy_kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", legacy_kind)
    if kind not in _ROPE_FIELDS:
        raise NotImplementedError(f"RoPE type {kind!r} is not supported; supported are {', '.join(_ROPE_FIELDS)}")
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise NotImplementedError("partial_rotary_factor other than 1 is not supported")
    if unknown := rope.keys() - _ROPE_FIELDS[kind]:
        raise NotImplementedError(f"RoPE type {kind!r} with the fields {sorted(unknown)} is not supported")
    if kind == "default":
        return RopeConfig(theta=theta)

    max_position = fields["max_position_embeddings"]
    # The top-level field, which some checkpoints have, goes before the one in the RoPE fields.
    trained = rope.pop("original_max_position_embeddings", None)
    trained = fields.get("original_max_position_embeddings") or trained or max_position
    factor = rope.pop("factor", max_position / trained if kind == "yarn" else None)
    if factor is None:
        raise ValueError(f"RoPE type {kind!r} needs a factor")
    if kind == "llama3" and (missing := {"low_freq_factor", "high_freq_factor"} - rope.keys()):
        raise ValueError(f"RoPE type 'llama3' needs {', '.join(sorted(missing))}")
    # Dynamic scaling sets in where the model's own limit ends; linear scaling needs no limit.
    original = {"linear": None, "dynamic": max_position}.get(kind, trained)
    return RopeConfig(theta=theta, kind=kind, factor=factor, original_max_position=original, **rope)


def _unnest(rope: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 may nest the RoPE fields by layer type; they are one set of fields if all types agree."""
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    if not nested:
        return dict(rope)
    if len(nested) < len(rope) or any(value != nested[0] for value in nested):
        raise NotImplementedError(f"rope_parameters that differ by layer type are not supported: {dict(rope)}")
    return dict(nested[0])


def _windows(model_type: str, fields: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Each layer's sliding window: none for most, chosen layers of qwen2 and qwen3, all layers of the others with one."""
    num_layers = fields["num_hidden_layers"]
    window = fields["sliding_window"] if "sliding_window" in _DEFAULTS[model_type] else None
    chosen_layers = model_type in ("qwen2", "qwen3")
    if model_type.startswith("qwen") and not fields["use_sliding_window"]:
        window = None
    first = fields["max_window_layers"] if chosen_layers else 0
    layer_types = ["full_attention" if window is None or i < first else "sliding_attention" for i in range(num_layers)]

    given = fields.get("layer_types") or layer_types
    if given != layer_types:
        allowed = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
        if not chosen_layers or len(given) != num_layers or not set(given) <= allowed:
            raise NotImplementedError(
                f"layer_types {given} is not supported for {model_type} with {num_layers} layers and window {window}"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in given)


def _dtype(fields: Mapping[str, Any]) -> str:
    dtype = (fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise NotImplementedError(f"dtype {dtype!r} is not supported; supported are {', '.join(_DTYPES)}")
    return dtype


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
