"""The chips that kernels are compiled for and costed on; none of them need be there."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TPU:
    """topology: as libtpu is asked for it. kind: what JAX calls the device. clock: Hz, from the published bfloat16 peak.

    hbm: bytes per second of a device. flops: bfloat16 peak of a core in a cycle, of 4 matrix units of 128 x 128 or of 2 of
    256 x 256 that take two rows. cores: of a device. delay: issue slots after a branch that run before it is taken.
    """

    topology: str
    kind: str
    clock: float
    hbm: float
    flops: int
    cores: int = 1
    delay: int = 4


TPUS = {
    "v5e": TPU("v5e:2x2", "TPU v5 lite", 1.50e9, 819e9, 2**17),
    "v5p": TPU("v5p:2x2x1", "TPU v5", 1.75e9, 2765e9, 2**17, cores=2),
    "v6e": TPU("v6e:2x2", "TPU v6 lite", 1.75e9, 1640e9, 2**19),
    "tpu7x": TPU("tpu7x:2x2x1", "TPU7x", 2.20e9, 3690e9, 2**19, delay=6),
}


@dataclass(frozen=True)
class GPU:
    """config: XLA's GpuTargetConfig. hbm: bytes per second. registers, shared_bytes: of a multiprocessor.

    block_shared_bytes: what the system takes of a thread block's shared memory.
    """

    config: str
    hbm: float
    multiprocessors: int
    registers: int
    shared_bytes: int
    block_shared_bytes: int = 1024


GPUS = {
    "sm_90a": GPU(
        config="""
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 } runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
""",
        hbm=3.35e12,
        multiprocessors=132,
        registers=65536,
        shared_bytes=233472,
    )
}
