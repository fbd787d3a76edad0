"""`paxserve plan`: what a model would be on hardware that is not there."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paxserve.cli.options import subparser
from paxserve.config import KV_DTYPES, EngineConfig

if TYPE_CHECKING:
    from paxserve.plan import Bound, Plan

DESCRIPTION = """\
Compile a model's step for a topology of accelerators that need not be there, with the engine's own code, and show what each
device would hold, how many requests would fit, and bounds on the speed. MODEL is a built-in name, a config.json, a model
directory or a .gguf file; no weights are read. For TPUs the compiler is libtpu (pip install 'paxserve[tpu]'), for GPUs
JAX's CUDA plugin with NVIDIA's compilers (pip install 'paxserve[cuda]').
Bounds count published rates of memory, arithmetic and links at full use, and no latencies: real steps take longer."""

EPILOG = """\
examples:
  paxserve plan llama-3.1-8b --topology v5e:2x2 --context 8192
  paxserve plan llama-3.1-70b --topology v6e:4x4 --context 32768 --search
  paxserve plan llama-3.1-70b --topology h100:8 --largest-only
  paxserve plan deepseek-v3 --topology v5p:4x4x4 --weight-dtype fp8 --json"""


def add_parser(subparsers: Any) -> None:
    parser = subparser(
        subparsers,
        "plan",
        help="compile for hardware that is not there: what fits, and how fast it could be",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "--topology", required=True, help="a chip and its arrangement: v5e:2x2, v5p:2x2x1, v6e:4x4, tpu7x:2x2x1, h100:8"
    )
    parser.add_argument("--mesh", help="as the engine's option (default: all devices as one data group)")
    parser.add_argument("--search", action="store_true", help="plan every mesh over all devices, and rank them")
    parser.add_argument("--context", type=int, default=4096, metavar="N", help="tokens of a request (default: 4096)")
    parser.add_argument("--kv-dtype", choices=("auto", *KV_DTYPES), default="auto", help="of cached values")
    parser.add_argument(
        "--weight-dtype",
        choices=("auto", "bfloat16", "float32", "fp8"),
        default="auto",
        help="of weights (default: the checkpoint's); fp8 keeps those of an FP8 checkpoint",
    )
    for name in ("page_size", "max_num_seqs", "max_num_batched_tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="as the engine's option")
    parser.add_argument("--memory-fraction", type=float, metavar="F", help="as the engine's option")
    parser.add_argument("--attention", help="as the engine's option")
    parser.add_argument(
        "--largest-only",
        action="store_true",
        help="compile only the largest steps, which decide (with --search: always)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: an object, or with --search a list")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.search and args.mesh:
        raise ValueError("--mesh and --search exclude each other")
    if args.context < 1:
        raise ValueError(f"--context {args.context}: must be at least 1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # where libtpu is installed, JAX would look for a TPU
    from paxserve.chips import describe
    from paxserve.model_source import resolve_model
    from paxserve.plan import make_plan, search

    model = resolve_model(args.model).config
    fp8 = args.weight_dtype == "fp8"
    given = {
        name: value
        for name in ("mesh", "page_size", "max_num_seqs", "max_num_batched_tokens", "memory_fraction", "attention")
        if (value := getattr(args, name)) is not None
    }
    config = EngineConfig(
        model=args.model,
        dtype="auto" if fp8 else args.weight_dtype,
        quantization="fp8" if fp8 else None,
        kv_cache_dtype=args.kv_dtype,
        max_model_len=args.context,
        compilation_cache_dir=None,
        **given,
    )
    topology = describe(args.topology)
    if args.search:
        plans = search(model, config, topology, args.context)
    else:
        plans = [make_plan(model, config, topology, args.context, largest_only=args.largest_only)]
    if args.json:
        facts = [dataclasses.asdict(plan) | _derived(plan) for plan in plans]
        print(json.dumps(facts if args.search else facts[0], default=str))
    elif args.search:
        _rank(plans)
    else:
        _show(plans[0])
    return int(all(plan.problem for plan in plans))


def verdict(plan: "Plan") -> str:
    """What comes of it, in a sentence."""
    if plan.problem is not None:
        return f"does not fit: {plan.problem}"
    assert plan.limits is not None
    assert plan.memory is not None
    if plan.memory.left < 0:
        return f"does not fit: {-plan.memory.left:,} bytes too many on each device"
    return f"fits, with room for {plan.requests:,} requests of {plan.context:,} tokens, of which {plan.running:,} run at a time"


def _derived(plan: "Plan") -> dict[str, Any]:
    facts: dict[str, Any] = {"verdict": verdict(plan)}
    for name in ("decode", "prefill"):
        bound: Bound | None = getattr(plan, name)
        if bound is not None:
            facts |= {f"{name}_seconds": bound.seconds, f"{name}_tokens_per_second": bound.tokens_per_second}
    return facts


def _show(plan: "Plan") -> None:
    from rich.console import Console
    from rich.table import Table

    from paxserve.cli.figures import size

    table = Table(show_header=False, box=None, pad_edge=False)
    chip = plan.chip
    rows: list[tuple[str, str]] = [
        ("model", f"{plan.model}, weights {plan.weights}, KV {plan.kv}"),
        ("topology", f"{plan.topology}: {chip.name}, {chip.memory_gib:.4g} GiB each"),
        ("mesh", f"{plan.mesh}"),
        ("attention", str(plan.attention)),
    ]
    if plan.memory is not None and plan.limits is not None:
        memory, limits = plan.memory, plan.limits
        rows += [(f"  {name.replace('_', ' ')}", size(value)) for name, value in dataclasses.asdict(memory).items()]
        rows += [
            ("  left", size(memory.left)),
            ("KV pages", f"{limits.num_pages:,} of {limits.page_size} tokens on each device"),
            ("KV tokens", f"{plan.kv_tokens:,} in all"),
            ("requests", f"{plan.requests:,} of {plan.context:,} tokens fit, {plan.running:,} run at a time"),
        ]
        rows[4] = ("memory", size(memory.device))
        for name, bound in (("decode", plan.decode), ("prefill", plan.prefill)):
            if bound is None:
                continue
            parts = f"memory {_ms(bound.memory_seconds)}, arithmetic {_ms(bound.compute_seconds)}"
            rows.append((name, f"at least {_ms(bound.seconds)} ({parts}, links {_ms(bound.link_seconds)})"))
            rows.append(("", f"at most {bound.tokens_per_second:,.0f} tokens/s on all devices"))
        for kind, (count, sent) in (plan.communication or {}).items():
            rows.append((f"  {kind}", f"{count} in a decode step, {size(sent)} sent by each device"))
        seconds = ", ".join(f"{bucket} {each:g} s" for bucket, each in (plan.compile_seconds or {}).items())
        rows.append(("compiled in", seconds))
    rows.append(("verdict", verdict(plan)))
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)


def _rank(plans: Sequence["Plan"]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from paxserve.cli.figures import size

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "mesh",
        "weights",
        "KV tokens",
        "requests",
        "running",
        "decode step",
        "decode tok/s",
        "prefill tok/s",
        "verdict",
    ):
        table.add_column(name, no_wrap=name != "verdict")
    for plan in plans:
        if plan.memory is None:
            table.add_row(str(plan.mesh), *[""] * 7, verdict(plan))
            continue
        table.add_row(
            str(plan.mesh),
            size(plan.memory.weights),
            f"{plan.kv_tokens:,}",
            f"{plan.requests:,}",
            f"{plan.running:,}",
            _ms(plan.decode.seconds) if plan.decode else "",
            f"{plan.decode.tokens_per_second:,.0f}" if plan.decode else "",
            f"{plan.prefill.tokens_per_second:,.0f}" if plan.prefill else "",
            verdict(plan),
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
