"""`paxserve info`: what an engine with the same options would use."""

import argparse
import json
from typing import Any

from paxserve.cli.options import add_engine_options, engine_options, subparser
from paxserve.config import EngineConfig

EPILOG = """\
examples:
  paxserve info
  paxserve info --model ./Qwen3-0.6B --dtype bfloat16 --kv-cache-bytes 8000000000
  paxserve info --json | jq .kv_pool

No weights are loaded. Nothing is compiled either, except on TPU and GPU, where the size of the KV pool follows from what
the largest step needs."""


def add_parser(subparsers: Any) -> None:
    parser = subparser(
        subparsers,
        "info",
        help="show devices, model, and the sizes that would be in effect",
        description="Show what an engine with these options would use: devices, dtypes, the model, the KV pool, buckets.",
        epilog=EPILOG,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = EngineConfig(**engine_options(args))

    from paxserve.lockstep import connect
    from paxserve.sharding import leave

    link = connect(config)
    facts = _facts(config)
    if link is not None:
        leave(link)
        if link.process_id > 0:
            return 0
    if args.json:
        print(json.dumps(facts))
    else:
        _show(facts)
    return 0


def _facts(config: EngineConfig) -> dict[str, Any]:
    import jax
    import jaxlib

    from paxserve.buckets import make_buckets
    from paxserve.cli.figures import pool_facts
    from paxserve.model_source import resolve_model
    from paxserve.models.fp8 import FLOAT8
    from paxserve.models.params import count_parameters
    from paxserve.runner import make_builder
    from paxserve.sharding import shape_of
    from paxserve.sizing import device_memory, size_limits

    source = resolve_model(config.model)
    model = source.config
    builder = make_builder(model, config, jax.devices())
    mesh, memory = shape_of(builder.mesh), device_memory(jax.local_devices()[0])
    limits = size_limits(config, model, builder.kv_dtype.name, mesh, memory, builder.step_bytes)
    return {
        "jax": {
            "version": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "devices": [f"{each.platform}:{each.id} {each.device_kind}" for each in jax.devices()],
            "mesh": str(mesh),
        },
        "model": {
            "name": source.name,
            "format": source.format,
            "architecture": model.architecture,
            "parameters": count_parameters(builder.declared),
            "weight_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in builder.params),
            "layers": model.num_layers,
            "heads": model.num_heads,
            "kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "context": model.max_position_embeddings,
            "tokenizer": source.tokenizer is not None,
        },
        "dtypes": {
            "checkpoint": model.dtype,
            "weights": builder.dtype.name,
            "kernels": FLOAT8.name if config.quantization == "fp8" else builder.dtype.name,
            "kv": builder.kv_dtype.name,
        },
        "engine": {
            "attention": builder.attention,
            "scan_layers": builder.scan_layers,
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "buckets": [str(b) for b in make_buckets(limits.max_num_seqs, limits.max_num_batched_tokens)],
        },
        "kv_pool": pool_facts(limits, model, builder.kv_dtype.name),
    }


def _show(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from paxserve.cli.figures import size

    rows = Table(show_header=False, show_lines=False, box=None, pad_edge=False)
    for title, group in facts.items():
        rows.add_row(f"[bold cyan]{title.replace('_', ' ')}[/]")
        for name, value in group.items():
            if name.startswith("bytes") or name.endswith("bytes"):
                text = f"{value:,} ({size(value)})"
            elif isinstance(value, list):
                text = ", ".join(map(str, value))
            elif isinstance(value, int) and not isinstance(value, bool):
                text = f"{value:,}"
            else:
                text = str(value)
            rows.add_row(f"  {name.replace('_', ' ')}", text)
    Console(highlight=False).print(rows)
