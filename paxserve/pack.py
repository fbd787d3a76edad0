"""From a plan to the arrays of a step: plain numpy, padded to a bucket."""

import numpy as np

from paxserve.buckets import Bucket
from paxserve.pages import NULL_PAGE
from paxserve.request import Request
from paxserve.sampler import SamplingBatch
from paxserve.sampling_params import MAX_BIASED_TOKENS
from paxserve.scheduler import PlannedRow, StepPlan
from paxserve.step import StepInputs

_PADDING_ID = np.iinfo(np.int32).max  # out of every vocabulary


def pack(plan: StepPlan, bucket: Bucket, pages_per_seq: int, padding_slot: int) -> StepInputs:
    """The plan's tokens and block tables. Padding sequences own no token, have context 0 and only the null page."""
    tokens = np.zeros(bucket.tokens, np.int32)
    slots = np.full(bucket.seqs, padding_slot, np.int32)
    block_tables = np.full((bucket.seqs, pages_per_seq), NULL_PAGE, np.int32)
    context_lens = np.zeros(bucket.seqs, np.int32)
    query_starts = np.full(bucket.seqs + 1, plan.num_tokens, np.int32)
    start = 0
    for index, row in enumerate(plan.rows):
        request, end = row.request, row.start + row.count
        query_starts[index] = start
        slots[index] = request.slot
        context_lens[index] = end
        block_tables[index, : len(request.pages)] = request.pages
        tokens[start : start + row.count] = request.tokens(row.start, end)
        start += row.count
    return StepInputs(tokens, slots, block_tables, context_lens, query_starts)


def pack_sampling(rows: tuple[PlannedRow, ...], seqs: int) -> SamplingBatch:
    """The sampling side of a plan; padding rows are greedy. It changes only when `sampling_key` does."""
    floats = np.zeros((6, seqs), np.float32)
    temperature, top_p, min_p, presence, frequency, repetition = floats
    top_p[:] = repetition[:] = 1
    top_k, prompt_lens = np.zeros((2, seqs), np.int32)
    seeds = np.zeros((seqs, 2), np.uint32)
    bias_ids = np.full((seqs, MAX_BIASED_TOKENS), _PADDING_ID, np.int32)
    bias_values = np.zeros((seqs, MAX_BIASED_TOKENS), np.float32)
    wants_logprobs = np.zeros(seqs, bool)
    for index, row in enumerate(rows):
        request, params = row.request, row.request.params
        temperature[index], top_p[index], min_p[index] = params.temperature, params.top_p, params.min_p
        presence[index], frequency[index] = params.presence_penalty, params.frequency_penalty
        repetition[index] = params.repetition_penalty
        top_k[index], prompt_lens[index] = params.top_k, len(request.prompt_token_ids)
        seeds[index] = request.seed >> 32, request.seed & 0xFFFFFFFF
        wants_logprobs[index] = params.logprobs is not None
        bias = biases(request, stops_barred=_stops_barred(row))
        bias_ids[index, : len(bias)] = list(bias)
        bias_values[index, : len(bias)] = list(bias.values())
    return SamplingBatch(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        prompt_lens=prompt_lens,
        bias_ids=bias_ids,
        bias_values=bias_values,
        wants_logprobs=wants_logprobs,
    )


def sampling_key(rows: tuple[PlannedRow, ...]) -> tuple:
    """Equal for steps whose sampling arrays are equal, so that a run of decode steps uploads them once."""
    return tuple((row.request.id, _stops_barred(row)) for row in rows)


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
