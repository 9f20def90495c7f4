"""Batch normalisation over the samples of all ranks, by Horovod's name, for the Keras that `tf.keras` is."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from unidist.runtime import context
from unidist_tensorflow.gradients import pair
from unidist_tensorflow.keras_api import IS_LEGACY, api
from unidist_tensorflow.operations.reductions import Sum, allreduce


@api.saving.register_keras_serializable(package="unidist")
class SyncBatchNormalization(api.layers.BatchNormalization):
    """A BatchNormalization whose statistics in training are those of the samples of all ranks.

    Every rank runs it equally often in training, on batches that may differ in size. Count, sum and sum of squares are
    added up over the ranks in float64, differentiably: the gradients are those of one process on all samples, once the
    optimizer has averaged them over the ranks.

    Args:
        fused: for Horovod's sake: False; a fused operation cannot ask other ranks.
        kwargs: of Keras' BatchNormalization.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if kwargs.get("synchronized"):
            raise ValueError("synchronized=True is for tf.distribute; this layer is synchronised by unidist")
        if IS_LEGACY:
            kwargs["fused"] = False
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        """Return mean and variance; Keras' `call` asks for them in training.

        Keras 3 passes a mask on. tf_keras passes the axes on, whether to keep them (with length 1), and a mask.
        """
        if not context.is_initialized() or context.current().topology.world_size == 1:
            return super()._moments(inputs, *arguments, **options)
        if not IS_LEGACY:
            return _moments_over_ranks(inputs, self._reduction_axes, *arguments, **options)

        def moments(axes: Any, keep_dims: bool, mask: Any = None) -> tuple[Any, Any]:
            mean, variance = _moments_over_ranks(inputs, axes, mask)
            if keep_dims:
                shape = [1 if axis in axes else size for axis, size in enumerate(inputs.shape)]
                return tf.reshape(mean, shape), tf.reshape(variance, shape)
            return mean, variance

        return moments(*arguments, **options)


def _moments_over_ranks(inputs: Any, axes: Any, mask: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance over some axes, and over the ranks."""
    values = tf.cast(inputs, tf.float64)
    if mask is None:
        weights = tf.ones_like(values)
    else:
        weights = tf.broadcast_to(tf.cast(tf.expand_dims(mask, -1), tf.float64), tf.shape(values))
    sums = tf.stack(
        [
            tf.reduce_sum(weights, axes),
            tf.reduce_sum(values * weights, axes),
            tf.reduce_sum(values * values * weights, axes),
        ]
    )
    count, total, squares = tf.unstack(_summed(sums))
    count = tf.maximum(count, 1.0)
    mean = total / count
    variance = tf.maximum(squares / count - mean * mean, 0.0)
    return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)


def _summed(values: tf.Tensor) -> Any:
    """Return the sum over all ranks. The gradient is the sum of all ranks' gradients."""
    return pair(
        lambda given: _allreduce(given, "sync_batch_norm.forward"),
        lambda upstream: _allreduce(upstream, "sync_batch_norm.backward"),
    )(values)


def _allreduce(values: tf.Tensor, name: str) -> tf.Tensor:
    # Outside of all name scopes: Keras numbers models and layers as they are made, in which ranks may differ. Within a
    # graph the names of several layers are numbered in the order in which it is built, which is the same everywhere.
    with tf.name_scope(""):
        return allreduce(values, op=Sum, name=name)
