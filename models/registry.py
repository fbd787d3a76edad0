"""Which model class implements an architecture."""

from paxserve.models.config import ModelConfig
from paxserve.models.decoder import Decoder
from paxserve.models.deepseek import DeepSeek
from paxserve.models.llama import Llama

MODELS: dict[str, type[Decoder]] = {
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Llama,
    "qwen3": Llama,
    "mixtral": Llama,
    "qwen3_moe": Llama,
    "deepseek_v2": DeepSeek,
    "deepseek_v3": DeepSeek,
}


def model_class(config: ModelConfig) -> type[Decoder]:
    """The class for `config.architecture`. Raises NotImplementedError if there is none."""
    if config.architecture not in MODELS:
        raise NotImplementedError(
            f"architecture {config.architecture!r} is not supported; supported are {', '.join(sorted(MODELS))}"
        )
    return MODELS[config.architecture]
