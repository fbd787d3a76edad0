"""Which tokens of which requests the next step computes (iteration-level scheduling, Orca; chunked prefill, Sarathi-Serve).

A deterministic state machine: no clock, no random source, no I/O and no JAX, so that every host of a run, a simulator and
a replay of a recorded log all take the same decisions.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from paxserve.pages import PagePool
from paxserve.request import Request, Status


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step.

    token_buckets: the step sizes, ascending, that a step with prefill in it is padded to; the last is the token budget.
    """

    max_num_seqs: int
    max_model_len: int
    token_buckets: tuple[int, ...]


@dataclass(frozen=True)
class PlannedRow:
    """Tokens start .. start + count - 1 of a request; `samples` if the step draws the token after them.

    copies: (source, destination) pages to copy before the step, because the request writes a page it shared.
    """

    request: Request
    start: int
    count: int
    samples: bool
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class StepPlan:
    """What one step computes: rows of one token first, then prefill chunks.

    shared: requests that start here behind tokens which another request has computed.
    """

    rows: tuple[PlannedRow, ...]
    preempted: tuple[Request, ...] = ()
    shared: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def copies(self) -> list[tuple[int, int]]:
        return [pair for row in self.rows for pair in row.copies]


@dataclass
class _Draft:
    """A plan being made."""

    budget: int
    rows: dict[Request, PlannedRow] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    shared: list[Request] = field(default_factory=list)

    def drop(self, request: Request) -> None:
        row = self.rows.pop(request, None)
        if row is not None:
            self.budget += row.count


class Scheduler:
    """Continuous batching over a page pool.

    `plan` and `commit` alternate, but a plan may be made before the one before it is committed: a token that is drawn and
    not yet seen counts as pending. Requests are served by (priority, arrival). Running decodes go first, then prefill
    chunks fill the token budget, then waiting requests are admitted while slots and pages last. When pages run out the
    request last in order is preempted: its pages are freed and it is computed again later. The first in order is never
    preempted and can take every page, so it always finishes; hence so does every request.
    """

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        if list(config.token_buckets) != sorted(set(config.token_buckets)):
            raise ValueError(f"token_buckets={config.token_buckets}: must be ascending")
        if config.token_buckets[-1] < config.max_num_seqs:
            raise ValueError(
                f"a step of {config.token_buckets[-1]} tokens cannot hold one token of each of {config.max_num_seqs} "
                "sequences: raise max_num_batched_tokens or lower max_num_seqs"
            )
        self.config = config
        self.pool = pool
        self._waiting: list[Request] = []  # in order
        self._running: list[Request] = []  # in order
        self._free_slots = list(range(config.max_num_seqs))
        self._arrivals = 0

    @property
    def waiting(self) -> Sequence[Request]:
        return self._waiting

    @property
    def running(self) -> Sequence[Request]:
        return self._running

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def spare_pages(self) -> int:
        """Pages that are neither taken nor wanted by what waits; negative if more is wanted than there is."""
        wanted = sum(self.pool.pages_for(request.num_tokens + 1) for request in self._waiting)
        return self.pool.free_pages - wanted

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it could never run: empty, longer than the context, or than the pool."""
        prompt_len = len(request.prompt_token_ids)
        if prompt_len == 0:
            raise ValueError(f"request {request.id}: the prompt is empty; it needs at least one token")
        if prompt_len >= self.config.max_model_len:
            raise ValueError(
                f"request {request.id}: a prompt of {prompt_len} tokens leaves no room for an answer in the context of "
                f"{self.config.max_model_len} (max_model_len); shorten it or raise max_model_len"
            )
        pages = self.pool.pages_for(self._limit(request))
        if pages > self.pool.capacity:
            raise ValueError(
                f"request {request.id}: its {self._limit(request)} tokens (prompt and max_tokens) need {pages} pages, the "
                f"pool has {self.pool.capacity}; lower max_tokens or raise num_pages"
            )
        request.number = self._arrivals
        self._arrivals += 1
        bisect.insort(self._waiting, request, key=_order)

    def abort(self, request: Request, reason: str = "abort") -> None:
        """End a request now, whatever its state; a token of it still in flight is dropped when it arrives."""
        if not request.finished:
            self._finish(request, reason)

    def plan(self, now: float = 0.0) -> StepPlan:
        """The next step, on the assumption that it is dispatched. `now` only dates each request's first step."""
        draft = _Draft(self._token_budget())
        runnable = [r for r in self._running if r.num_tokens < self._limit(r)]
        for request in [r for r in runnable if r.num_uncomputed == 1]:
            self._plan_row(draft, request)
        for request in [r for r in runnable if r.num_uncomputed > 1]:
            self._plan_row(draft, request)
        self._admit(draft)

        rows = sorted(draft.rows.values(), key=lambda row: row.count > 1)
        for row in rows:
            request = row.request
            request.num_computed += row.count
            request.num_pending += row.samples
            if request.first_planned_at is None:
                request.first_planned_at = now
        return StepPlan(tuple(rows), tuple(draft.preempted), tuple(draft.shared))

    def commit(self, plan: StepPlan, tokens: Sequence[int]) -> list[PlannedRow]:
        """Take in the tokens a plan drew, one per row (any value where the row draws none).

        Returns the rows whose token was accepted, i.e. whose request had not ended meanwhile; requests that end with
        their token are finished here, with `finish_reason` "stop" or "length".
        """
        accepted = []
        for row, token in zip(plan.rows, tokens, strict=True):
            request = row.request
            if not row.samples or request.finished:
                continue
            request.num_pending -= 1
            request.output_token_ids.append(int(token))
            accepted.append(row)
            if token in request.stop_ids:
                request.stop_reason = int(token) if token in (request.params.stop_token_ids or ()) else None
                self._finish(request, "stop")
            elif request.num_tokens - request.num_pending >= self._limit(request):
                self._finish(request, "length")
        return accepted

    def _limit(self, request: Request) -> int:
        """Tokens, prompt included, after which the request ends."""
        if request.params.max_tokens is None:
            return self.config.max_model_len
        return min(len(request.prompt_token_ids) + request.params.max_tokens, self.config.max_model_len)

    def _token_budget(self) -> int:
        """A bucket that this step can fill: what does not fit rides along with the next step's decodes."""
        buckets = self.config.token_buckets
        admissible = self._waiting[: len(self._free_slots)]
        demand = sum(r.num_uncomputed for r in self._running) + sum(r.num_tokens for r in admissible)
        index = bisect.bisect_left(buckets, demand)
        if index == len(buckets):
            return buckets[-1]
        padding = buckets[index] - demand
        if padding * 8 > buckets[index] and index and buckets[index - 1] > len(self._running):
            return buckets[index - 1]
        return buckets[index]

    def _plan_row(self, draft: _Draft, request: Request) -> None:
        """Give a running request as many of its uncomputed tokens as the budget and the pages allow."""
        count = min(request.num_uncomputed, draft.budget)
        if request.status is not Status.RUNNING or count == 0:
            return
        start = request.num_computed
        while (room := self._room(request)) <= 0:
            victim = self._running[-1]
            if victim is request:
                return  # the requests before it go on, and their pages come free or this one is preempted
            self._preempt(draft, victim)
        count = min(count, room)
        copies = []
        if start < len(request.pages) * self.pool.page_size:
            index = start // self.pool.page_size
            page = request.pages[index]
            if self.pool.refcount(page) > 1:
                request.pages[index] = self.pool.copy_on_write(page, request.id)
                copies.append((page, request.pages[index]))
        missing = self.pool.pages_for(start + count) - len(request.pages)
        if missing > 0:
            request.pages += self.pool.allocate(missing, request.id, after=request.pages)
        draft.budget -= count
        draft.rows[request] = PlannedRow(request, start, count, count == request.num_uncomputed, tuple(copies))

    def _room(self, request: Request) -> int:
        """Tokens the request can compute with the pages it has and those that are free."""
        start, end = request.num_computed, len(request.pages) * self.pool.page_size
        shared = None
        if start < end and self.pool.refcount(page := request.pages[start // self.pool.page_size]) > 1:
            shared = page
        free = self.pool.available(request.pages, copying=shared)
        return 0 if free < 0 else end + free * self.pool.page_size - start

    def _admit(self, draft: _Draft) -> None:
        """Move waiting requests, in order, into free slots while their whole length fits into pages not spoken for."""
        for request in list(self._waiting):
            if draft.budget == 0 or not self._free_slots or draft.preempted:
                return
            if request.num_pending or not self._ready(draft, request):
                continue
            spoken_for = sum(max(self.pool.pages_for(r.num_tokens + 1) - len(r.pages), 0) + 1 for r in self._running)
            if self.pool.pages_for(request.num_tokens + 1) + spoken_for > self.pool.free_pages:
                return
            self._waiting.remove(request)
            request.slot = self._free_slots.pop()
            request.status = Status.RUNNING
            bisect.insort(self._running, request, key=_order)
            self._share_prompt(draft, request)
            self._plan_row(draft, request)

    def _ready(self, draft: _Draft, request: Request) -> bool:
        """False while the prompt that this request could share is still being computed or copied."""
        parent = request.parent
        if parent is None or parent.finished or request.output_token_ids:
            return True
        row = draft.rows.get(parent)
        return parent.num_computed >= len(request.prompt_token_ids) - 1 and not (row and row.copies)

    def _share_prompt(self, draft: _Draft, request: Request) -> None:
        """Start a sample from its parent's prompt pages; its last prompt token is computed again, to draw from its logits."""
        parent = request.parent
        if parent is None or parent.status is not Status.RUNNING or request.output_token_ids:
            return
        shared = len(request.prompt_token_ids) - 1
        request.pages = self.pool.share(parent.pages[: self.pool.pages_for(shared)], request.id)
        request.num_computed = shared
        draft.shared.append(request)

    def _preempt(self, draft: _Draft, request: Request) -> None:
        draft.drop(request)
        draft.preempted.append(request)
        self._release(request)
        request.status = Status.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        bisect.insort(self._waiting, request, key=_order)

    def _finish(self, request: Request, reason: str) -> None:
        if request.status is Status.RUNNING:
            self._release(request)
        else:
            self._waiting.remove(request)
        request.status = Status.FINISHED
        request.finish_reason = reason

    def _release(self, request: Request) -> None:
        """Take a running request's pages and slot."""
        self._running.remove(request)
        self.pool.release(request.pages, request.id)
        request.pages = []
        assert request.slot is not None
        self._free_slots.append(request.slot)
        request.slot = None


def _order(request: Request) -> tuple[int, int]:
    return request.order
