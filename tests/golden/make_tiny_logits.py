"""Makes tiny_logits.npz and rope_tables.npz with Hugging Face transformers (5.24, torch 2.13, CPU, float32).

    python tests/golden/make_tiny_logits.py

Needs torch and transformers, which paxserve does not. Logits of the dynamic-RoPE model are computed token by token,
since transformers rotates earlier keys of a longer prompt with the base of the whole prompt; all others in one forward.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tiny_models import LOGIT_POSITIONS, MODELS, ROPE_POSITIONS, ROPES, prompt, weight
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).parent


def logits(name: str) -> np.ndarray:
    """Logits [LOGIT_POSITIONS, vocab] of a tiny model."""
    with tempfile.TemporaryDirectory() as directory:
        # transformers itself says what the tensors of a checkpoint are called, and reads them by those names.
        fields = dict(MODELS[name])
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        file = Path(directory) / "model.safetensors"
        tensors = {key: weight(key, tensor.shape) for key, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()

    tokens = torch.from_numpy(prompt(name))[None]
    with torch.no_grad():
        if name == "llama_dynamic":
            cache = DynamicCache(config=config)
            steps = [model(token, cache=cache, use_cache=True).logits[0] for token in tokens.split(1, dim=1)]
            result = torch.cat(steps)
        else:
            result = model(tokens).logits[0]
    return result[list(LOGIT_POSITIONS)].numpy()


def rope_table(name: str) -> dict[str, np.ndarray]:
    """cos and sin [ROPE_POSITIONS, head_dim // 2], each position being the last of a sequence."""
    head_dim, max_position, fields = ROPES[name]
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=max_position,
        rope_parameters=dict(fields),
    )
    half = head_dim // 2
    rows = []
    for position in ROPE_POSITIONS:
        rope = LlamaRotaryEmbedding(config)
        cos, sin = rope(torch.zeros(1), torch.tensor([[position]]))
        rows.append((cos[0, 0, :half].numpy(), sin[0, 0, :half].numpy(), rope.inv_freq.numpy()))
    cos, sin, frequencies = (np.stack(column) for column in zip(*rows, strict=True))
    return {f"{name}/cos": cos, f"{name}/sin": sin, f"{name}/frequencies": frequencies}


if __name__ == "__main__":
    np.savez_compressed(HERE / "tiny_logits.npz", **{name: logits(name) for name in MODELS})
    tables = [rope_table(name) for name in ROPES]
    np.savez_compressed(HERE / "rope_tables.npz", **{key: value for table in tables for key, value in table.items()})
