"""What a user asks of one generation, in vLLM's names."""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_LOGPROBS = 20
"""Most alternatives per token that `logprobs` and `prompt_logprobs` may ask for."""

MAX_BIASED_TOKENS = 320
"""Most token ids per request that `logit_bias` and, under `min_tokens`, the stop ids may touch together."""

_MAX_BIAS = 1e30  # well inside float32
_INTEGERS = ("n", "top_k", "min_tokens")
_OPTIONAL_INTEGERS = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to draw the tokens of one request and when to end it. Every field is applied; a bad value raises ValueError.

    n: independent samples of the same prompt.
    temperature: divides the logits; 0 picks the most likely token.
    top_k: keep the k most likely tokens (0 or -1: all); ties with the k-th are kept.
    top_p: keep the smallest set of most likely tokens whose probability reaches p (nucleus sampling, arXiv:1904.09751).
    min_p: drop tokens less likely than min_p times the most likely one.
    seed: draws depend on (seed, position) alone; None takes one from the engine's seed and the request's number.
    presence_penalty, frequency_penalty: subtracted from the logit of a token generated before, once or per occurrence.
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output (CTRL, arXiv:1909.05858).
    logit_bias: token id -> value added to its logit.
    max_tokens: tokens to generate at most; None runs to the model's context.
    min_tokens: no stop id can be drawn before this many tokens.
    stop: strings that end the text; they are cut off unless include_stop_str_in_output.
    stop_token_ids: ids that end the sequence, besides the model's own end ids (which ignore_eos switches off).
    logprobs, prompt_logprobs: alternatives per generated or prompt token, with log-probabilities of the unmodified logits;
        0 reports the token itself only, None nothing.
    detokenize: False leaves text empty (stop strings need it True).
    skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for names, kind, expected in (
            (_INTEGERS, numbers.Integral, "an integer"),
            (_OPTIONAL_INTEGERS, numbers.Integral | None, "an integer or None"),
            (_NUMBERS, numbers.Real, "a number"),
        ):
            for name in names:
                _require(isinstance(getattr(self, name), kind), name, getattr(self, name), expected)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        stop = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        bias = {int(token): float(value) for token, value in (self.logit_bias or {}).items()}
        object.__setattr__(self, "logit_bias", bias)
        _require(self.n >= 1, "n", self.n, "at least 1")
        _require(0 <= self.temperature < math.inf, "temperature", self.temperature, "0 (greedy) or a positive number")
        _require(0 <= self.top_k < 2**31, "top_k", self.top_k, "a count, or 0 or -1 for all tokens")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", self.seed, "a 64-bit integer")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "in [-2, 2]")
        _require(0 < self.repetition_penalty < math.inf, "repetition_penalty", self.repetition_penalty, "positive")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1, or None")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        most = math.inf if self.max_tokens is None else self.max_tokens
        _require(self.min_tokens <= most, "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        _require(all(isinstance(s, str) and s for s in self.stop or ()), "stop", self.stop, "non-empty strings")
        _require(self.detokenize or not self.stop, "stop", self.stop, "used with detokenize=True only")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or 0 <= value <= MAX_LOGPROBS, name, value, f"None or 0 to {MAX_LOGPROBS}")
        ids = self.stop_token_ids or ()
        _require(all(isinstance(i, numbers.Integral) for i in ids), "stop_token_ids", ids, "token ids")
        bounded = all(-_MAX_BIAS <= v <= _MAX_BIAS or v == -math.inf for v in bias.values())
        _require(bounded, "logit_bias", bias, f"within {_MAX_BIAS:g} of 0, or -inf to bar a token")


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}: must be {expected}")
