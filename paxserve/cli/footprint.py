"""`paxserve footprint`: what a KV cache takes in memory, from configurations alone."""

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paxserve.cli.options import subparser
from paxserve.models.builtin import builtin_names
from paxserve.models.kv_shape import KV_DTYPES

if TYPE_CHECKING:
    from paxserve.footprint import Footprint

DESCRIPTION = """\
Show what the KV cache of models takes in memory: per token, per sequence, in whole pages, per batch and per chip. No
weights are read. MODEL is a config.json, a model directory, a .gguf file, smollm2 or a built-in name (listed below)."""

EPILOG = """\
examples:
  paxserve footprint llama-2-7b llama-3.1-8b qwen3-8b --context 32768
  paxserve footprint llama-3.1-70b --context 131072 --batch 8 --mesh 16 --kv-dtype int8
  paxserve footprint ./my-model/config.json --context 8192 --page-size 16 --plot footprint.png

built-in names:
"""


def add_parser(subparsers: Any) -> None:
    names = textwrap.fill(", ".join(builtin_names()), 118, initial_indent="  ", subsequent_indent="  ")
    parser = subparser(
        subparsers,
        "footprint",
        help="show what the KV cache takes in memory",
        description=DESCRIPTION,
        epilog=EPILOG + names,
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="each gives one row")
    parser.add_argument("--context", type=int, required=True, metavar="N", help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences (default: 1)")
    parser.add_argument(
        "--kv-dtype", choices=("auto", *KV_DTYPES), default="auto", help="of cached values (default: the checkpoint's)"
    )
    parser.add_argument("--page-size", type=int, default=32, metavar="P", help="tokens per page (default: 32)")
    parser.add_argument(
        "--mesh", default="1", help="chips: 16, or axes by name, data=2,kv_head=8,kv_page=2 (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of one object per model")
    parser.add_argument("--plot", metavar="FILE", help="also draw the batch's bytes against context (needs matplotlib)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from paxserve.footprint import footprint
    from paxserve.model_source import resolve_kv_shape

    shapes = [resolve_kv_shape(model) for model in args.models]
    options = {"batch": args.batch, "kv_dtype": args.kv_dtype, "page_size": args.page_size, "mesh": args.mesh}
    rows = [footprint(name, shape, args.context, **options) for name, shape in shapes]
    if args.plot:
        contexts = [args.context >> i for i in reversed(range(min(args.context.bit_length(), 11)))]
        _plot(args.plot, [[footprint(name, shape, n, **options) for n in contexts] for name, shape in shapes])
    if args.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
    else:
        _show(rows)
    return 0


def _show(rows: Sequence["Footprint"]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    first = rows[0]
    title = f"{first.batch:,} x {first.context:,} tokens, {first.pages_per_sequence:,} pages of {first.page_size} each"
    on = f", on {first.mesh.chips:,} chips" if first.mesh.chips > 1 else ""
    table = Table(title=f"KV cache of {title}{on}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    cells = [_cells(row) for row in rows]
    # What no model has, such as windows, gets no column.
    columns = [name for name in cells[0] if any(row[name] for row in cells)]
    for name in columns:
        table.add_column(name, justify="left" if name in ("model", "dtype") else "right", no_wrap=True)
    for row in cells:
        table.add_row(*(row[name] for name in columns))
    console = Console(highlight=False)
    # Numbers are never folded or cut: a narrow terminal breaks lines instead.
    console.width = max(console.width, Console(width=1000).measure(table).maximum)
    console.print(table)


def _cells(row: "Footprint") -> Mapping[str, str]:
    """A row of the table by column; empty where there is nothing to say."""
    from paxserve.cli.figures import size

    windowed, expanded = row.visible_bytes < row.sequence_bytes, row.expanded_bytes_per_token
    return {
        "model": row.model,
        "dtype": row.kv_dtype,
        "values\nper token": f"{row.values_per_token:,}",
        "bytes\nper token": f"{row.bytes_per_token:,}",
        "K, V of\nevery head": f"{expanded:,}" if expanded else "",
        "sequence": size(row.sequence_bytes),
        "within\nwindows": size(row.visible_bytes) if windowed else "",
        "in whole\npages": size(row.sequence_page_bytes),
        "batch": size(row.batch_bytes) if row.batch > 1 else "",
        "scales": size(row.scale_bytes) if row.scale_bytes else "",
        "kv_head x\nkv_page": f"{row.mesh.kv_head} x {row.mesh.kv_page}" if row.mesh.chips > 1 else "",
        "per chip": size(row.bytes_per_chip) if row.mesh.chips > 1 else "",
    }


def _plot(file: str, curves: Sequence[Sequence["Footprint"]]) -> None:
    if not file.endswith((".png", ".svg", ".pdf")):
        raise ValueError(f"--plot {file}: must end in .png, .svg or .pdf")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError('--plot needs matplotlib: pip install "paxserve[notebook]"') from error

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        axes.plot([row.context for row in curve], [row.batch_bytes / 2**30 for row in curve], label=curve[0].model)
    axes.set(xlabel="tokens per sequence", ylabel=f"GiB of KV pages, {curves[0][0].batch:,} sequences", yscale="log")
    axes.set_xscale("log", base=2)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file)
