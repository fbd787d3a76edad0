"""Runs other engines on a workload, each in a process of its own."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paxserve.bench.workload import BenchRequest
from paxserve.model_source import ModelSource


def run_transformers(
    source: ModelSource,
    requests: Sequence[BenchRequest],
    warmup: Sequence[BenchRequest],
    *,
    python: str,
    dtype: str,
    batch_size: int,
    repeat: int,
) -> dict[str, Any]:
    """Static batches in Hugging Face transformers with the same weights and dtype, on all cores of the CPU.

    python: an interpreter that has torch and transformers (and gguf, for a GGUF model).
    Returns seconds (of each repetition) and the versions of torch and transformers.
    Raises ValueError if the model's format is not one transformers reads, or if the run failed.
    """
    if source.format not in ("gguf", "safetensors"):
        raise ValueError(f"--against transformers: it cannot read {source.path}, whose format is {source.format!r}")
    job = {
        "directory": str(source.path.parent if source.gguf else source.path),
        "gguf_file": source.path.name if source.gguf else None,
        "dtype": dtype,
        "batch_size": batch_size,
        "threads": os.cpu_count(),
        "repeat": repeat,
        "warmup": [(request.prompt_token_ids, request.max_tokens) for request in warmup],
        "requests": [(request.prompt_token_ids, request.max_tokens) for request in requests],
    }
    script = Path(__file__).with_name("transformers_baseline.py")
    process = subprocess.run([python, str(script)], input=json.dumps(job), capture_output=True, text=True)
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise ValueError(
            f"--against transformers: {python} could not run the model there ({reason}); "
            "--transformers-python names an interpreter with torch, transformers and gguf installed"
        )
    return json.loads(process.stdout)
