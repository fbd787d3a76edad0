"""What all models have in common: an embedding, a stack of pre-norm layers over one array of KV pages, an output.

A family of models is a subclass that names its attention and says how its pages lie.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Num

from paxserve.models.batch import AttentionBatch
from paxserve.models.config import ModelConfig
from paxserve.models.layers import Embedding, GatedMLP, Linear, RMSNorm, project
from paxserve.models.moe import MoE
from paxserve.models.params import Declare
from paxserve.models.rope import RopeTable, rope_table
from paxserve.sharding import ONE_DEVICE, MeshShape

# A window wider than any context. Layers without a window use it when layers with different windows share one scan.
NO_WINDOW = 2**30

KVPages = Num[Array, "layers_pages *page"]
Window = Int[Array, ""] | int | None

Carry = tuple[Float[Array, "tokens embed"], Float[Array, "tokens embed"], KVPages]
"""From layer to layer: x and y, whose sum is the layer's input, and the pages."""


class DecoderLayer(nnx.Module):
    """Layer `index`, or all those of a run that begins there: its parameters get a leading axis if `declare` stacks them.

    attention: the class of its attention, made from (declare, config) and called with (x, kv_pages, batch, rope, layer,
    window); it gives (output, kv_pages with what the layer caches of the tokens written).
    """

    def __init__(self, declare: Declare, config: ModelConfig, index: int, attention: type[nnx.Module]) -> None:
        make_attention: Any = attention
        self.attn_norm = RMSNorm(declare, config.hidden_size, "embed", config.rms_norm_eps)
        self.attn = make_attention(declare, config)
        self.mlp_norm = RMSNorm(declare, config.hidden_size, "embed", config.rms_norm_eps)
        self.mlp: MoE | GatedMLP
        if config.moe is not None and config.moe.layers[index]:
            self.mlp = MoE(declare, config.hidden_size, config.moe, shared_bias=config.mlp_bias)
        else:
            self.mlp = GatedMLP(declare, config.hidden_size, config.intermediate_size, use_bias=config.mlp_bias)

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        y: Float[Array, "tokens embed"],
        kv_pages: KVPages,
        batch: AttentionBatch,
        rope: RopeTable,
        layer: Int[Array, ""] | int,
        window: Window,
    ) -> tuple[Float[Array, "tokens embed"], Float[Array, "tokens embed"], KVPages]:
        """(x, y, kv_pages) of the next layer: its input is x + y.

        Whoever normalises x + y also adds: XLA makes one pass of both, but none across the turns of a scan.
        """
        with jax.named_scope("attention"):
            x = x + y
            attended, kv_pages = self.attn(self.attn_norm(x), kv_pages, batch, rope, layer, window)
            x = x + attended
        with jax.named_scope("mlp"):
            y = self.mlp_norm(x)
            y = self.mlp(y, layer) if isinstance(self.mlp, MoE) else self.mlp(y)
            return x, y, kv_pages


class Decoder(nnx.Module):
    """The whole model. `dtype` is that of weights and activations; norms, RoPE, softmax and logits are float32.

    scan_layers: stack the parameters of each run of layers alike and go over them with one `lax.scan`, so that compile
    time does not grow with depth (TPU); otherwise layers are unrolled, which spares the copy of every layer's weights that
    XLA makes in a scan on CPU and GPU. Both run the same layer function on the same pages array and give the same numbers.

    quantization: "fp8" for layers with kernels in FP8; embedding and output projection are in `dtype` all the same.
    mesh: what the parameters are to be spread over. Under `jax.shard_map` over it the model works on a device's parts.
    """

    attention: ClassVar[type[nnx.Module]]

    pages_axes: ClassVar[tuple[str, ...]]
    """Logical names of the first axes of the pages array; the others are not split."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: Any,
        scan_layers: bool,
        quantization: str | None = None,
        mesh: MeshShape = ONE_DEVICE,
    ) -> None:
        declare = Declare(dtype, mesh=mesh)
        self.config, self.scan_layers = config, scan_layers
        self.embed = Embedding(declare, config.vocab_size, config.hidden_size)
        if scan_layers:
            layers = [
                DecoderLayer(Declare(dtype, run, quantization, mesh), config, run.start, self.attention)
                for run in config.alike_layers()
            ]
        else:
            quantized = Declare(dtype, None, quantization, mesh)
            layers = [DecoderLayer(quantized, config, index, self.attention) for index in range(config.num_layers)]
        self.layers = nnx.List(layers)
        self.final_norm = RMSNorm(declare, config.hidden_size, "embed", config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(declare, (config.vocab_size,), config.hidden_size, ("vocab",), "embed")

    @staticmethod
    def pages_shape(config: ModelConfig, num_pages: int, page_size: int, platform: str) -> tuple[int, ...]:
        """Shape of the one array that holds every layer's `num_pages` KV pages on a platform, with all KV heads."""
        raise NotImplementedError

    def schedule(self, x: Float[Array, "tokens embed"], kv_pages: KVPages, batch: AttentionBatch) -> Any:
        """What the layers, whose input is like x, share of the attention's work; None for nothing."""
        raise NotImplementedError

    def __call__(
        self, tokens: Int[Array, "tokens"], kv_pages: KVPages, batch: AttentionBatch
    ) -> tuple[Float[Array, "tokens embed"], KVPages]:
        """(hidden states after the final norm, kv_pages with what every layer caches of the tokens written).

        Padding tokens give finite, meaningless hidden states.
        """
        with jax.named_scope("embed"):
            x = self.embed(tokens)  # [tokens, embed]
        with jax.named_scope("rope_table"):
            rope = rope_table(self.config.rope, self.config.rope_dim, batch.positions)
        with jax.named_scope("schedule"):
            batch = dataclasses.replace(batch, schedule=self.schedule(x, kv_pages, batch))
        with jax.named_scope("layers"):
            run = self._scanned if self.scan_layers else self._unrolled
            x, y, kv_pages = run((x, jnp.zeros_like(x), kv_pages), batch, rope)
        with jax.named_scope("final_norm"):
            return self.final_norm(x + y), kv_pages

    def logits(self, hidden: Float[Array, "rows embed"]) -> Float[Array, "rows vocab"]:
        """float32 scores of the next token for rows of hidden states, on a mesh for this device's part of the vocabulary."""
        kernel = self.embed.embedding if self.config.tie_word_embeddings else self.lm_head.kernel
        with jax.named_scope("logits"):
            return project(hidden, kernel[...])

    def _unrolled(self, carry: Carry, batch: AttentionBatch, rope: RopeTable) -> Carry:
        for index, (layer, window) in enumerate(zip(self.layers, self.config.windows, strict=True)):
            graph, params = nnx.split(layer)
            carry = _run_layer(graph, window, params, carry, batch, rope, jnp.int32(index))
        return carry

    def _scanned(self, carry: Carry, batch: AttentionBatch, rope: RopeTable) -> Carry:
        for run, layers in zip(self.config.alike_layers(), self.layers, strict=True):
            carry = self._scan_run(run, layers, carry, batch, rope)
        return carry

    def _scan_run(
        self, run: range, layers: DecoderLayer, carry: Carry, batch: AttentionBatch, rope: RopeTable
    ) -> Carry:
        windows = [self.config.windows[index] for index in run]
        uniform = len(set(windows)) == 1
        stacked_windows = jnp.array([NO_WINDOW if w is None else w for w in windows], jnp.int32)
        # Experts' kernels are not sliced by the scan: see MoE.
        graph, *(experts, stacked) = nnx.split(layers, lambda path, param: "expert" in param.axes, ...)

        def body(carry: Carry, scanned: tuple[nnx.State, Array, Array]) -> tuple[Carry, None]:
            params, index, window = scanned
            layer = nnx.merge(graph, experts, params)
            return layer(*carry, batch, rope, index, windows[0] if uniform else window), None

        indices = jnp.arange(run.start, run.stop, dtype=jnp.int32)
        carry, _ = jax.lax.scan(body, carry, (stacked, indices, stacked_windows))
        return carry


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_layer(
    graph: nnx.GraphDef,
    window: int | None,
    params: nnx.State,
    carry: Carry,
    batch: AttentionBatch,
    rope: RopeTable,
    layer: Int[Array, ""],
) -> Carry:
    """A layer as a function of its parameters and number, so that layers alike are traced once."""
    return nnx.merge(graph, params)(*carry, batch, rope, layer, window)
