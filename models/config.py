"""What a model's architecture is, as one frozen dataclass, whatever file it was read from."""

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
class ModelConfig:
    """A decoder-only transformer with RMSNorm, RoPE, grouped-query attention and a gated MLP.

    MHA is `num_kv_heads == num_heads`, MQA is `num_kv_heads == 1`. `windows[l]` is layer l's sliding window in tokens
    (a query sees itself and the window - 1 tokens before it), None for full attention.
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

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot be shared evenly by {self.num_kv_heads} KV heads")
        if len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} window entries for {self.num_layers} layers")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads
