"""`paxserve bench`: how fast this machine runs a model, and how fast it could."""

import argparse
import json
import sys
from contextlib import closing
from typing import Any

from paxserve.bench.workload import W64, WORKLOADS, Workload, make_requests
from paxserve.cli.options import add_engine_options, engine_options, subparser
from paxserve.config import EngineConfig

DESCRIPTION = """\
Runs a fixed set of greedy requests with continuous batching, after a short warm-up run of the same prompts, and prints
throughput, latencies and, for every step shape, its time beside the least it could take on this machine (measured in the
same run). W64: 64 requests of real text, 17,408 prompt and 6,144 output tokens, at most 32 at once."""

EPILOG = """\
examples:
  paxserve bench throughput --dtype bfloat16
  paxserve bench throughput --dtype bfloat16 --repeat 3 --against transformers
  paxserve bench throughput --num-prompts 8 --input-len 512:512 --output-len 1:1 --json"""

SHAPE_OPTIONS = ("num_prompts", "input_len", "output_len", "concurrency")


def add_parser(subparsers: Any) -> None:
    parser = subparser(subparsers, "bench", help="measure speed", description="Measure how fast a model runs here.")
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    parser = subparser(
        benchmarks, "throughput", help="tokens per second over a workload", description=DESCRIPTION, epilog=EPILOG
    )
    group = parser.add_argument_group("workload")
    group.add_argument("--workload", choices=WORKLOADS, help=f"a fixed workload (default: {W64.name})")
    group.add_argument("--num-prompts", type=int, metavar="N", help="requests of a workload of your own (default: 64)")
    group.add_argument(
        "--input-len", type=_range, metavar="A:B", help="its shortest and longest prompt (default: 32:512)"
    )
    group.add_argument(
        "--output-len", type=_range, metavar="A:B", help="its shortest and longest answer (default: 64:128)"
    )
    group.add_argument("--concurrency", type=int, metavar="N", help="its most requests at once (default: 32)")
    group.add_argument("--repeat", type=_positive, default=1, metavar="N", help="runs, the median of which is shown")
    group = parser.add_argument_group("comparison and output")
    group.add_argument(
        "--against",
        choices=("transformers",),
        help="also run the requests in static batches in Hugging Face transformers",
    )
    group.add_argument(
        "--transformers-python",
        default=sys.executable,
        metavar="PATH",
        help="interpreter that has torch and transformers (default: this one)",
    )
    group.add_argument("--profile", metavar="DIR", help="write a JAX profile of one more run, which is not measured")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    workload, config = _workload(args), EngineConfig(**engine_options(args))

    import jax
    from rich.console import Console

    from paxserve.bench.baseline import run_transformers
    from paxserve.bench.bound import measure_machine
    from paxserve.bench.report import make_report
    from paxserve.bench.throughput import RecordingEngine, warmup_requests
    from paxserve.lockstep import follow
    from paxserve.progress import Display

    with Display(enabled=True) as display, closing(RecordingEngine(config, display.update)) as engine:
        if engine.follows:
            follow(engine)
            return 0
        requests = make_requests(workload, engine.tokenizer, engine.source.config.vocab_size)
        warmup = warmup_requests(requests, workload.concurrency)
        dtype = engine.runner.dtype.name
        display.update("measuring", 0, args.repeat)
        machine = measure_machine(dtype, engine.runner.weight_bytes)
        engine.run(warmup, workload.concurrency)
        runs = []
        for number in range(args.repeat):
            runs.append(engine.run(requests, workload.concurrency))
            display.update("measuring", number + 1, args.repeat)
        report = make_report(engine, workload, runs, machine)
        if args.profile:
            with jax.profiler.trace(args.profile):
                engine.run(requests, workload.concurrency)
    console = Console()
    if not args.json:
        report.print(console)
    if args.against:
        result = run_transformers(
            engine.source,
            requests,
            warmup,
            python=args.transformers_python,
            dtype=dtype,
            batch_size=workload.concurrency,
            repeat=args.repeat,
        )
        report = report.against(f"transformers {result['transformers']}, static batches", result["seconds"])
        if not args.json:
            report.print_baselines(console)
    if args.json:
        print(json.dumps(report.to_json()))
    return 0


def _workload(args: argparse.Namespace) -> Workload:
    """Raises ValueError for a named workload with a shape of one's own."""
    shape = {name: value for name in SHAPE_OPTIONS if (value := getattr(args, name)) is not None}
    if not shape:
        return WORKLOADS[args.workload or W64.name]
    if args.workload:
        option = next(iter(shape)).replace("_", "-")
        raise ValueError(
            f"--workload {args.workload} fixes the requests: leave out --{option}, or leave out --workload"
        )
    defaults = {name: getattr(W64, name) for name in SHAPE_OPTIONS}
    return Workload("custom", **(defaults | shape))


def _range(text: str) -> tuple[int, int]:
    low, separator, high = text.partition(":")
    return int(low), int(high if separator else low)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value


_range.__name__ = "range"  # argparse names it in its message
