"""Functions of `horovod.keras`: operations on values at once, and loading models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from unidist_tensorflow.keras_api import IS_LEGACY, api
from unidist_tensorflow.operations import functions, movement, reductions
from unidist_tensorflow.operations.compression import Compression, Compressor
from unidist_tensorflow.operations.reductions import Average
from unidist_tensorflow.optimizer.arguments import CompressionLike
from unidist_tensorflow.training.distributed_optimizer import DistributedOptimizer


def broadcast_global_variables(root_rank: int) -> Any:
    """Replace the global variables of the TF1 graph by rank `root_rank`'s; see `unidist.tensorflow`'s.

    Raises:
        RuntimeError: in eager mode, which has no global variables; use the callback of this name, or `distribute`.
    """
    return functions.broadcast_global_variables(root_rank)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """Return the reduction of a value over all ranks, a tensor. See `unidist.tensorflow`'s."""
    return reductions.allreduce(
        tf.convert_to_tensor(value),
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the rows of all ranks, in rank order, a tensor."""
    return movement.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return rank `root_rank`'s value, a tensor."""
    return movement.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Return this rank's rows of the reduction over all ranks, a tensor."""
    return reductions.reducescatter(tf.convert_to_tensor(value), op=op, name=name)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type[Any]] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: CompressionLike = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Return a saved Keras model whose optimizer, with its state, is a DistributedOptimizer.

    Every rank loads it; where only rank 0 has the file, broadcast afterwards, or use `distribute`.

    Args:
        filepath: of `model.save`, of a plain or a distributed model.
        custom_optimizers: the script's own optimizer classes.
        custom_objects: other classes and functions by name.
        compression: see `DistributedOptimizer`.
        legacy_opts: tf_keras: the optimizer may be of those of before TensorFlow 2.11, which is found out in any case.
    """
    if legacy_opts and not IS_LEGACY:
        raise ValueError("legacy_opts=True: Keras 3 has no legacy optimizers; set TF_USE_LEGACY_KERAS=1 for tf_keras")
    objects = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = api.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    if model.optimizer is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
