"""What a model's architecture is, as one frozen dataclass, whatever file it was read from."""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv:2104.09864) and how it is stretched to longer contexts.

    kind: "default", "linear" (position interpolation), "dynamic" (NTK), "llama3" (Llama 3.1) or "yarn"
    (arXiv:2309.00071). Fields that a kind does not use keep their defaults.
    original_max_position: the context length the model was trained with, needed by "dynamic", "llama3" and "yarn".
    frequency_factors: a divisor for each of the head_dim // 2 frequencies, the form in which GGUF files store a scaling
    already worked out.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): what is cached of a token is one latent and one key.

    q_lora_rank: width of the query's low-rank bottleneck, None where queries are projected at once.
    kv_lora_rank: width of the latent that keys and values are expanded from.
    qk_nope_head_dim, qk_rope_head_dim: a head's query and key dimensions without and with RoPE; the RoPE part of the key
    is shared by all heads.
    rope_interleaved: RoPE turns neighbouring pairs (x[2i], x[2i + 1]), the order of the released weights, rather than
    (x[i], x[i + half]).
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleaved: bool = True

    @property
    def cached_dim(self) -> int:
        """Values that the cache holds of a token in a layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts (arXiv:1701.06538) in place of the MLP in some layers.

    layers[l]: whether layer l has experts; the others have a dense MLP of `ModelConfig.intermediate_size`.
    intermediate_size: width of one routed expert. shared_intermediate_size: joint width of the shared experts, 0: none.
    scoring: "softmax" or "sigmoid" of the router's logits.
    groups, top_groups: experts are chosen from the `top_groups` best of `groups` groups of neighbours
    (group-limited routing); 1 and 1: from all.
    group_score: a group's rank is by its best score, "max" (DeepSeek-V2), or the sum of its two best, "top2" (V3).
    score_bias: a learned bias per expert counts in choosing experts, not in weighing them (arXiv:2408.15664).
    normalize: the chosen experts' weights are made to sum to 1; then they are multiplied by `scaling`.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    layers: tuple[bool, ...]
    shared_intermediate_size: int = 0
    scoring: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    score_bias: bool = False
    normalize: bool = True
    scaling: float = 1.0

    def __post_init__(self) -> None:
        if self.num_experts % self.groups:
            raise ValueError(f"{self.num_experts} experts cannot be split into {self.groups} groups of one size")
        reachable = self.num_experts // self.groups * self.top_groups
        if not 1 <= self.experts_per_token <= reachable <= self.num_experts:
            raise ValueError(
                f"{self.experts_per_token} experts per token cannot be chosen from {self.top_groups} of {self.groups} "
                f"groups of {self.num_experts} experts"
            )


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with RMSNorm, RoPE, attention over a KV cache and a gated MLP or experts.

    MHA is `num_kv_heads == num_heads`, MQA is `num_kv_heads == 1`. `windows[l]` is layer l's sliding window in tokens
    (a query sees itself and the window - 1 tokens before it), None for full attention. With `mla`, `num_kv_heads` is
    `num_heads` and `head_dim` a query head's whole width, RoPE part included. `mtp_layers` layers for multi-token
    prediction (arXiv:2412.19437, section 2.2) follow the `num_layers` in a checkpoint; they are not run. `quantization`
    says how the checkpoint stores the layers' kernels, if not as numbers: "fp8", with scales for blocks (models/fp8.py).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    mtp_layers: int = 0
    quantization: str | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot be shared evenly by {self.num_kv_heads} KV heads")
        if len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} window entries for {self.num_layers} layers")
        if self.moe is not None and len(self.moe.layers) != self.num_layers:
            raise ValueError(f"{len(self.moe.layers)} entries of moe.layers for {self.num_layers} layers")
        if self.mla is not None and (any(self.windows) or self.num_kv_heads != self.num_heads):
            raise ValueError(
                f"latent attention with windows {self.windows} and {self.num_kv_heads} KV heads of {self.num_heads} heads; "
                "it has no windows, and a key for every head"
            )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that RoPE rotates."""
        return self.head_dim if self.mla is None else self.mla.qk_rope_head_dim

    def alike_layers(self) -> list[range]:
        """The layers in runs with parameters of the same shapes: those with experts and those without."""
        has_experts = (False,) * self.num_layers if self.moe is None else self.moe.layers
        starts = [i for i in range(self.num_layers) if i == 0 or has_experts[i] != has_experts[i - 1]]
        return [range(*bounds) for bounds in itertools.pairwise([*starts, self.num_layers])]
