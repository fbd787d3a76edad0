"""One sequence on its way through the engine: what was asked, and how far it has come."""

import enum
from dataclasses import dataclass, field

from paxserve.sampling_params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sample of one prompt. Only `Groups` and its schedulers change the fields below `parent`.

    stop_ids: token ids that end the sequence (the model's end ids and the user's).
    seed: 64-bit seed of this sample's draws.
    parent: the first sample of the same prompt, whose prompt pages this one can share; None for the first itself.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    priority: int = 0
    parent: "Request | None" = None

    group: int = 0  # the data group that it runs in
    number: int = -1  # order of arrival
    output_token_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose KV the planned steps have written
    num_pending: int = 0  # sampled tokens the host has not seen yet
    num_preemptions: int = 0
    first_planned_at: float | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Smaller is served first and preempted last."""
        return (self.priority, self.number)

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence so far, those the host has not seen yet included."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions start .. end - 1, -1 for those the host has not seen yet."""
        prompt_len = len(self.prompt_token_ids)
        known = (
            self.prompt_token_ids[start:end]
            + self.output_token_ids[max(start - prompt_len, 0) : max(end - prompt_len, 0)]
        )
        return known + [-1] * (end - start - len(known))
