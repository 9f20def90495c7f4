"""The part of the basic API that needs JAX: arrays in engine memory, random keys, and this rank's device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from unidist.buffer import DType
from unidist.runtime import context
from unidist.settings import device_index
from unidist.training.seeding import seed_python
from unidist_arrays.memory import Array, array_of_buffer
from unidist_jax.memory import buffer_of

__all__ = ["buffer", "device", "empty", "seed"]

buffer = buffer_of


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


def device() -> jax.Device:
    """Return the device of this rank: an accelerator of this host, by its local rank, or the CPU where there is none.

    A rank that is shown its own device only, by CUDA_VISIBLE_DEVICES, uses that.

    Raises:
        ConfigurationError: there are accelerators, but fewer than ranks on this host.
    """
    found = jax.local_devices()
    visible = 0 if found[0].platform == "cpu" else len(found)
    index = device_index(context.current().topology, visible=visible)
    return found[0 if index is None else index]
