"""Tiny random Llama checkpoints in the real formats, and what their parameters must be."""

import json
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from paxserve.models.config import ModelConfig
from paxserve.models.config_hf import config_from_hf
from paxserve.models.llama import Llama

KV_HEADS, GROUP, LAYERS = 4, 2, 2

HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def hf_config(model_type: str = "llama", hidden: int = 32, mlp: int = 48, **fields) -> dict:
    """A config.json."""
    classes = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    return {
        "model_type": model_type,
        "architectures": [classes[model_type]],
        "vocab_size": 64,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": KV_HEADS * GROUP,
        "num_key_value_heads": KV_HEADS,
        "head_dim": hidden // (KV_HEADS * GROUP),
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **fields,
    }


def hf_tensors(config: ModelConfig, dtype=np.float32) -> dict[str, np.ndarray]:
    """Random tensors with the names and shapes that transformers gives them."""
    hidden, mlp, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "mlp.gate_proj.weight": (mlp, hidden),
            "mlp.up_proj.weight": (mlp, hidden),
            "mlp.down_proj.weight": (hidden, mlp),
        }
        if config.qkv_bias:
            layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
        if config.out_bias:
            layer["self_attn.o_proj.bias"] = (hidden,)
        if config.mlp_bias:
            layer |= {"mlp.gate_proj.bias": (mlp,), "mlp.up_proj.bias": (mlp,), "mlp.down_proj.bias": (hidden,)}
        if config.qk_norm:
            layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}


def expected_params(config: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameter tree in the unrolled spelling, put together by hand."""
    kv_heads, group, dim = config.num_kv_heads, config.group, config.head_dim
    params = {"embed.embedding": tensors["model.embed_tokens.weight"], "final_norm.scale": tensors["model.norm.weight"]}
    if not config.tie_word_embeddings:
        params["lm_head.kernel"] = tensors["lm_head.weight"]
    for i in range(config.num_layers):
        layer = {
            k.removeprefix(f"model.layers.{i}."): v for k, v in tensors.items() if k.startswith(f"model.layers.{i}.")
        }
        for kind, ours in (("weight", "kernel"), ("bias", "bias")):
            if f"self_attn.q_proj.{kind}" in layer:
                q, k, v = (layer[f"self_attn.{name}_proj.{kind}"] for name in "qkv")
                rest = q.shape[1:]
                rows = [
                    np.concatenate(
                        [
                            q.reshape(kv_heads, group, dim, *rest)[head],
                            k.reshape(kv_heads, 1, dim, *rest)[head],
                            v.reshape(kv_heads, 1, dim, *rest)[head],
                        ]
                    )
                    for head in range(kv_heads)
                ]
                params[f"layers.{i}.attn.qkv.{ours}"] = np.stack(rows)
            if f"mlp.gate_proj.{kind}" in layer:
                gate_up = np.stack([layer[f"mlp.gate_proj.{kind}"], layer[f"mlp.up_proj.{kind}"]])
                params[f"layers.{i}.mlp.gate_up.{ours}"] = gate_up
                params[f"layers.{i}.mlp.down.{ours}"] = layer[f"mlp.down_proj.{kind}"]
        params[f"layers.{i}.attn.out.kernel"] = layer["self_attn.o_proj.weight"]
        for theirs, ours in (
            ("self_attn.o_proj.bias", "attn.out.bias"),
            ("input_layernorm.weight", "attn_norm.scale"),
            ("post_attention_layernorm.weight", "mlp_norm.scale"),
            ("self_attn.q_norm.weight", "attn.q_norm.scale"),
            ("self_attn.k_norm.weight", "attn.k_norm.scale"),
        ):
            if theirs in layer:
                params[f"layers.{i}.{ours}"] = layer[theirs]
    return params


def llama(config: ModelConfig, dtype=jnp.float32, scan_layers: bool = False):
    """The declared parameters of a model, which the loaders fill."""
    return nnx.state(Llama(config, dtype=dtype, scan_layers=scan_layers))


def unrolled(params: nnx.State) -> dict[str, np.ndarray]:
    """Every parameter by its unrolled name, of a scanned model too."""
    flat = {}
    for path, param in nnx.to_flat_state(params):
        value = np.asarray(param.get_value())
        if param.layers is not None:
            flat |= {
                ".".join(map(str, ("layers", layer, *path[2:]))): row
                for layer, row in zip(param.layers, value, strict=True)
            }
        else:
            flat[".".join(map(str, path))] = value
    return flat


def assert_params(params: nnx.State, expected: dict[str, np.ndarray]) -> None:
    """Same names and, to the bit, same values."""
    found = unrolled(params)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name, strict=True)


def write_hf(directory: Path, config: dict, tensors: dict[str, np.ndarray], shards: int = 1) -> None:
    """A Hugging Face model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def gguf_name(name: str) -> str:
    part, _, kind = name.rpartition(".")
    if not part.startswith("model.layers."):
        return f"{HF_TO_GGUF[part]}.{kind}"
    _, _, layer, part = part.split(".", 3)
    return f"blk.{layer}.{HF_TO_GGUF[part]}.{kind}"


def llama_cpp_rows(tensor: np.ndarray, heads: int) -> np.ndarray:
    """The row order of q and k in GGUF files of the "llama" architecture: a head's row i next to its row i + dim/2."""
    dim = tensor.shape[0] // heads
    order = [head * dim + half * (dim // 2) + i for head in range(heads) for i in range(dim // 2) for half in (0, 1)]
    return tensor[order]


def write_gguf(
    file: Path,
    config: ModelConfig,
    tensors: dict[str, np.ndarray],
    raw: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    tokenizer_of: Path | None = None,
) -> None:
    """A GGUF file as llama.cpp's converter lays it out.

    raw: stored bytes and type of tensors that are not float32, already in the file's row order.
    extra: tensors by their GGUF names. tokenizer_of: another GGUF file whose vocabulary is taken over.
    """
    writer = gguf.GGUFWriter(file, config.architecture)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if tokenizer_of is not None:
        for key, field in gguf.GGUFReader(tokenizer_of).fields.items():
            if key.startswith("tokenizer.") and not key.endswith(("bos_token_id", "eos_token_id")):
                kind, *items = field.types
                writer.add_key_value(key, field.contents(), kind, items[0] if items else None)
    for name, tensor in tensors.items():
        if raw and name in raw:
            data, kind = raw[name]
            writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
            continue
        if config.architecture == "llama" and ".q_proj." in name:
            tensor = llama_cpp_rows(tensor, config.num_heads)
        elif config.architecture == "llama" and ".k_proj." in name:
            tensor = llama_cpp_rows(tensor, config.num_kv_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(tensor))
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_config(**fields) -> ModelConfig:
    return config_from_hf(hf_config(**fields))
