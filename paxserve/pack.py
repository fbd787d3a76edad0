"""From a plan to the arrays of a step: plain numpy, padded to a bucket."""

from typing import Any

import numpy as np

from paxserve.buckets import Bucket
from paxserve.pages import NULL_PAGE
from paxserve.request import Request
from paxserve.sampler import SamplingBatch
from paxserve.sampling_params import MAX_BIASED_TOKENS
from paxserve.scheduler import PlannedRow, StepPlan
from paxserve.step import StepInputs

# SamplingParams fields that are arrays of the same name.
_FIELDS = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")

_PADDING_ID = np.iinfo(np.int32).max  # out of every vocabulary


def pack(plan: StepPlan, bucket: Bucket, pages_per_seq: int, padding_slot: int) -> StepInputs:
    """The plan's tokens and block tables. Padding sequences own no token, have context 0 and only the null page."""
    arrays: dict[str, Any] = {
        "tokens": np.zeros(bucket.tokens, np.int32),
        "slots": np.full(bucket.seqs, padding_slot, np.int32),
        "block_tables": np.full((bucket.seqs, pages_per_seq), NULL_PAGE, np.int32),
        "context_lens": np.zeros(bucket.seqs, np.int32),
        "query_starts": np.full(bucket.seqs + 1, plan.num_tokens, np.int32),
    }
    start = 0
    for index, row in enumerate(plan.rows):
        request, end = row.request, row.start + row.count
        arrays["tokens"][start : start + row.count] = request.tokens(row.start, end)
        arrays["slots"][index] = request.slot
        arrays["block_tables"][index, : len(request.pages)] = request.pages
        arrays["context_lens"][index] = end
        arrays["query_starts"][index] = start
        start += row.count
    return StepInputs(**arrays)


def pack_sampling(rows: tuple[PlannedRow, ...], seqs: int) -> SamplingBatch:
    """The sampling side of a plan; padding rows are greedy. It changes only when `sampling_key` does."""
    arrays: dict[str, Any] = {
        "temperature": np.zeros(seqs, np.float32),
        "top_k": np.zeros(seqs, np.int32),
        "top_p": np.ones(seqs, np.float32),
        "min_p": np.zeros(seqs, np.float32),
        "seeds": np.zeros((seqs, 2), np.uint32),
        "presence_penalty": np.zeros(seqs, np.float32),
        "frequency_penalty": np.zeros(seqs, np.float32),
        "repetition_penalty": np.ones(seqs, np.float32),
        "prompt_lens": np.zeros(seqs, np.int32),
        "bias_ids": np.full((seqs, MAX_BIASED_TOKENS), _PADDING_ID, np.int32),
        "bias_values": np.zeros((seqs, MAX_BIASED_TOKENS), np.float32),
        "wants_logprobs": np.zeros(seqs, bool),
    }
    for index, row in enumerate(rows):
        request = row.request
        for name in _FIELDS:
            arrays[name][index] = getattr(request.params, name)
        arrays["seeds"][index] = request.seed >> 32, request.seed & 0xFFFFFFFF
        arrays["prompt_lens"][index] = len(request.prompt_token_ids)
        bias = biases(request, stops_barred=_stops_barred(row))
        arrays["bias_ids"][index, : len(bias)] = list(bias)
        arrays["bias_values"][index, : len(bias)] = list(bias.values())
        arrays["wants_logprobs"][index] = request.params.logprobs is not None
    return SamplingBatch(**arrays)


def sampling_key(rows: tuple[PlannedRow, ...]) -> tuple:
    """Equal for steps whose sampling arrays are equal, so that a run of decode steps uploads them once."""
    return tuple((row.request, _stops_barred(row)) for row in rows)  # not its id, which may be used again


def biases(request: Request, *, stops_barred: bool) -> dict[int, float]:
    """What is added to which logits: the user's logit_bias and, while min_tokens lasts, -inf on every stop id."""
    bias = dict(request.params.logit_bias or {})
    if stops_barred:
        bias.update(dict.fromkeys(request.stop_ids, -np.inf))
    return bias


def _stops_barred(row: PlannedRow) -> bool:
    """Whether the token that the row draws comes before the request's min_tokens are reached."""
    request = row.request
    return row.start + row.count - len(request.prompt_token_ids) < request.params.min_tokens
