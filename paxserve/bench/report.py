"""The figures of a benchmark, and how they are shown."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from paxserve.bench.bound import Machine, describe_device, step_cost
from paxserve.bench.throughput import RecordingEngine, Run
from paxserve.bench.workload import Workload

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class BucketFigures:
    """Steps of one shape. bound_ms: the median, over the steps, of the least time each could take."""

    bucket: str
    steps: int
    wall_share: float
    median_ms: float
    p90_ms: float
    tokens_per_step: float
    bound_ms: float

    @property
    def bound_share(self) -> float:
        return self.bound_ms / self.median_ms


@dataclass(frozen=True)
class Baseline:
    """The same requests in another engine. ratio: our tokens per second over its."""

    engine: str
    seconds: list[float]
    total_tok_s: float
    ratio: float


@dataclass(frozen=True)
class Report:
    """One benchmark. Of several runs the figures are those of the one with the median time.

    seconds: of every run. bound_seconds: the sum of what the steps could take at least. device_share, host_share: parts of
    the time in which a step was on the device, and in which the host worked; they overlap.
    """

    model: str
    dtype: str
    device: str
    jax: str
    workload: Workload
    random_prompts: bool
    prompt_tokens: int
    output_tokens: int
    seconds: list[float]
    median_seconds: float
    total_tok_s: float
    output_tok_s: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    buckets: list[BucketFigures]
    machine: Machine
    bound_seconds: float
    device_share: float
    host_us_per_step: float
    host_share: float
    padding_share: float
    compiles_after_warmup: int
    preemptions: int
    peak_pages: int
    num_pages: int
    page_size: int
    baselines: list[Baseline] = dataclasses.field(default_factory=list)

    def against(self, engine: str, seconds: list[float]) -> "Report":
        """The same report with another engine's times for the same requests."""
        total_tok_s = (self.prompt_tokens + self.output_tokens) / statistics.median_low(seconds)
        baseline = Baseline(engine, seconds, total_tok_s, self.total_tok_s / total_tok_s)
        return dataclasses.replace(self, baselines=[*self.baselines, baseline])

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def print(self, console: Console) -> None:
        """Tables for a person, without the baselines: those take long, so the tables are shown before them."""
        console.print(self._summary())
        console.print(self._steps())
        console.print(
            f"tokens: computed per step, padding left out. bound: the longer of a step's bytes at "
            f"{self.machine.bytes_per_second / 1e9:.1f} GB/s and its FLOPs at {self.machine.flops_per_second / 1e9:.0f} "
            f"GFLOP/s, both measured in this run (a sum over {self.machine.stream_bytes / 1e6:.0f} MB, a 2048³ matmul in "
            f"{self.dtype}), in ms and as a share of the median.",
            highlight=False,
        )

    def print_baselines(self, console: Console) -> None:
        for baseline in self.baselines:
            runs = ", ".join(f"{seconds:.2f}" for seconds in baseline.seconds)
            console.print(
                f"{baseline.engine}: {runs} s, {baseline.total_tok_s:.0f} tok/s total; "
                f"paxserve is {baseline.ratio:.2f} times as fast.",
                highlight=False,
            )

    def _summary(self) -> Table:
        table = Table(title=f"{self.workload.name}: {self.model}, {self.dtype}, on {self.device}", show_header=False)
        shape = self.workload
        kind = "random token ids" if self.random_prompts else "real text"
        runs = "" if len(self.seconds) == 1 else f" (median of {', '.join(f'{s:.2f}' for s in self.seconds)})"
        rows = [
            ("requests", f"{shape.num_prompts} of {kind}, at most {shape.concurrency} at once"),
            ("tokens", f"{self.prompt_tokens:,} prompt + {self.output_tokens:,} output"),
            ("time", f"{self.median_seconds:.2f} s{runs}, after a warm-up run"),
            ("throughput", f"{self.total_tok_s:.0f} tok/s total, {self.output_tok_s:.0f} tok/s output"),
            ("time to first token", _spread(self.ttft_ms)),
            ("time per output token", _spread(self.tpot_ms)),
            ("bound", f"{self.bound_seconds:.2f} s, {self.bound_seconds / self.median_seconds:.0%} of the time"),
            ("device busy", f"{self.device_share:.0%} of the time"),
            ("host", f"{self.host_us_per_step:.0f} µs per step (median), {self.host_share:.1%} of the time"),
            ("padding", f"{self.padding_share:.1%} of computed tokens"),
            ("compiles after warm-up", str(self.compiles_after_warmup)),
            ("preemptions", str(self.preemptions)),
            ("pages", f"{self.peak_pages} of {self.num_pages} at the peak, {self.page_size} tokens each"),
        ]
        for name, value in rows:
            table.add_row(name, value)
        return table

    def _steps(self) -> Table:
        table = Table()
        table.add_column("bucket", no_wrap=True)
        for heading in ("steps", "time", "median ms", "p90 ms", "tokens", "bound ms", "bound"):
            table.add_column(heading, justify="right")
        for figures in self.buckets:
            table.add_row(
                figures.bucket,
                str(figures.steps),
                f"{figures.wall_share:.1%}",
                f"{figures.median_ms:.2f}",
                f"{figures.p90_ms:.2f}",
                f"{figures.tokens_per_step:.1f}",
                f"{figures.bound_ms:.2f}",
                f"{figures.bound_share:.0%}",
            )
        return table


def make_report(engine: RecordingEngine, workload: Workload, runs: Sequence[Run], machine: Machine) -> Report:
    """The figures of the run with the median time (the shorter of two in the middle)."""
    seconds = [run.seconds for run in runs]
    run = runs[seconds.index(statistics.median_low(seconds))]
    stats, limits = run.stats, engine.limits
    prompt_tokens = sum(len(output.prompt_token_ids) for output in run.outputs)
    output_tokens = sum(len(output.outputs[0].token_ids) for output in run.outputs)
    metrics = [output.metrics[0] for output in run.outputs]
    itemsize = jnp.dtype(engine.runner.dtype).itemsize
    # A data group's devices share its work; the slowest group ends the step.
    bounds = [
        max(machine.bound(step_cost(engine.source.config, itemsize, plan.rows)) for plan in step.plans)
        / limits.mesh.tensor
        for step in run.steps
    ]
    return Report(
        model=engine.source.name,
        dtype=jnp.dtype(engine.runner.dtype).name,
        device=describe_device(),
        jax=jax.__version__,
        workload=workload,
        random_prompts=engine.tokenizer is None,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seconds=seconds,
        median_seconds=run.seconds,
        total_tok_s=(prompt_tokens + output_tokens) / run.seconds,
        output_tok_s=output_tokens / run.seconds,
        ttft_ms=_percentiles([m.ttft for m in metrics if m.ttft is not None]),
        tpot_ms=_percentiles([m.tpot for m in metrics if m.tpot is not None]),
        buckets=_bucket_figures(run, bounds),
        machine=machine,
        bound_seconds=sum(bounds),
        device_share=sum(step.seconds for step in run.steps) / run.seconds,
        host_us_per_step=stats.host_us_per_step,
        host_share=sum(stats.host_seconds) / run.seconds,
        padding_share=stats.padding_share,
        compiles_after_warmup=stats.compiles,
        preemptions=stats.preemptions,
        peak_pages=stats.peak_pages,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
    )


def _bucket_figures(run: Run, bounds: Sequence[float]) -> list[BucketFigures]:
    by_bucket = groupby(
        sorted(zip(run.steps, bounds, strict=True), key=lambda pair: pair[0].bucket), key=lambda pair: pair[0].bucket
    )
    figures = []
    for bucket, group in by_bucket:
        steps, step_bounds = zip(*group, strict=True)
        times = [step.seconds for step in steps]
        figures.append(
            BucketFigures(
                bucket=str(bucket),
                steps=len(steps),
                wall_share=sum(times) / run.seconds,
                median_ms=statistics.median(times) * 1e3,
                p90_ms=float(np.percentile(times, 90)) * 1e3,
                tokens_per_step=statistics.mean(sum(plan.num_tokens for plan in step.plans) for step in steps),
                bound_ms=statistics.median(step_bounds) * 1e3,
            )
        )
    return figures


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds; empty if there is nothing to measure (answers of one token have no time per token)."""
    return {f"p{p}": float(np.percentile(seconds, p)) * 1e3 for p in PERCENTILES} if seconds else {}


def _spread(percentiles: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f} ms" for name, value in percentiles.items()) or "-"
