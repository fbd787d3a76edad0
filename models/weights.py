"""Which checkpoint tensor goes where in the parameter tree, stated once for every loader and for the converter.

Names, shapes and layouts are those of Hugging Face checkpoints; readers of other formats translate their names first.
All our kernels are stored out-major ([out, in]), as Hugging Face stores them, so placing a tensor is a reshape and a
slice assignment, never a transpose. What is fused in our tree (q, k and v; gate and up) is several sources that fill
disjoint slices of one parameter. With scanned layers the same sources apply: `layers.3.attn.qkv.kernel` is then entry 3
of the leading axis of `layers.attn.qkv.kernel`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from paxserve.models.config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorSource:
    """One checkpoint tensor and its place: `parameter[path][index] = tensor.reshape(view)`.

    name: the tensor's name in a Hugging Face checkpoint, e.g. "model.layers.3.self_attn.q_proj.weight".
    shape: its shape there.
    view: the shape it is reshaped to (row-major) before it is placed; the shape of `parameter[index]`.
    path: the parameter, '.'-joined, always in the spelling of unrolled layers, e.g. "layers.3.attn.qkv.kernel".
    index: a slice for every axis of that parameter; all of them full slices where nothing is fused.
    """

    name: str
    shape: Shape
    view: Shape
    path: str
    index: tuple[slice, ...]


def tensor_sources(config: ModelConfig) -> list[TensorSource]:
    """Every tensor a checkpoint of `config` must hold. Together they fill every parameter exactly once."""
    return list(_sources(config))


def _sources(config: ModelConfig) -> Iterator[TensorSource]:
    vocab, embed = config.vocab_size, config.hidden_size
    yield _whole("model.embed_tokens.weight", (vocab, embed), "embed.embedding")
    for layer in range(config.num_layers):
        yield from _layer_sources(config, f"model.layers.{layer}", f"layers.{layer}")
    yield _whole("model.norm.weight", (embed,), "final_norm.scale")
    if not config.tie_word_embeddings:
        yield _whole("lm_head.weight", (vocab, embed), "lm_head.kernel")


def _layer_sources(config: ModelConfig, source: str, path: str) -> Iterator[TensorSource]:
    embed, mlp = config.hidden_size, config.intermediate_size
    kv_heads, group, head_dim = config.num_kv_heads, config.group, config.head_dim
    attention = f"{source}.self_attn"

    yield _whole(f"{source}.input_layernorm.weight", (embed,), f"{path}.attn_norm.scale")
    for name, first, rows in (("q", 0, group), ("k", group, 1), ("v", group + 1, 1)):
        index = (slice(None), slice(first, first + rows), slice(None))
        out, view = kv_heads * rows * head_dim, (kv_heads, rows, head_dim)
        yield TensorSource(
            f"{attention}.{name}_proj.weight",
            (out, embed),
            (*view, embed),
            f"{path}.attn.qkv.kernel",
            (*index, slice(None)),
        )
        if config.qkv_bias:
            yield TensorSource(f"{attention}.{name}_proj.bias", (out,), view, f"{path}.attn.qkv.bias", index)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield _whole(f"{attention}.{name}.weight", (head_dim,), f"{path}.attn.{name}.scale")
    yield TensorSource(
        f"{attention}.o_proj.weight",
        (embed, config.num_heads * head_dim),
        (embed, kv_heads, group, head_dim),
        f"{path}.attn.out.kernel",
        (slice(None),) * 4,
    )
    if config.out_bias:
        yield _whole(f"{attention}.o_proj.bias", (embed,), f"{path}.attn.out.bias")

    yield _whole(f"{source}.post_attention_layernorm.weight", (embed,), f"{path}.mlp_norm.scale")
    for row, name in enumerate(("gate", "up")):
        rows_index = (slice(row, row + 1), slice(None))
        yield TensorSource(
            f"{source}.mlp.{name}_proj.weight",
            (mlp, embed),
            (1, mlp, embed),
            f"{path}.mlp.gate_up.kernel",
            (*rows_index, slice(None)),
        )
        if config.mlp_bias:
            bias = f"{source}.mlp.{name}_proj.bias"
            yield TensorSource(bias, (mlp,), (1, mlp), f"{path}.mlp.gate_up.bias", rows_index)
    yield _whole(f"{source}.mlp.down_proj.weight", (embed, mlp), f"{path}.mlp.down.kernel")
    if config.mlp_bias:
        yield _whole(f"{source}.mlp.down_proj.bias", (embed,), f"{path}.mlp.down.bias")


def _whole(name: str, shape: Shape, path: str) -> TensorSource:
    """A tensor that is a parameter as it stands."""
    return TensorSource(name, shape, shape, path, (slice(None),) * len(shape))
