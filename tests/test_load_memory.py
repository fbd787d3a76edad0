"""What loading takes of the host's memory, measured: a process holds what its devices hold, and about a tensor beside it."""

import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoints import hf_config, hf_tensors, llama_cpp_rows, write_gguf, write_hf

from paxserve.checkpoints.convert import convert
from paxserve.models.config_hf import config_from_hf

MIB = 2**20
# 92 MiB, half of them the embedding.
FIELDS = hf_config(
    hidden=512, mlp=2048, vocab_size=48_000, num_hidden_layers=6, tie_word_embeddings=True, torch_dtype="bfloat16"
)
SLACK = 24 * MIB
"""For the compiler's programs that fill stacked layers, pieces of files that are on their way, and Python."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with Linux's /proc")


@pytest.fixture(scope="module")
def checkpoints():
    """A directory with one model in every format; it is large, so it goes when the tests are done."""
    config = config_from_hf(FIELDS)
    tensors = hf_tensors(config, ml_dtypes.bfloat16)
    raw = {}
    for name, tensor in tensors.items():
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        rows = tensor if heads is None else llama_cpp_rows(tensor, heads)
        raw[name] = rows.view(np.uint8), gguf.GGMLQuantizationType.BF16
    with tempfile.TemporaryDirectory() as directory:
        write_hf(Path(directory) / "safetensors", FIELDS, tensors)
        convert(Path(directory) / "safetensors", Path(directory) / "orbax")
        write_gguf(Path(directory) / "model.gguf", config, tensors, raw)
        yield Path(directory)


def measure(directory, names, processes, layers):
    """By process and name, the figures of `load_and_measure.py` on four devices; all must load the same values."""
    script = Path(__file__).with_name("load_and_measure.py")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {
        "PYTHONPATH": ".",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // processes}",
        # glibc keeps freed blocks of less than 32 MiB for later; with this what is measured is what is held.
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    paths = ",".join(str(directory / name) for name in names)
    children = [
        subprocess.Popen(
            [sys.executable, script, "4", layers, paths, *([address, str(processes), str(number)] * (processes > 1))],
            cwd=Path(__file__).parents[1],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    results = [(*child.communicate(), child.returncode) for child in children]
    assert not any(code for _, _, code in results), results
    return [json.loads(out.splitlines()[-1]) for out, _, _ in results]


def check_peak(figures):
    """Of the largest tensor, too, a process needs its own part only."""
    assert figures["own"] < figures["peak"] < figures["own"] + figures["own_largest"] + SLACK, figures


def test_one_process(checkpoints):
    (found,) = measure(checkpoints, ["safetensors", "orbax", "model.gguf"], 1, "unrolled")
    for figures in found.values():
        check_peak(figures)


def test_two_processes(checkpoints):
    """Each holds half of a model whose layers are stacked, and reads no more of it."""
    stored = sum(file.stat().st_size for file in (checkpoints / "orbax").rglob("*") if file.is_file())
    for found in measure(checkpoints, ["safetensors", "orbax"], 2, "scan"):
        for figures in found.values():
            assert figures["own"] == pytest.approx(46 * MIB, rel=0.02)
            check_peak(figures)
        assert found["orbax"]["read"] < 0.6 * stored  # and its directory, and modules of Python
