"""The figures of a finished run, and what the engine's pool holds, as data and as text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from paxserve.engine import Engine
from paxserve.limits import Limits
from paxserve.models.config import ModelConfig
from paxserve.models.kv_shape import kv_shape
from paxserve.outputs import RequestOutput
from paxserve.sizing import bytes_per_page


def pool_facts(limits: Limits, model: ModelConfig, dtype: str) -> dict[str, int]:
    """The KV pool: pages and bytes of a device, tokens and bytes per token of all the devices that share a sequence.

    One page of each device holds no tokens: it is the null page, where padding goes.
    """
    return {
        "num_pages": limits.num_pages,
        "page_size": limits.page_size,
        "tokens": limits.pool_tokens,
        "bytes": limits.num_pages * bytes_per_page(model, limits.page_size, dtype, limits.mesh),
        "bytes_per_token": kv_shape(model).bytes_per_token(dtype),
    }


def engine_pool(engine: Engine) -> dict[str, int]:
    """`pool_facts` of a running engine."""
    return pool_facts(engine.limits, engine.source.config, engine.runner.kv_dtype.name)


def pool_line(engine: Engine) -> str:
    """The size of the pool in one line."""
    pool = engine_pool(engine)
    return (
        f"KV pool: {pool['num_pages']} pages of {pool['page_size']} tokens ({pool['tokens']} tokens in all), "
        f"{size(pool['bytes'])}, {size(pool['bytes_per_token'])} per token"
    )


def size(count: float) -> str:
    """A number of bytes as a person reads it: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def figures(outputs: Sequence[RequestOutput], engine: Engine, seconds: float) -> dict[str, Any]:
    """What a run of `seconds` that ended with `outputs` amounts to.

    ttft_ms and tpot_ms are percentiles over samples, None where there are none (TPOT takes two tokens). Steps, padding and
    the like are the engine's counts since its statistics were last reset.
    """
    stats = engine.stats
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    metrics = [metric for output in outputs for metric in output.metrics]
    return {
        "requests": len(outputs),
        "prompt_tokens": prompt,
        "output_tokens": generated,
        "seconds": seconds,
        "tokens_per_second": (prompt + generated) / seconds,
        "ttft_ms": _percentiles([metric.ttft for metric in metrics]),
        "tpot_ms": _percentiles([metric.tpot for metric in metrics]),
        "peak_pages": stats.peak_pages,
        "pool_pages": (engine.limits.num_pages - 1) * engine.limits.mesh.data * engine.limits.mesh.kv_page,
        "padding_share": stats.padding_share,
        "steps": stats.steps,
        "host_us_per_step": stats.host_us_per_step,
        "preemptions": stats.preemptions,
        "compiles_after_warmup": stats.compiles,
    }


def table(numbers: dict[str, Any]) -> Table:
    """`figures` for a person."""
    rows = Table(show_header=False)
    rows.add_column()
    rows.add_column(justify="right")
    rows.add_row("requests", f"{numbers['requests']}")
    rows.add_row("prompt tokens", f"{numbers['prompt_tokens']}")
    rows.add_row("output tokens", f"{numbers['output_tokens']}")
    rows.add_row("time", f"{numbers['seconds']:.2f} s")
    rows.add_row("throughput, prompt + output", f"{numbers['tokens_per_second']:.1f} tok/s")
    for name, key in (("time to first token", "ttft_ms"), ("time per output token", "tpot_ms")):
        values = numbers[key]
        text = "-" if values is None else f"{values['p50']:.1f} / {values['p95']:.1f} ms"
        rows.add_row(f"{name}, p50 / p95", text)
    rows.add_row("KV pages at the peak", f"{numbers['peak_pages']} of {numbers['pool_pages']}")
    rows.add_row("padding share of computed tokens", f"{numbers['padding_share']:.1%}")
    rows.add_row("steps", f"{numbers['steps']}")
    rows.add_row("host time per step, median", f"{numbers['host_us_per_step']:.0f} µs")
    rows.add_row("preemptions", f"{numbers['preemptions']}")
    rows.add_row("compiles after warm-up", f"{numbers['compiles_after_warmup']}")
    return rows


def _percentiles(seconds: Sequence[float | None]) -> dict[str, float] | None:
    """Median and 95th percentile in milliseconds."""
    known = [value * 1e3 for value in seconds if value is not None]
    if not known:
        return None
    p50, p95 = np.percentile(known, (50, 95))
    return {"p50": float(p50), "p95": float(p95)}
