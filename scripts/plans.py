"""Writes docs/plans.md: `paxserve plan` of a few models on devices that are not there."""

import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paxserve.model_source import resolve_model

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "plans.md"
PLANS = (
    ("llama-3.1-8b", "v5e:2x2", 8192, []),
    ("llama-3.1-70b", "v5p:2x2x1", 8192, []),
    ("llama-3.1-70b", "v6e:4x4", 8192, []),
    ("llama-3.1-405b", "v5p:4x4x4", 8192, []),
    ("deepseek-v3", "v5p:4x4x4", 8192, ["--weight-dtype", "bfloat16"]),
    ("deepseek-v3", "v5p:4x4x4", 8192, ["--weight-dtype", "fp8"]),
    ("llama-3.1-8b", "h100:1", 8192, []),
)
HEAD = """\
# Plans: models on hardware that was not there

Written by `scripts/make_plans`, from `paxserve plan MODEL --topology T --context N --largest-only --json` with the options
shown. Each is the engine's own step, compiled by the device's own compiler from a description of it ({versions}).
The mesh is data x kv_head x kv_page, sizes are of one device, by the compiler's account. Bounds count published rates at full
use and no latencies (`paxserve/chips.json` has rates and sources): a real step takes longer. *Compile* is how long the largest
decode and the largest mixed step took on two cores; other work on them makes it longer.

Pages take what the largest step leaves of 0.9 of the memory. *Temporaries* are that step's, which do not grow with the pages:
no layer's pages are copied.
"""
MEMORY = """
| model | on | options | mesh | weights | KV pages | temporaries | a layer's pages | code | left | KV tokens | requests |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""
SPEED = """
| model | on | options | decode step | decode tok/s | prefill tok/s | collectives of a decode step | compile |
|---|---|---|---|---|---|---|---|
"""


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def shown(context: int, options: list[str]) -> str:
    return " ".join(["--context", str(context), *options])


def cells(plan: dict[str, Any], options: list[str]) -> tuple[list[str], list[str]]:
    """What a plan says of memory and of speed."""
    memory, mesh = plan["memory"], plan["mesh"]
    where = [f"{plan['model']}, {plan['weights']}", plan["topology"], shown(plan["context"], options)]
    if memory is None:
        return [*where, plan["verdict"]], where
    used = sum(memory[name] for name in ("weights", "kv_pages", "other_inputs", "temporaries", "code"))
    fits = [
        " x ".join(str(mesh[axis]) for axis in ("data", "kv_head", "kv_page")),
        *(gib(memory[name]) for name in ("weights", "kv_pages", "temporaries")),
        gib(memory["kv_pages"] / plan["layers"]),
        gib(memory["code"]),
        gib(memory["device"] - used),
        f"{plan['kv_tokens']:,}",
        f"{plan['requests']:,} of {plan['context']:,} tokens, {plan['running']:,} at a time",
    ]
    runs = [
        f"{plan['decode_seconds'] * 1e3:.1f} ms",
        f"{plan['decode_tokens_per_second']:,.0f}",
        f"{plan['prefill_tokens_per_second']:,.0f}",
        ", ".join(f"{count} {kind}" for kind, (count, _) in sorted(plan["communication"].items())),
        ", ".join(f"{seconds:.0f} s" for seconds in plan["compile_seconds"].values()),
    ]
    return where + fits, where + runs


def main() -> int:
    rows, faults = [], []
    for model, topology, context, options in PLANS:
        command = [sys.executable, "-m", "paxserve", "plan", model, "--topology", topology, "--context", str(context)]
        started = time.monotonic()
        done = subprocess.run(
            [*command, "--largest-only", "--json", *options], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
        )
        if not done.stdout.strip():
            return done.returncode or 1
        plan = json.loads(done.stdout)
        plan["layers"] = resolve_model(model).config.num_layers
        rows.append(cells(plan, options))
        memory = plan["memory"]
        if memory is None or memory["temporaries"] >= memory["kv_pages"] / plan["layers"]:
            faults.append(
                f"{model} on {topology}: {plan['verdict']}; temporaries must be below a layer's pages: {memory}"
            )
        print(f"{time.monotonic() - started:.0f} s", *rows[-1], flush=True)
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "libtpu", "jax-cuda13-plugin"))
    by_memory, by_speed = ("".join(f"| {' | '.join(row)} |\n" for row in part) for part in zip(*rows, strict=True))
    PAGE.write_text(HEAD.format(versions=versions) + MEMORY + by_memory + SPEED + by_speed)
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
