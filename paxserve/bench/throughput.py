"""Runs a workload through the engine and keeps what happened."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paxserve.bench.workload import BenchRequest
from paxserve.buckets import Bucket
from paxserve.engine import Engine
from paxserve.metrics import EngineStats
from paxserve.outputs import RequestOutput
from paxserve.runner import InFlight
from paxserve.sampling_params import SamplingParams
from paxserve.scheduler import StepPlan

WARMUP_TOKENS = 8


@dataclass(frozen=True)
class StepRecord:
    """One step: what it computed, in which bucket, and its seconds on the device as the host saw them."""

    plans: tuple[StepPlan, ...]
    bucket: Bucket
    seconds: float


@dataclass
class Run:
    """One pass over a workload."""

    seconds: float = 0.0
    outputs: list[RequestOutput] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)


class RecordingEngine(Engine):
    """An engine that also keeps every step of the current `Run`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._request_ids = itertools.count()
        self._steps: list[StepRecord] = []

    def run(self, requests: Sequence[BenchRequest], concurrency: int) -> Run:
        """Runs all requests to their ends, submitting the next one whenever fewer than `concurrency` are unfinished."""
        run = Run()
        self.stats, self._steps = run.stats, run.steps
        waiting = list(reversed(requests))
        unfinished = 0
        start = time.perf_counter()
        while waiting or unfinished:
            while waiting and unfinished < concurrency:
                self._submit(waiting.pop())
                unfinished += 1
            finished = [output for output in self.step() if output.finished]
            unfinished -= len(finished)
            run.outputs += finished
        run.seconds = time.perf_counter() - start
        return run

    def _submit(self, request: BenchRequest) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
        self.add_request(str(next(self._request_ids)), request.prompt_token_ids, params)

    def _count_step(self, flight: InFlight, seconds: float) -> None:
        super()._count_step(flight, seconds)
        self._steps.append(StepRecord(flight.plans, flight.bucket, seconds))


def warmup_requests(requests: Sequence[BenchRequest], concurrency: int) -> list[BenchRequest]:
    """A short run of the same prompts, so that what only the first use of memory and code costs is not measured."""
    return [
        BenchRequest(request.prompt_token_ids, min(request.max_tokens, WARMUP_TOKENS))
        for request in requests[:concurrency]
    ]
