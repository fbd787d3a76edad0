"""What a program that is being traced is for."""

import jax
import numpy as np
from jax.sharding import AbstractDevice, Mesh


def target() -> AbstractDevice:
    """The kind of device that the program being traced is for: under a mesh its devices', which need not be there."""
    return jax.sharding.get_abstract_mesh().abstract_device or _default_device()


def _default_device() -> AbstractDevice:
    return Mesh(np.asarray(jax.devices()[:1]), ("device",)).abstract_mesh.abstract_device
