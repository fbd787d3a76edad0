"""A plan for GPUs that are not there, compiled with their own attention.

Needs JAX's CUDA plugin, with which `scripts/check_kernels` runs it.
"""

import importlib.util
import json

import pytest
from tiny_checkpoints import hf_config

from paxserve.cli import main

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="jax-cuda13-plugin is not installed"
)


def test_plan_for_a_gpu_compiles_its_own_attention(tmp_path, capsys, optimized) -> None:
    fields = {"hidden": 256, "head_dim": 64, "torch_dtype": "bfloat16", "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(hf_config(**fields)))
    sizes = ["--page-size", "16", "--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--context", "64"]
    assert main(["plan", str(tmp_path), "--topology", "h100:2", *sizes, "--largest-only", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["attention"] == "mosaic_gpu"
    assert planned["verdict"].startswith("fits")
    assert 0 < planned["memory"]["temporaries"] < 2**25
    assert planned["communication"]["all-reduce"][0] > 0
