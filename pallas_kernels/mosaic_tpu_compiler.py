"""What the TPU's compiler is told of the attention kernels: the VMEM they may use, and how to schedule them.

The flags are the compiler's own, of its scheduler and its allocation of registers, and count for one kernel alone. Nothing
but their names is documented; what they do was found by trying them, with libtpu 0.0.42 and 0.0.50.
"""

from jax.experimental.pallas import tpu as pltpu

VMEM_LIMIT = 56 * 2**20  # of the smallest VMEM, 64 MiB on v5p and v7x, what a kernel may use

ROOM = "XLA_TPU_ROOM_FOR_POTENTIAL_REGISTER_DEPENDENCY"
EVENLY = "XLA_TPU_EVENLY_DISTRIBUTE_CRITICAL_NODES"
HOISTING = "XLA_TPU_EXTRA_HOISTING_RANGE_FOR_REGISTER_PRODUCERS"


def compiler_params(hoisting: int = 0) -> pltpu.CompilerParams:
    """For a grid of [cores, steps].

    hoisting: for kernels that keep all units busy: by how many issue slots, at most, what fills a register may be moved
        forward. Of the compiler's own choice, 128, matrix units run far ahead of those that take their results, which are
        spilled then. 0 leaves a kernel's schedule to the compiler.
    """
    flags: dict[str, bool | int] = {ROOM: 0}  # registers it keeps free are missing elsewhere
    if hoisting:
        flags |= {EVENLY: True, HOISTING: hoisting}
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=VMEM_LIMIT,
        disable_bounds_checks=True,
        disable_semaphore_checks=True,
        flags=flags,
    )
