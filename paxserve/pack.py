"""From a plan to the arrays of a step: plain numpy, padded to a bucket."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paxserve.buckets import Bucket
from paxserve.limits import Limits
from paxserve.pages import NULL_PAGE
from paxserve.pallas_kernels import check_batch
from paxserve.request import Request
from paxserve.sampler import SamplingBatch
from paxserve.sampling_params import MAX_BIASED_TOKENS
from paxserve.scheduler import PlannedRow, StepPlan
from paxserve.step import StepInputs

# SamplingParams fields that are arrays of the same name.
_FIELDS = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")

_PADDING_ID = np.iinfo(np.int32).max  # out of every vocabulary


def pack(plans: Sequence[StepPlan], bucket: Bucket, limits: Limits) -> StepInputs:
    """The tokens and block tables of the data groups' plans.

    Padding sequences own no token, have context 0 and only null pages.
    """
    groups, ranks = len(plans), limits.mesh.kv_page
    per_rank = (groups, ranks, bucket.seqs)
    arrays: dict[str, Any] = {
        "tokens": np.zeros((groups, bucket.tokens), np.int32),
        "slots": np.full((groups, bucket.seqs), limits.padding_slot, np.int32),
        "block_tables": np.full((*per_rank, limits.entries_per_seq), NULL_PAGE, np.int32),
        "page_offset": np.zeros(per_rank, np.int32),
        "context_lens": np.zeros((groups, bucket.seqs), np.int32),
        "query_starts": np.empty((groups, bucket.seqs + 1), np.int32),
    }
    for group, plan in enumerate(plans):
        tokens, slots, tables, offsets, contexts, starts = (array[group] for array in arrays.values())
        starts[:] = plan.num_tokens
        start = 0
        for index, row in enumerate(plan.rows):
            request, end = row.request, row.start + row.count
            tokens[start : start + row.count] = request.tokens(row.start, end)
            slots[index], contexts[index], starts[index] = request.slot, end, start
            for rank in range(ranks):
                offset = (rank - request.pages[0]) % ranks
                pages = request.pages[offset::ranks]
                tables[rank, index, : len(pages)] = pages
                offsets[rank, index] = offset
            start += row.count
    arrays["block_tables"] //= ranks
    return StepInputs(**arrays)


def check_inputs(inputs: StepInputs, limits: Limits) -> None:
    """Raises ValueError for inputs that attention must not be given: see `check_batch`."""
    for group, tokens in enumerate(inputs.tokens):
        for tables, offset in zip(inputs.block_tables[group], inputs.page_offset[group], strict=True):
            check_batch(
                np.asarray(tables),
                np.asarray(inputs.context_lens[group]),
                np.asarray(inputs.query_starts[group]),
                tokens=len(tokens),
                num_pages=limits.num_pages,
                page_size=limits.page_size,
                page_stride=limits.mesh.kv_page,
                page_offset=np.asarray(offset),
            )


def pack_sampling(plans: Sequence[StepPlan], seqs: int) -> SamplingBatch:
    """The sampling side of the data groups' plans; padding rows are greedy. It changes only when `sampling_key` does."""
    rows = (len(plans), seqs)
    arrays: dict[str, Any] = {
        "temperature": np.zeros(rows, np.float32),
        "top_k": np.zeros(rows, np.int32),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
        "seeds": np.zeros((*rows, 2), np.uint32),
        "presence_penalty": np.zeros(rows, np.float32),
        "frequency_penalty": np.zeros(rows, np.float32),
        "repetition_penalty": np.ones(rows, np.float32),
        "prompt_lens": np.zeros(rows, np.int32),
        "bias_ids": np.full((*rows, MAX_BIASED_TOKENS), _PADDING_ID, np.int32),
        "bias_values": np.zeros((*rows, MAX_BIASED_TOKENS), np.float32),
        "wants_logprobs": np.zeros(rows, bool),
    }
    places = [((group, index), row) for group, plan in enumerate(plans) for index, row in enumerate(plan.rows)]
    for at, row in places:
        request = row.request
        for name in _FIELDS:
            arrays[name][at] = getattr(request.params, name)
        arrays["seeds"][at] = request.seed >> 32, request.seed & 0xFFFFFFFF
        arrays["prompt_lens"][at] = len(request.prompt_token_ids)
        bias = biases(request, stops_barred=_stops_barred(row))
        arrays["bias_ids"][at][: len(bias)] = list(bias)
        arrays["bias_values"][at][: len(bias)] = list(bias.values())
        arrays["wants_logprobs"][at] = request.params.logprobs is not None
    return SamplingBatch(**arrays)


def sampling_key(plans: Sequence[StepPlan]) -> tuple:
    """Equal for steps whose sampling arrays are equal, so that a run of decode steps uploads them once."""
    # Not a request's id, which may be used again.
    return tuple(tuple((row.request, _stops_barred(row)) for row in plan.rows) for plan in plans)


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
