"""One step over a mesh of devices: every way to lay 8 devices out gives the same tokens, and holds the cache once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_models import write_checkpoint, write_random

from paxserve import LLM
from paxserve.sharding import MeshShape, expert_axes

MODELS = {
    "one KV head": ("qwen2_some_windows", {"num_key_value_heads": 1}, 4),
    "two KV heads": ("qwen2_some_windows", {}, 7),
    "eight KV heads": ("qwen2_some_windows", {"num_attention_heads": 8, "num_key_value_heads": 8}, 10),
    "experts": ("mixtral_window", {}, 7),
    "latent attention, experts": ("deepseek_v3_experts", {"num_attention_heads": 8, "num_key_value_heads": 8}, 4),
}


@pytest.mark.parametrize(("name", "fields", "meshes"), MODELS.values(), ids=MODELS.keys())
def test_every_mesh_gives_the_same_tokens(tmp_path: Path, name: str, fields: dict[str, int], meshes: int) -> None:
    write_checkpoint(tmp_path, name, **fields)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    script = Path(__file__).with_name("mesh_on_eight_devices.py")
    done = subprocess.run([sys.executable, script, tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == meshes


def test_a_mesh_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_random(tmp_path)
    with pytest.raises(ValueError, match=r"needs 2 devices; there are 1"):
        LLM(str(tmp_path), mesh="2")
    with pytest.raises(ValueError, match=r"2 KV heads cannot be split over kv_head=4"):
        LLM(str(tmp_path), mesh="kv_head=4")
    with pytest.raises(ValueError, match="mesh 'x'"):
        LLM(str(tmp_path), mesh="x")


def test_experts_go_whole_as_far_as_they_go() -> None:
    assert expert_axes(16, MeshShape(2, 2, 4)) == (("data", "kv_head", "kv_page"), ())
    assert expert_axes(8, MeshShape(2, 2, 4)) == (("data", "kv_head"), ("kv_page",))
    assert expert_axes(12, MeshShape(8, 1, 4)) == (("kv_head", "kv_page"), ("data",))
