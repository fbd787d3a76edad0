"""The engine: takes requests, turns plans into steps, and gives out what comes of them."""

import atexit
import logging
import operator
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from paxserve.config import EngineConfig
from paxserve.groups import Groups
from paxserve.input_log import Abort, Arrival
from paxserve.kv_trace import open_trace
from paxserve.lockstep import connect, make_recorder
from paxserve.metrics import EngineStats
from paxserve.model_source import ModelSource, resolve_model
from paxserve.outputs import RequestMetrics, RequestOutput, TokenLogprobs
from paxserve.pack import biases
from paxserve.programs import PROMPT_LOGPROB_ROWS, Progress
from paxserve.request import Request
from paxserve.runner import InFlight, Runner
from paxserve.sampler import LogprobsBatch
from paxserve.sampling_params import MAX_BIASED_TOKENS, SamplingParams
from paxserve.scheduler import PlannedRow
from paxserve.sequence_output import SequenceOutput, token_logprobs
from paxserve.sharding import leave

logger = logging.getLogger(__name__)

Prompt = str | list[int] | Mapping[str, object]


@dataclass
class _Group:
    """The samples of one user request."""

    id: str
    prompt: str | None
    arrival: float
    samples: list[SequenceOutput]
    first_token: dict[int, float] = field(default_factory=dict)
    finished: dict[int, float] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Engine:
    """Continuous batching of one model on a mesh of devices. Not thread-safe.

    `add_request` queues, each `step` advances everything by one step of the device and returns the requests that got
    something new. While the device runs a step the host plans the next one (unless async_scheduling is off).
    """

    def __init__(self, config: EngineConfig, progress: Progress = lambda what, done, total: None) -> None:
        self.link = connect(config)
        self.source: ModelSource = resolve_model(config.model)
        self.tokenizer = self.source.tokenizer
        self.runner = Runner(self.source, config, progress)
        self.config = config
        self.limits = limits = self.runner.limits
        logger.info(
            "mesh: %s; KV pool: %d pages of %d tokens on each device, %d tokens in all; attention: %s",
            limits.mesh,
            limits.num_pages,
            limits.page_size,
            limits.pool_tokens * limits.mesh.data,
            self.runner.attention,
        )
        self.stats = EngineStats()
        self.inputs = make_recorder(config, self.source, limits, self.link)
        self._trace, self._close_trace = open_trace(None if self.follows else config.kv_trace)
        buckets = tuple(sorted(bucket.tokens for bucket in self.runner.buckets if not bucket.decode))
        self.groups = Groups(limits, buckets, [self._trace] * limits.mesh.data)
        self._groups: dict[str, _Group] = {}
        self._owners: dict[Request, tuple[_Group, SequenceOutput]] = {}
        self._in_flight: deque[tuple[InFlight, float]] = deque()
        self._aborted: list[RequestOutput] = []
        self._last_end = 0.0
        self._count = 0
        if self.link is not None:
            atexit.register(self.close)

    @property
    def follows(self) -> bool:
        """Whether another process takes the requests, which this one follows."""
        return self.link is not None and self.link.process_id > 0

    def close(self) -> None:
        """Close the KV trace and the input log, and end the other processes of the run. Called at exit otherwise."""
        self._close_trace()
        self.inputs.close()
        if self.link is not None:
            leave(self.link)

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0) -> None:
        """Queue a prompt: a string, token ids, or {"prompt_token_ids": [...]} or {"prompt": ...}. Lower priority goes first.

        Raises ValueError for a request that can never run or asks for what this model cannot do.
        """
        if request_id in self._groups:
            raise ValueError(f"request_id={request_id!r}: a request of this name is still running")
        text, token_ids = self._tokenize(prompt)
        requests = self._make_requests(request_id, token_ids, params, priority)
        for request in requests:
            self.groups.submit(request)
        samples = [SequenceOutput(request, index, self.tokenizer) for index, request in enumerate(requests)]
        group = _Group(request_id, text, time.monotonic(), samples)
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = [None]
        self._groups[request_id] = group
        self._owners.update({request: (group, sample) for request, sample in zip(requests, samples, strict=True)})
        seeded = replace(params, seed=requests[0].seed)
        self.inputs.add(Arrival(request_id, token_ids, seeded, priority))

    def abort_request(self, request_id: str) -> RequestOutput:
        """End a request at once; returns what it had, as the next `step` does too. Raises KeyError for an unknown one."""
        group = self._groups[request_id]
        self.inputs.add(Abort(request_id))
        for sample in group.samples:
            if not sample.request.finished:
                self.groups.abort(sample.request)
                self._end(group, sample, time.monotonic())
        self._aborted.append(self._output(group))
        return self._aborted[-1]

    def has_unfinished_requests(self) -> bool:
        return bool(self._groups)

    def step(self, now: float | None = None) -> list[RequestOutput]:
        """Advance by one step; returns the requests that got tokens or ended. A replay gives the clock `now` it goes by."""
        now = time.monotonic() if now is None else now
        self.inputs.step(now)
        aborted, self._aborted = self._aborted, []
        outputs = aborted + self._advance(now)
        self.inputs.give_out(outputs)
        return outputs

    def _advance(self, now: float) -> list[RequestOutput]:
        started = time.monotonic()
        plans = self.groups.plan(now)
        self.stats.preemptions += sum(len(plan.preempted) for plan in plans)
        self.stats.peak_pages = max(self.stats.peak_pages, self.groups.used_pages)
        has_rows = any(plan.rows for plan in plans)
        if has_rows:
            self._in_flight.append((self.runner.dispatch(plans), time.monotonic()))
        elif not self._in_flight:
            assert not self.groups.has_work, "requests are left, and nothing can be planned"
            return []
        self.stats.host_seconds.append(time.monotonic() - started)
        if len(self._in_flight) > (1 if self.config.async_scheduling and has_rows else 0):
            return self._collect()
        return []

    def _collect(self) -> list[RequestOutput]:
        """Wait for the oldest step in flight and hand out its tokens."""
        flight, dispatched = self._in_flight.popleft()
        tokens = np.asarray(flight.outputs.tokens)
        ended = time.monotonic()
        self._count_step(flight, ended - max(dispatched, self._last_end))
        self._last_end = ended

        touched = {}
        logprobs = None
        for row in flight.prompt_logprobs:
            if not row.request.finished:
                self._add_prompt_logprobs(row, flight)
        for number, index, row in self.groups.commit(flight.plans, tokens.tolist()):
            group, sample = self._owners[row.request]
            token = int(tokens[number, index])
            entry = None
            if (count := row.request.params.logprobs) is not None:
                logprobs = logprobs or jax.device_get(flight.outputs.logprobs)
                (entry,) = token_logprobs(_of_group(logprobs, number), [index], [token], count, self.tokenizer)
            self._take_token(group, sample, token, entry, ended)
            touched[group.id] = group
        outputs = [self._output(group) for group in touched.values()]
        self.stats.host_seconds[-1] += time.monotonic() - ended
        return outputs

    def _take_token(
        self, group: _Group, sample: SequenceOutput, token: int, logprobs: TokenLogprobs | None, now: float
    ) -> None:
        request = sample.request
        group.first_token.setdefault(sample.output.index, now)
        self.stats.generated_tokens += 1
        stop = sample.push(token, logprobs)
        if stop is not None:
            self.groups.abort(request, "stop")
            request.finish_reason, request.stop_reason = "stop", stop  # also if its length ended it at the same token
        if request.finished:
            self._end(group, sample, now)

    def _end(self, group: _Group, sample: SequenceOutput, now: float) -> None:
        sample.finish()
        group.finished[sample.output.index] = now
        del self._owners[sample.request]
        if len(group.finished) == len(group.samples):
            del self._groups[group.id]

    def _add_prompt_logprobs(self, row: PlannedRow, flight: InFlight) -> None:
        """Append what a prefill chunk tells of the prompt; a chunk computed again after a preemption adds nothing new."""
        group, _ = self._owners[row.request]
        prompt, count = row.request.prompt_token_ids, row.request.params.prompt_logprobs
        assert group.prompt_logprobs is not None
        assert count is not None
        for number, batch in enumerate(jax.device_get(flight.prompt_logprobs[row])):
            position = row.start + 1 + number * PROMPT_LOGPROB_ROWS
            targets = prompt[position : min(position + PROMPT_LOGPROB_ROWS, row.start + row.count + 1)]
            known = len(group.prompt_logprobs) - position
            if 0 <= known < len(targets):
                rows = range(known, len(targets))
                group.prompt_logprobs += token_logprobs(batch, rows, targets[known:], count, self.tokenizer)

    def _count_step(self, flight: InFlight, seconds: float) -> None:
        stats, bucket = self.stats, flight.bucket
        rows = [row for plan in flight.plans for row in plan.rows]
        scheduled = sum(row.count for row in rows)
        stats.steps += 1
        stats.scheduled_tokens += scheduled
        stats.padded_tokens += bucket.tokens * len(flight.plans) - scheduled
        stats.prompt_tokens += sum(min(r.count, max(len(r.request.prompt_token_ids) - r.start, 0)) for r in rows)
        stats.step_seconds[bucket].append(seconds)
        stats.compiles = self.runner.compiles_after_warmup

    def _output(self, group: _Group) -> RequestOutput:
        metrics = [
            RequestMetrics(
                group.arrival,
                sample.request.first_planned_at,
                group.first_token.get(index),
                group.finished.get(index),
                len(sample.output.token_ids),
            )
            for index, sample in enumerate(group.samples)
        ]
        return RequestOutput(
            group.id,
            group.prompt,
            group.samples[0].request.prompt_token_ids,
            [sample.output for sample in group.samples],
            len(group.finished) == len(group.samples),
            metrics,
            group.prompt_logprobs,
        )

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or len(prompt) != 1:
                raise ValueError(f"prompt {dict(prompt)!r}: give either 'prompt' or 'prompt_token_ids'")
            (prompt,) = prompt.values()  # type: ignore[assignment]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"model {self.source.name} has no tokenizer: give prompt_token_ids instead of text")
            return prompt, self.tokenizer.encode(prompt)
        try:
            token_ids = [operator.index(token) for token in prompt]  # type: ignore[arg-type]
        except TypeError as error:
            raise ValueError(f"prompt {prompt!r}: must be text or a list of token ids") from error
        vocab = self.source.config.vocab_size
        if bad := [token for token in token_ids if not 0 <= token < vocab]:
            raise ValueError(f"prompt_token_ids holds {bad[0]}, outside the vocabulary of {vocab}")
        return None, token_ids

    def _make_requests(
        self, request_id: str, token_ids: list[int], params: SamplingParams, priority: int
    ) -> list[Request]:
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop!r}: model {self.source.name} has no tokenizer to make text to match")
        vocab = self.source.config.vocab_size
        for token in (*params.logit_bias, *params.stop_token_ids):  # type: ignore[misc]
            if not 0 <= token < vocab:
                raise ValueError(f"logit_bias or stop_token_ids name token {token}, outside the vocabulary of {vocab}")
        stop_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_ids |= frozenset(self.source.config.eos_token_ids)
        requests: list[Request] = []
        for index in range(params.n):
            seed = self._sample_seed(params, index)
            name = f"{request_id}.{index}" if params.n > 1 else request_id
            parent = requests[0] if requests else None
            requests.append(Request(name, token_ids, params, stop_ids, seed, priority, parent))
        self._count += 1
        biased = len(biases(requests[0], stops_barred=params.min_tokens > 0))
        if biased > MAX_BIASED_TOKENS:
            raise ValueError(
                f"logit_bias and, under min_tokens, the stop ids touch {biased} tokens; {MAX_BIASED_TOKENS} are possible"
            )
        return requests

    def _sample_seed(self, params: SamplingParams, index: int) -> int:
        """64 bits: the user's seed, or one made of the engine's seed and the request's number; samples count up from it."""
        if params.seed is not None:
            return (params.seed + index) % 2**64
        return (
            int(np.random.SeedSequence([self.config.seed, self._count]).generate_state(1, np.uint64)[0]) + index
        ) % 2**64


def _of_group(logprobs: LogprobsBatch, number: int) -> LogprobsBatch:
    return jax.tree.map(lambda array: array[number], logprobs)
