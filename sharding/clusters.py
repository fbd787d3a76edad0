"""Where JAX finds this process in a cluster: the one place of this folder that uses JAX's private modules.

JAX detects clusters inside `jax.distributed.initialize` only, which aborts the process if another one is missing. We ask
beforehand, so that we can say which. The names used here are the same from JAX 0.10.2 to 0.12.
"""

from jax._src import clusters

DETECTED = ("slurm", "gketpu", "gcetpu")
"""JAX's names of the clusters that need no flags: Slurm steps, TPUs on GKE, Cloud TPU VMs."""


def detect_cluster() -> type[clusters.ClusterEnv] | None:
    """The cluster that this process was started in, if it is one of `DETECTED`."""
    return next(
        (env for env in clusters.ClusterEnv._cluster_types if env.name in DETECTED and env.is_env_present()), None
    )
