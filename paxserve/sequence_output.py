"""The user-visible side of one sample: its text, stop strings and logprobs, as tokens come in."""

from collections.abc import Sequence

import numpy as np

from paxserve.outputs import CompletionOutput, Logprob, TokenLogprobs
from paxserve.request import Request
from paxserve.sampler import LogprobsBatch
from paxserve.tokenizers import Detokenizer, StopStrings, Tokenizer


class SequenceOutput:
    """Turns a request's tokens into a `CompletionOutput`."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.output = CompletionOutput(index, "", [], logprobs=None if params.logprobs is None else [])
        if params.logprobs is not None:
            self.output.cumulative_logprob = 0.0
        self._tokenizer = tokenizer
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer, skip_special_tokens=params.skip_special_tokens, starts_text=False
            )
        self._stop = StopStrings(tuple(params.stop or ()), include_in_output=params.include_stop_str_in_output)

    def push(self, token: int, logprobs: TokenLogprobs | None) -> str | None:
        """Take in the next token. Returns the stop string that ends the text with it, if one does."""
        self.output.token_ids.append(token)
        if logprobs is not None:
            assert self.output.logprobs is not None
            assert self.output.cumulative_logprob is not None
            self.output.logprobs.append(logprobs)
            self.output.cumulative_logprob += logprobs[token].logprob
        params = self.request.params
        if self._detokenizer is None or (token in self.request.stop_ids and not params.include_stop_str_in_output):
            return None  # as in vLLM, a token that ends the sequence is not part of its text
        text = self._detokenizer.push(token)
        if len(self.output.token_ids) <= params.min_tokens:
            self.output.text += text
            return None
        self.output.text += self._stop.push(text)
        return self._stop.matched

    def finish(self) -> None:
        """The request has ended: give out the text that was held back, and say why it ended."""
        if self._detokenizer is not None and self._stop.matched is None:
            self.output.text += self._stop.push(self._detokenizer.flush()) + self._stop.flush()
        self.output.finish_reason = self.request.finish_reason
        self.output.stop_reason = self.request.stop_reason


def token_logprobs(
    batch: LogprobsBatch, rows: Sequence[int], tokens: Sequence[int], count: int, tokenizer: Tokenizer | None
) -> list[TokenLogprobs]:
    """Of each row, the `count` most likely tokens and the row's own token. `batch` holds numpy arrays."""

    def entry(token: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(token))

    result = []
    for row, token in zip(rows, tokens, strict=True):
        ids, values = np.asarray(batch.top_ids[row][:count]), np.asarray(batch.top_logprobs[row][:count])
        top = {
            int(i): entry(int(i), float(v), rank + 1)
            for rank, (i, v) in enumerate(zip(ids, values, strict=True))
            if i >= 0
        }
        if token not in top:
            top[token] = entry(token, float(batch.token_logprobs[row]), int(batch.token_ranks[row]))
        result.append(top)
    return result
