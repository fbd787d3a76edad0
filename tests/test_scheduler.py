"""Scheduler and page pool, driven without a device: a simulated KV memory checks what every planned token would read."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paxserve.pages import OutOfPages, PagePool
from paxserve.request import Request, Status
from paxserve.sampling_params import SamplingParams
from paxserve.scheduler import PlannedRow, Scheduler, SchedulerConfig, StepPlan

STOP_TOKEN = 7


class FakeDevice:
    """Pages that remember whose token was written where, and a sampler that depends on the sequence alone."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.kv: dict[tuple[int, int], tuple[int, ...]] = {}  # (page, offset) -> the whole prefix up to that token
        self.drawn: dict[tuple[int, int], int] = {}  # (slot, position) -> token, for tokens the host has not seen

    def step(self, plan: StepPlan) -> list[int]:
        copied = {
            (dst, offset): self.kv.get((src, offset), ())
            for src, dst in plan.copies
            for offset in range(self.page_size)
        }
        self.kv.update(copied)
        writes = {}
        for row in plan.rows:
            for position in range(row.start, row.start + row.count):
                place = self._place(row, position)
                assert place not in writes, "two requests write one place in one step"
                writes[place] = tuple(self._tokens(row.request)[: position + 1])
        self.kv.update(writes)
        return [self._run_row(row) for row in plan.rows]

    def _run_row(self, row: PlannedRow) -> int:
        tokens = self._tokens(row.request)
        for position in range(row.start + row.count):
            assert self.kv.get(self._place(row, position)) == tuple(tokens[: position + 1])
        if not row.samples:
            return -1
        assert row.start + row.count == len(tokens) == row.request.num_computed
        token = sample(row.request.seed, tokens)
        self.drawn[self._slot(row.request), len(tokens)] = token
        return token

    def _tokens(self, request: Request) -> list[int]:
        known = request.tokens(0, request.num_tokens - request.num_pending)
        unseen = range(len(known), request.num_computed)  # a planned row has computed all but the token it draws
        return known + [self.drawn[self._slot(request), position] for position in unseen]

    def _slot(self, request: Request) -> int:
        assert request.slot is not None
        return request.slot

    def _place(self, row: PlannedRow, position: int) -> tuple[int, int]:
        return row.request.pages[position // self.page_size], position % self.page_size


def sample(seed: int, tokens: list[int]) -> int:
    return hash((seed, tuple(tokens))) % 40


def expected_output(request: Request, limit: int) -> list[int]:
    tokens = list(request.prompt_token_ids)
    while len(tokens) < limit:
        tokens.append(sample(request.seed, tokens))
        if tokens[-1] in request.stop_ids:
            break
    return tokens[len(request.prompt_token_ids) :]


class SchedulerMachine(RuleBasedStateMachine):
    """Random submits, aborts and steps; plans are made up to `depth` steps ahead of the commits."""

    @initialize(
        num_pages=st.integers(4, 14),
        page_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        budget=st.sampled_from([(5,), (5, 16), (8, 12, 64)]),
        depth=st.integers(0, 2),
        ranks=st.integers(1, 3),
    )
    def start(
        self, num_pages: int, page_size: int, max_num_seqs: int, budget: tuple[int, ...], depth: int, ranks: int
    ) -> None:
        self.events: list = []
        self.pool = PagePool(num_pages, page_size, self.events.append, ranks=ranks)
        self.capacity = (num_pages - 1) * ranks * page_size
        self.scheduler = Scheduler(SchedulerConfig(max_num_seqs, self.capacity, budget), self.pool)
        self.device = FakeDevice(page_size)
        self.depth = depth
        self.in_flight: list[tuple[StepPlan, list[int]]] = []
        self.requests: list[Request] = []
        self.aborted: set[Request] = set()

    @rule(
        prompt=st.lists(st.integers(0, 39), min_size=1, max_size=20),
        max_tokens=st.integers(1, 20),
        samples=st.integers(1, 3),
        priority=st.integers(0, 1),
    )
    def submit(self, prompt: list[int], max_tokens: int, samples: int, priority: int) -> None:
        parent = None
        for _ in range(samples):
            seed = len(self.requests)
            params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[STOP_TOKEN])
            request = Request(str(seed), prompt, params, frozenset([STOP_TOKEN]), seed, priority, parent)
            if len(prompt) >= self.capacity:
                with pytest.raises(ValueError, match="max_model_len"):
                    self.scheduler.submit(request)
                return
            self.scheduler.submit(request)
            self.requests.append(request)
            parent = parent or request

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if not request.finished:
            self.aborted.add(request)
        self.scheduler.abort(request)
        assert request.finished

    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        plan = self.scheduler.plan()
        assert plan.num_tokens <= self.scheduler.config.token_buckets[-1]
        assert len(plan.rows) <= self.scheduler.config.max_num_seqs
        counts = [row.count for row in plan.rows]
        assert counts == sorted(counts, key=lambda count: count > 1)
        if plan.rows:
            self.in_flight.append((plan, self.device.step(plan)))
        elif not self.in_flight:
            assert not self.scheduler.has_work, "work is left, and neither planned nor in flight"
        while len(self.in_flight) > (self.depth if plan.rows else 0):
            self.scheduler.commit(*self.in_flight.pop(0))

    @invariant()
    def pages_add_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        owners: dict[int, int] = {}
        for request in self.requests:
            assert len(set(request.pages)) == len(request.pages)
            assert bool(request.pages) <= (request.status is Status.RUNNING)
            assert all((b - a) % self.pool.ranks == 1 % self.pool.ranks for a, b in itertools.pairwise(request.pages))
            for page in request.pages:
                owners[page] = owners.get(page, 0) + 1
        assert not owners.keys() & set(range(self.pool.ranks))
        pages = range(self.pool.num_pages * self.pool.ranks)
        assert all(self.pool.refcount(page) == owners.get(page, 0) for page in pages)
        assert self.pool.used_pages == len(owners)
        slots = [r.slot for r in self.scheduler.running]
        assert len(set(slots)) == len(slots)
        assert None not in slots

    @invariant()
    def trace_tells_the_whole_story(self) -> None:
        if not hasattr(self, "pool"):
            return
        refcounts = dict.fromkeys(range(self.pool.num_pages * self.pool.ranks), 0)
        for event in self.events:
            if event.kind in ("allocate", "share"):
                refcounts[event.page] += 1
            elif event.kind in ("release", "free"):
                refcounts[event.page] -= 1
                assert (refcounts[event.page] == 0) == (event.kind == "free")
        assert all(self.pool.refcount(page) == count for page, count in refcounts.items())

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for _ in range(10_000):
            if not (self.scheduler.has_work or self.in_flight):
                break
            self._step()
        assert not self.scheduler.has_work
        assert self.pool.used_pages == 0
        for request in self.requests:
            limit = min(len(request.prompt_token_ids) + request.params.max_tokens, self.capacity)
            expected = expected_output(request, limit)
            if request in self.aborted:
                assert request.finish_reason == "abort"
                assert request.output_token_ids == expected[: len(request.output_token_ids)]
            else:
                assert request.output_token_ids == expected
                assert request.finish_reason == ("stop" if expected[-1] == STOP_TOKEN else "length")


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase


def make_scheduler(
    num_pages: int = 9, page_size: int = 4, seqs: int = 4, buckets: tuple[int, ...] = (16,)
) -> Scheduler:
    return Scheduler(SchedulerConfig(seqs, 32, buckets), PagePool(num_pages, page_size))


def make_request(name: str, prompt_len: int, max_tokens: int = 4, **fields) -> Request:
    return Request(name, list(range(prompt_len)), SamplingParams(max_tokens=max_tokens), **fields)


def run_until_done(scheduler: Scheduler) -> list[StepPlan]:
    plans = []
    while scheduler.has_work:
        plans.append(scheduler.plan())
        scheduler.commit(plans[-1], [1] * len(plans[-1].rows))
    return plans


def test_prefill_is_chunked_and_rides_with_decodes():
    scheduler = make_scheduler(buckets=(8,), num_pages=20)
    scheduler.submit(make_request("short", 3))
    scheduler.submit(make_request("long", 20))
    plans = run_until_done(scheduler)
    shapes = [[(row.request.id, row.start, row.count) for row in plan.rows] for plan in plans]
    assert shapes[:3] == [
        [("short", 0, 3), ("long", 0, 5)],
        [("short", 3, 1), ("long", 5, 7)],
        [("short", 4, 1), ("long", 12, 7)],
    ]


def test_step_size_goes_down_to_a_full_bucket_instead_of_padding():
    scheduler = make_scheduler(buckets=(4, 8, 16), num_pages=20)
    scheduler.submit(make_request("a", 9, max_tokens=1))
    assert [plan.num_tokens for plan in run_until_done(scheduler)] == [8, 1]


def test_higher_priority_is_admitted_first():
    scheduler = make_scheduler(seqs=1)
    scheduler.submit(make_request("later", 2, priority=1))
    scheduler.submit(make_request("sooner", 2, priority=0))
    first = [plan.rows[0].request.id for plan in run_until_done(scheduler)]
    assert first == ["sooner"] * 4 + ["later"] * 4


def test_the_youngest_is_preempted_and_computed_again():
    scheduler = make_scheduler(num_pages=8)
    old, young = make_request("old", 8, max_tokens=12), make_request("young", 8, max_tokens=12)
    scheduler.submit(old)
    scheduler.submit(young)
    plans = run_until_done(scheduler)
    assert old.num_preemptions == 0
    assert young.num_preemptions > 0
    assert [r for plan in plans for r in plan.preempted] == [young] * young.num_preemptions
    assert len(old.output_token_ids) == len(young.output_token_ids) == 12


@pytest.mark.parametrize("num_pages", range(25, 33))
def test_a_preempted_request_leaves_the_step_it_was_planned_into(num_pages):
    # Decodes of low priority are planned before the prefill that then takes their pages, at some of these pool sizes.
    scheduler = make_scheduler(num_pages=num_pages, page_size=1, buckets=(5,))
    low = [make_request(str(i), 1, max_tokens=20, priority=1) for i in range(3)]
    for request in low:
        scheduler.submit(request)
    plan = scheduler.plan()
    scheduler.commit(plan, [1] * len(plan.rows))
    high = make_request("high", 12, max_tokens=4)
    scheduler.submit(high)
    for plan in run_until_done(scheduler):
        assert not set(plan.preempted) & {row.request for row in plan.rows}
        assert plan.num_tokens <= 5
    assert high.num_preemptions == 0
    assert any(request.num_preemptions for request in low)
    assert all(request.finish_reason == "length" for request in [*low, high])


def test_samples_share_the_prompt_and_copy_on_write():
    scheduler = make_scheduler(num_pages=20)
    first = make_request("0", 10)
    rest = [make_request(str(i), 10, parent=first) for i in (1, 2)]
    for request in (first, *rest):
        scheduler.submit(request)
    first_plan = scheduler.plan()
    assert [(row.request.id, row.count) for row in first_plan.rows] == [("0", 10)]
    second_plan = scheduler.plan()
    assert [(row.request.id, row.start, row.count) for row in second_plan.rows] == [
        ("0", 10, 1),
        ("1", 9, 1),
        ("2", 9, 1),
    ]
    assert first.pages[:2] == rest[0].pages[:2] == rest[1].pages[:2]
    assert len({first.pages[2], rest[0].pages[2], rest[1].pages[2]}) == 3
    assert len(second_plan.copies) == 2


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("r", 0), "empty"),
        (make_request("r", 32), "max_model_len"),
        (make_request("r", 20, max_tokens=12), "num_pages"),
    ],
)
def test_requests_that_can_never_run_are_refused(request_, message):
    scheduler = make_scheduler(num_pages=8)
    with pytest.raises(ValueError, match=message):
        scheduler.submit(request_)
    assert not scheduler.has_work


def test_a_step_must_hold_every_decode():
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        make_scheduler(seqs=17, buckets=(8, 16))


def test_pool_takes_all_pages_or_none():
    pool = PagePool(4, 2)
    pool.allocate(2, "a")
    with pytest.raises(OutOfPages):
        pool.allocate(2, "b")
    assert pool.free_pages == 1
    assert pool.used_pages == 2


def test_pages_are_dealt_from_the_ranks_in_turn():
    pool = PagePool(3, 2, ranks=3)
    pages = pool.allocate(2, "a")
    assert [page % 3 for page in pages] == [0, 1]
    assert pool.available(pages) == 4
    other = pool.allocate(2, "b")  # starts where most pages are free
    assert [page % 3 for page in other] == [2, 0]
    assert pool.available(pages) == 1  # rank 2's last; rank 0 has none left
    with pytest.raises(OutOfPages):
        pool.allocate(2, "a", after=pages)
    assert pool.available(pages, copying=pages[0]) == -1
    assert pool.copy_on_write(other[0], "b") % 3 == 2
