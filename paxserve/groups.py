"""The data groups of a mesh as the engine sees them: a scheduler with a page pool for each, and requests spread over them."""

from collections.abc import Callable, Iterator, Sequence

from paxserve.limits import Limits
from paxserve.pages import PageEvent, PagePool
from paxserve.request import Request
from paxserve.scheduler import PlannedRow, Scheduler, SchedulerConfig, StepPlan


class Groups:
    """A deterministic state machine, as `Scheduler` is. A request stays in the group that it was given to."""

    def __init__(
        self, limits: Limits, token_buckets: tuple[int, ...], traces: Sequence[Callable[[PageEvent], None] | None]
    ) -> None:
        config = SchedulerConfig(limits.max_num_seqs, limits.max_model_len, token_buckets)
        self.schedulers = [
            Scheduler(config, PagePool(limits.num_pages, limits.page_size, trace, ranks=limits.mesh.kv_page))
            for trace in traces
        ]

    @property
    def has_work(self) -> bool:
        return any(scheduler.has_work for scheduler in self.schedulers)

    @property
    def used_pages(self) -> int:
        return sum(scheduler.pool.used_pages for scheduler in self.schedulers)

    def submit(self, request: Request) -> None:
        """Queue a request with the group that has the most pages to spare, a sample with its prompt's first one.

        Raises what `Scheduler.submit` raises.
        """
        if request.parent is not None:
            group = request.parent.group
        else:
            group = max(range(len(self.schedulers)), key=lambda number: self.schedulers[number].spare_pages)
        self.schedulers[group].submit(request)
        request.group = group

    def abort(self, request: Request, reason: str = "abort") -> None:
        self.schedulers[request.group].abort(request, reason)

    def plan(self, now: float) -> tuple[StepPlan, ...]:
        """The next step: a plan for every group, perhaps empty."""
        return tuple(scheduler.plan(now) for scheduler in self.schedulers)

    def commit(
        self, plans: Sequence[StepPlan], tokens: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, int, PlannedRow]]:
        """Take in the drawn tokens [group][row]; gives (group, row's number, row) of each that was accepted."""
        for group, (scheduler, plan) in enumerate(zip(self.schedulers, plans, strict=True)):
            accepted = set(scheduler.commit(plan, tokens[group][: len(plan.rows)]))
            yield from ((group, index, row) for index, row in enumerate(plan.rows) if row in accepted)
