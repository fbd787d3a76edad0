"""Which checkpoint tensor goes where in the parameter tree, stated once for every loader and for the converter.

Names, shapes and layouts are those of Hugging Face checkpoints; readers of other formats translate their names first.
All our kernels are stored out-major ([out, in]), as Hugging Face stores them, so placing a tensor is a reshape and a
slice assignment, never a transpose. What is fused in our tree (q, k and v; gate and up) is several sources that fill
disjoint slices of one parameter; what is apart in it (the two halves of kv_b_proj) is several sources that are disjoint
parts of one tensor. With scanned layers the same sources apply: `layers.3.attn.qkv.kernel` is then the entry of layer 3
in the leading axis of that parameter of its run.
"""

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

from paxserve.models.config import MLAConfig, ModelConfig, MoEConfig
from paxserve.models.fp8 import SCALE_SUFFIX

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorSource:
    """One checkpoint tensor and its place: `parameter[path][index] = tensor.reshape(view)[part]`.

    name: the tensor's name in a Hugging Face checkpoint, e.g. "model.layers.3.self_attn.q_proj.weight".
    shape: its shape there.
    view: the shape it is reshaped to (row-major) before it is placed.
    path: the parameter, '.'-joined, always in the spelling of unrolled layers, e.g. "layers.3.attn.qkv.kernel".
    index: a slice for every axis of that parameter; all of them full slices where nothing is fused.
    part: what of the view is placed, a slice for every axis; () for all of it.
    """

    name: str
    shape: Shape
    view: Shape
    path: str
    index: tuple[slice, ...]
    part: tuple[slice, ...] = ()

    @property
    def split(self) -> list[range]:
        """For each axis of the tensor, the axes of the view that it is split into."""
        ranges, axis = [], 0
        for size in self.shape[:-1]:
            first = axis
            while axis == first or math.prod(self.view[first:axis]) < size:
                axis += 1
            ranges.append(range(first, axis))
        return [*ranges, range(axis, len(self.view))]

    def of_scales(self, shape: Shape) -> "TensorSource":
        """The source of a kernel's scales: the same, of blocks instead of values.

        shape: the parameter's, of which each axis that is cut into blocks is filled by this source alone.
        """
        part = self.part or (slice(None),) * len(self.view)
        blocks = [
            len(range(*part[axis].indices(self.view[axis]))) // shape[axis] if taken == slice(None) else 1
            for axis, taken in enumerate(self.index)
        ]
        sizes = zip(self.shape, self.split, strict=True)
        cuts = zip(part, blocks, strict=True)
        return replace(
            self,
            shape=tuple(size // math.prod(blocks[axis] for axis in axes) for size, axes in sizes),
            view=tuple(size // block for size, block in zip(self.view, blocks, strict=True)),
            path=self.path + SCALE_SUFFIX,
            part=tuple(c if c == slice(None) else slice(c.start // block, c.stop // block) for c, block in cuts),
        )

    @property
    def first(self) -> tuple[int, ...]:
        """Where in the view the part that is placed begins."""
        return tuple(part.start or 0 for part in self.part) or (0,) * len(self.view)


def tensor_sources(config: ModelConfig, names: Container[str] = ()) -> list[TensorSource]:
    """Every tensor a checkpoint of `config` must hold. Together they fill every parameter exactly once, and of a tensor
    that is several sources every value is used exactly once.

    names: those in the checkpoint, which show how it spells what has several spellings. Experts are a tensor each, as
    released, or all in one, as transformers 5 (gate and up together) and GGUF files hold them; the expansion of latents to
    keys and to values is one tensor, as released, or two (GGUF). By default as released.
    """
    return list(_sources(config, names))


def mtp_tensors(config: ModelConfig) -> list[str]:
    """Patterns (of fnmatch) of the tensors of layers for multi-token prediction, which a checkpoint may hold."""
    return [f"model.layers.{config.num_layers + index}.*" for index in range(config.mtp_layers)]


def _sources(config: ModelConfig, names: Container[str]) -> Iterator[TensorSource]:
    vocab, embed = config.vocab_size, config.hidden_size
    yield _whole("model.embed_tokens.weight", (vocab, embed), "embed.embedding")
    for layer in range(config.num_layers):
        yield from _layer_sources(config, layer, names)
    yield _whole("model.norm.weight", (embed,), "final_norm.scale")
    if not config.tie_word_embeddings:
        yield _whole("lm_head.weight", (vocab, embed), "lm_head.kernel")


def _layer_sources(config: ModelConfig, layer: int, names: Container[str]) -> Iterator[TensorSource]:
    source, path = f"model.layers.{layer}", f"layers.{layer}"
    yield _whole(f"{source}.input_layernorm.weight", (config.hidden_size,), f"{path}.attn_norm.scale")
    if config.mla is None:
        yield from _gqa_sources(config, f"{source}.self_attn", f"{path}.attn")
    else:
        yield from _mla_sources(config, config.mla, f"{source}.self_attn", f"{path}.attn", names)
    yield _whole(f"{source}.post_attention_layernorm.weight", (config.hidden_size,), f"{path}.mlp_norm.scale")
    if config.moe is not None and config.moe.layers[layer]:
        yield from _moe_sources(config, config.moe, source, f"{path}.mlp", names)
    else:
        yield from _mlp_sources(config, config.intermediate_size, f"{source}.mlp", f"{path}.mlp")


def _gqa_sources(config: ModelConfig, source: str, path: str) -> Iterator[TensorSource]:
    embed, kv_heads, group, head_dim = config.hidden_size, config.num_kv_heads, config.group, config.head_dim
    for name, first, rows in (("q", 0, group), ("k", group, 1), ("v", group + 1, 1)):
        index = (slice(None), slice(first, first + rows), slice(None))
        out, view = kv_heads * rows * head_dim, (kv_heads, rows, head_dim)
        yield TensorSource(
            f"{source}.{name}_proj.weight",
            (out, embed),
            (*view, embed),
            f"{path}.qkv.kernel",
            (*index, slice(None)),
        )
        if config.qkv_bias:
            yield TensorSource(f"{source}.{name}_proj.bias", (out,), view, f"{path}.qkv.bias", index)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield _whole(f"{source}.{name}.weight", (head_dim,), f"{path}.{name}.scale")
    yield _whole(f"{source}.o_proj.weight", (embed, config.num_heads * head_dim), f"{path}.out.kernel")
    if config.out_bias:
        yield _whole(f"{source}.o_proj.bias", (embed,), f"{path}.out.bias")


def _mla_sources(
    config: ModelConfig, mla: MLAConfig, source: str, path: str, names: Container[str]
) -> Iterator[TensorSource]:
    embed, heads, q_rank, kv_rank = config.hidden_size, config.num_heads, mla.q_lora_rank, mla.kv_lora_rank

    if q_rank is not None:
        yield _whole(f"{source}.q_a_proj.weight", (q_rank, embed), f"{path}.q_a.kernel")
        if config.qkv_bias:
            yield _whole(f"{source}.q_a_proj.bias", (q_rank,), f"{path}.q_a.bias")
        yield _whole(f"{source}.q_a_layernorm.weight", (q_rank,), f"{path}.q_a_norm.scale")
    name, q_in = ("q_proj", embed) if q_rank is None else ("q_b_proj", q_rank)
    q_view = (heads, config.head_dim, q_in)
    yield _viewed(f"{source}.{name}.weight", (heads * config.head_dim, q_in), q_view, f"{path}.q.kernel")

    yield _whole(f"{source}.kv_a_proj_with_mqa.weight", (mla.cached_dim, embed), f"{path}.kv_a.kernel")
    if config.qkv_bias:
        yield _whole(f"{source}.kv_a_proj_with_mqa.bias", (mla.cached_dim,), f"{path}.kv_a.bias")
    yield _whole(f"{source}.kv_a_layernorm.weight", (kv_rank,), f"{path}.kv_a_norm.scale")
    k_dim, v_dim = mla.qk_nope_head_dim, mla.v_head_dim
    for name, dim, first in (("k_b", k_dim, 0), ("v_b", v_dim, k_dim)):
        if (split := f"{source}.{name}_proj.weight") in names:
            yield _whole(split, (heads, dim, kv_rank), f"{path}.{name}")
        else:
            yield TensorSource(
                f"{source}.kv_b_proj.weight",
                (heads * (k_dim + v_dim), kv_rank),
                (heads, k_dim + v_dim, kv_rank),
                f"{path}.{name}",
                (slice(None),) * 3,
                (slice(None), slice(first, first + dim), slice(None)),
            )
    yield _whole(f"{source}.o_proj.weight", (embed, heads * v_dim), f"{path}.out.kernel")
    if config.out_bias:
        yield _whole(f"{source}.o_proj.bias", (embed,), f"{path}.out.bias")


def _mlp_sources(config: ModelConfig, mlp: int, source: str, path: str) -> Iterator[TensorSource]:
    embed = config.hidden_size
    for row, name in enumerate(("gate", "up")):
        rows_index = (slice(row, row + 1), slice(None))
        yield TensorSource(
            f"{source}.{name}_proj.weight",
            (mlp, embed),
            (1, mlp, embed),
            f"{path}.gate_up.kernel",
            (*rows_index, slice(None)),
        )
        if config.mlp_bias:
            yield TensorSource(f"{source}.{name}_proj.bias", (mlp,), (1, mlp), f"{path}.gate_up.bias", rows_index)
    yield _whole(f"{source}.down_proj.weight", (embed, mlp), f"{path}.down.kernel")
    if config.mlp_bias:
        yield _whole(f"{source}.down_proj.bias", (embed,), f"{path}.down.bias")


def _moe_sources(
    config: ModelConfig, moe: MoEConfig, layer: str, path: str, names: Container[str]
) -> Iterator[TensorSource]:
    embed, experts, mlp = config.hidden_size, moe.num_experts, moe.intermediate_size
    source, parts = f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj")
    if config.architecture == "mixtral" and f"{source}.gate.weight" not in names:
        source, parts = f"{layer}.block_sparse_moe", ("w1", "w3", "w2")

    yield _whole(f"{source}.gate.weight", (experts, embed), f"{path}.router")
    if moe.score_bias:
        yield _whole(f"{source}.gate.e_score_correction_bias", (experts,), f"{path}.score_bias")
    if (stacked := f"{source}.experts.gate_up_proj") in names:
        yield _viewed(stacked, (experts, 2 * mlp, embed), (experts, 2, mlp, embed), f"{path}.gate_up")
        yield _whole(f"{source}.experts.down_proj", (experts, embed, mlp), f"{path}.down")
    elif f"{source}.experts.gate_proj" in names:
        for row, part in enumerate(("gate_proj", "up_proj")):
            yield TensorSource(
                f"{source}.experts.{part}",
                (experts, mlp, embed),
                (experts, 1, mlp, embed),
                f"{path}.gate_up",
                (slice(None), slice(row, row + 1), slice(None), slice(None)),
            )
        yield _whole(f"{source}.experts.down_proj", (experts, embed, mlp), f"{path}.down")
    else:
        *gate_up, down = parts
        for expert in range(experts):
            name, place = f"{source}.experts.{expert}", slice(expert, expert + 1)
            for row, part in enumerate(gate_up):
                yield TensorSource(
                    f"{name}.{part}.weight",
                    (mlp, embed),
                    (1, 1, mlp, embed),
                    f"{path}.gate_up",
                    (place, slice(row, row + 1), slice(None), slice(None)),
                )
            yield TensorSource(
                f"{name}.{down}.weight",
                (embed, mlp),
                (1, embed, mlp),
                f"{path}.down",
                (place, slice(None), slice(None)),
            )
    if moe.shared_intermediate_size:
        yield from _mlp_sources(config, moe.shared_intermediate_size, f"{source}.shared_experts", f"{path}.shared")


def _viewed(name: str, shape: Shape, view: Shape, path: str) -> TensorSource:
    """A tensor that is a parameter but for its axes."""
    return TensorSource(name, shape, view, path, (slice(None),) * len(view))


def _whole(name: str, shape: Shape, path: str) -> TensorSource:
    """A tensor that is a parameter as it stands."""
    return _viewed(name, shape, shape, path)
