"""What the engine counts and times while it runs."""

import statistics
from collections import defaultdict
from dataclasses import dataclass, field

from paxserve.buckets import Bucket


@dataclass
class EngineStats:
    """Totals since the engine started, or since `EngineStats()` was put in its place.

    step_seconds: per bucket, the device time of each step as the host sees it: from its dispatch, or the end of the step
        before it if that is later, to its end.
    host_seconds: per step, the host's own work, waiting for the device left out.
    """

    steps: int = 0
    scheduled_tokens: int = 0
    padded_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    peak_pages: int = 0
    compiles: int = 0
    host_seconds: list[float] = field(default_factory=list)
    step_seconds: dict[Bucket, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def padding_share(self) -> float:
        """Part of the computed token places that were padding."""
        return self.padded_tokens / max(self.padded_tokens + self.scheduled_tokens, 1)

    @property
    def host_us_per_step(self) -> float:
        """Median microseconds of host work per step."""
        return statistics.median(self.host_seconds) * 1e6 if self.host_seconds else 0.0
