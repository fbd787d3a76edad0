"""paxserve: LLM inference on JAX and Pallas, with a paged KV cache and continuous batching."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paxserve.llm import LLM
    from paxserve.outputs import CompletionOutput, Logprob, RequestOutput
    from paxserve.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "llm",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for (PEP 562), so that `paxserve --help` does not wait for JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
