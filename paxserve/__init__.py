"""paxserve: LLM inference on JAX and Pallas, with a paged KV cache and continuous batching."""

from paxserve.llm import LLM
from paxserve.outputs import CompletionOutput, Logprob, RequestOutput
from paxserve.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]
