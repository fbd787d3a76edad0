"""What is published of accelerators, and descriptions of them that the real compilers take in their place."""

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental import topologies

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 } runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""What XLA's compiler for GPUs wants to know of an H100 (XLA's GpuTargetConfig)."""


@dataclass(frozen=True)
class Chip:
    """Published figures of one device. Rates are per second; GB and TFLOP are decimal, GiB is not.

    memory_gib: what a program can use; of TPUs the limit that the compiler itself states.
    memory_gb_s and what follows: 0 where it is not known.
    bf16_tflop_s: dense products.
    link_gb_s: to all neighbours together, in one direction.
    """

    platform: str
    name: str
    memory_gib: float
    memory_gb_s: float
    bf16_tflop_s: float
    link_gb_s: float
    source: str

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)


@functools.cache
def chips() -> dict[str, Chip]:
    """The chips that are known, by the names that topologies begin with."""
    facts = json.loads(Path(__file__).with_name("chips.json").read_bytes())
    return {name: Chip(**fields) for name, fields in facts.items()}


@dataclass(frozen=True)
class Topology:
    """Devices that need not be there. text: as in "v5p:2x2x1" or "h100:8"."""

    text: str
    chip: Chip
    devices: Sequence[jax.Device]


def describe(text: str) -> Topology:
    """The devices that a text names: a chip and how many there are, by their arrangement if it is a TPU.

    "cpu:N" are N devices of this machine. Raises ValueError for a chip that is not known, an arrangement that its compiler
    does not know, and where the compiler is not installed.
    """
    name, _, arrangement = text.partition(":")
    if name == "cpu" and arrangement.isdecimal():
        return Topology(text, _this_machine(), jax.devices("cpu")[: int(arrangement)])
    chip = chips().get(name)
    if chip is None or not arrangement:
        raise ValueError(
            f"topology {text!r}: give a chip and its arrangement, as in v5p:2x2x1, h100:8 or cpu:1; chips are "
            f"{', '.join(chips())} and cpu"
        )
    try:
        if chip.platform == "tpu":
            _quiet_libtpu()
            devices = topologies.get_topology_desc(platform="tpu", topology_name=text).devices
        else:
            sizes = f"1x{int(arrangement)}x1" if arrangement.isdecimal() else arrangement
            devices = topologies.get_topology_desc(platform="cuda", target_config=H100, topology=sizes).devices
    except Exception as error:
        raise ValueError(f"topology {text!r}: {_remedy(chip, error)}") from error
    return Topology(text, chip, devices)


def _this_machine() -> Chip:
    """A CPU, whose rates nobody publishes."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Chip("cpu", "this machine's CPU", memory / 2**30, 0, 0, 0, "the operating system")


def _quiet_libtpu() -> None:
    """What libtpu asks of its surroundings where there is no TPU: among them that several processes may load it."""
    quiet = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    for name, value in quiet.items():
        os.environ.setdefault(name, value)


def _remedy(chip: Chip, error: Exception) -> str:
    said = str(error).strip().splitlines()[-1][:300]
    if chip.platform == "tpu" and "not installed" in said:
        return f"its compiler, libtpu, is not installed (pip install 'paxserve[tpu]'): {said}"
    if chip.platform == "gpu":
        return f"its compiler is JAX's CUDA plugin with NVIDIA's nvcc (pip install 'paxserve[cuda]'): {said}"
    return said
