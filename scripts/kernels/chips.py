"""The chips that kernels are compiled for and costed on; none of them need be there."""

from dataclasses import dataclass

from paxserve.chips import H100


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
        config=H100,
        hbm=3.35e12,
        multiprocessors=132,
        registers=65536,
        shared_bytes=233472,
    )
}
