"""Tiny models for whole-engine tests: random ones, and one that recites its vocabulary."""

import json
from pathlib import Path

import numpy as np
import tokenizers
from dense_deepseek import DenseDeepSeek
from dense_llama import DenseLlama
from golden.tiny_models import MODELS, weight
from tiny_checkpoints import hf_config, hf_tensors, write_hf
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from paxserve.models.config_hf import config_from_hf
from paxserve.models.weights import tensor_sources

LETTERS = "abcdefghijklmnopqrstuvwxyz"
RECITED = ["<s>", *LETTERS, "Ã", "©", "<x>", *LETTERS.upper(), "</s>", *"0123456789"]  # "Ã©" is byte-level for "é"
VOCABULARY = [*RECITED, *sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(RECITED))]
END = RECITED.index("</s>")
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"


RANDOM_MODELS = {"qwen2_some_windows": DenseLlama, "deepseek_v3_experts": DenseDeepSeek}


def write_random(directory: Path, name: str = "qwen2_some_windows", **fields) -> DenseLlama:
    """A model without tokenizer: Qwen2 with grouped queries, biases, and a window of 8 tokens in its second layer; or
    DeepSeek-V3 with latent attention, a dense layer and one of experts."""
    return RANDOM_MODELS[name](*write_checkpoint(directory, name, **fields))


def write_checkpoint(directory: Path, name: str, **fields) -> tuple[dict, dict[str, np.ndarray]]:
    """One of golden/tiny_models.py's models with two layers: its config and its tensors."""
    config = {**MODELS[name], "num_hidden_layers": 2, "max_position_embeddings": 128, **fields}
    tensors = {source.name: weight(source.name, source.shape) for source in tensor_sources(config_from_hf(config))}
    write_hf(directory, config, tensors)
    return config, tensors


def write_reciting(directory: Path) -> None:
    """A Llama that follows each token of its vocabulary by the next: "w" goes on "xyzé<x>ABC…Z</s>012…".

    Attention and MLP add nothing, and the row of a token in lm_head is the embedding of the token before it, so the next
    token's logit stands far above the others, whatever the temperature.
    """
    config = hf_config(hidden=64, vocab_size=len(VOCABULARY), bos_token_id=0, eos_token_id=END)
    tensors = hf_tensors(config_from_hf(config))
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])
        elif name.endswith("norm.weight"):
            tensors[name] = np.ones_like(tensors[name])
    tensors["lm_head.weight"] = np.roll(tensors["model.embed_tokens.weight"], 1, axis=0)
    write_hf(directory, config, tensors)
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of VOCABULARY, one token a byte."""
    tokenizer = tokenizers.Tokenizer(BPE({token: i for i, token in enumerate(VOCABULARY)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<x>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
