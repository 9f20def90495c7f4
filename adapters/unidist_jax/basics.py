"""The part of the basic API that needs JAX: arrays in engine memory, random keys, and this rank's device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import jax
import numpy as np

from unidist.buffer import DType
from unidist.runtime import context
from unidist.settings import device_index, visible_devices
from unidist.topology import Topology
from unidist.training.seeding import seed_python
from unidist_arrays.memory import Array, array_of_buffer
from unidist_jax.memory import buffer_of

__all__ = ["buffer", "device", "empty", "seed"]

buffer = buffer_of

_VISIBLE = "jax_cuda_visible_devices"


def empty(shape: int | Sequence[int], dtype: Any = np.float32) -> Array:
    """Return a zeroed array in engine memory, which collectives move without a copy.

    A numpy array, because JAX's cannot be written to. It stays valid after `shutdown()`.
    """
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    kind = DType(np.dtype(dtype).name)
    return array_of_buffer(context.current().world.allocate(math.prod(dims) * kind.itemsize).cast(kind), dims)


def seed(number: int) -> jax.Array:
    """Seed the random numbers of Python and numpy, and return the key with which this rank begins in JAX.

    Ranks with different samples get different numbers, for dropout and augmentation say; ranks that hold parts of one
    model get equal ones. One process gets the key `jax.random.key(number)`.

    Args:
        number: from 0, below 2**32; the same on every rank.

    Raises:
        UsageError: a number out of range.
    """
    return jax.random.key(seed_python(number, context.current()))


def choose_device(topology: Topology, *, visible: int | None = None) -> bool:
    """Let this process use the GPU of its local rank alone: JAX else takes 75 % of the memory of all that it sees.

    What the script has chosen itself (`jax_cuda_visible_devices`) stays. A single process of a host keeps its GPUs.

    Args:
        topology: this rank's place.
        visible: number of GPUs that this process sees; default: asked for, without JAX.

    Returns:
        Whether JAX will compute on a GPU.

    Raises:
        ConfigurationError: there are GPUs, but fewer than ranks on this host.
    """
    platforms = jax.config.jax_platforms
    leaves_gpus = platforms and not {"cuda", "gpu"} & set(platforms.split(","))
    if leaves_gpus or not _has_plugin_for_gpus():
        return False
    found = visible_devices() if visible is None else visible
    if topology.local_size > 1 and jax.config.read(_VISIBLE) == "all":
        index = device_index(topology, visible=found)
        if index is not None:
            jax.config.update(_VISIBLE, str(index))
    return found > 0


def _has_plugin_for_gpus() -> bool:
    """Return whether JAX is installed with its half for NVIDIA's GPUs; without it computes on the CPU."""
    return any("cuda" in found.name for found in entry_points(group="jax_plugins"))


def device() -> jax.Device:
    """Return the device of this rank: an accelerator of this host, by its local rank, or the CPU where there is none.

    `init` lets each rank see the GPU of its local rank alone, if JAX was not used before.

    Raises:
        ConfigurationError: there are accelerators, but fewer than ranks on this host.
    """
    found = jax.local_devices()
    visible = 0 if found[0].platform == "cpu" else len(found)
    index = device_index(context.current().topology, visible=visible)
    return found[0 if index is None else index]
