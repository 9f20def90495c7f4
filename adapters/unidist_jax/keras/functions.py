"""Functions of `unidist.keras` on JAX: operations on values, seeds, and loading models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from unidist.horovod_api.reduce_ops import Op, reduction_of
from unidist.runtime import context
from unidist.training.seeding import seed_python
from unidist_jax import basics
from unidist_jax.keras.training import DistributedOptimizer
from unidist_jax.operations import Compression, movement, reductions


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Return the reduction of a value over all ranks, an array. See `unidist.jax`'s."""
    return reductions.allreduce(
        keras.ops.convert_to_tensor(value),
        name,
        compression,
        Op(reduction_of(op, average)),
        prescale_factor,
        postscale_factor,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the rows of all ranks, in rank order, an array."""
    return movement.allgather(keras.ops.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return rank `root_rank`'s value, an array."""
    return movement.broadcast(keras.ops.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = Op.Average) -> Any:
    """Return this rank's rows of the reduction over all ranks, an array."""
    return reductions.reducescatter(keras.ops.convert_to_tensor(value), name=name, op=Op(op))


def seed(number: int) -> None:
    """Seed the random numbers of Python, numpy and Keras. Every rank passes the same number.

    Ranks get different numbers, for dropout and augmentation; the weights are rank 0's anyway. One process gets those
    of `keras.utils.set_random_seed(number)`.

    Args:
        number: from 0, below 2**32; the same on every rank.

    Raises:
        UsageError: a number out of range.
    """
    seed_python(number, context.current())  # Keras takes the seeds of its layers from Python's numbers


def device() -> str:
    """Return the device of this rank for `keras.device`: "gpu:" and its number, or "cpu:0".

    Raises:
        ConfigurationError: there are accelerators, but fewer than ranks on this host.
    """
    found = basics.device()
    return f"{found.platform}:{found.id}"


def nccl_built() -> int:
    """Return 0: no engine moves JAX's arrays over NCCL."""
    return 0


def cuda_built() -> bool:
    """Return False: operations run on the CPU."""
    return False


rocm_built = cuda_built


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type[Any]] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Return a saved Keras model whose optimizer, with its state, is a DistributedOptimizer.

    Every rank loads it; where only rank 0 has the file, broadcast afterwards, or use `distribute`.

    Args:
        filepath: of `model.save`, of a plain or a distributed model.
        custom_optimizers: the script's own optimizer classes.
        custom_objects: other classes and functions by name.
        compression: see `DistributedOptimizer`.
    """
    objects = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    if model.optimizer is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
