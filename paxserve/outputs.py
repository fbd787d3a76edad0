"""What comes back to the user, in vLLM's shapes."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of a token under the unmodified logits, its rank (1: the most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None


TokenLogprobs = dict[int, Logprob]
"""The alternatives at one place, by token id, the most likely first; the token that stands there is always among them."""


@dataclass
class CompletionOutput:
    """One sample. finish_reason: "stop", "length" or "abort"; None while it goes on.

    stop_reason: the stop string or stop token id that ended it, None for the model's own end or another reason.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request on the engine's clock, in seconds; None for what has not happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_generated_tokens: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, for finished requests of two tokens or more."""
        if self.finished_time is None or self.first_token_time is None or self.num_generated_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_generated_tokens - 1)


@dataclass
class RequestOutput:
    """A request and all of its samples so far.

    prompt_logprobs: per prompt token, None for the first; None if not asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: list[RequestMetrics]
    prompt_logprobs: list[TokenLogprobs | None] | None = field(default=None)
