"""Statistics of batch normalization over the samples of all ranks.

`BatchNormalization(synchronized=True)` of Keras knows tf.distribute alone, and would be local without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from unidist_tensorflow.gradients import pair
from unidist_tensorflow.operations.reductions import Sum, allreduce


def synchronize(model: Any) -> None:
    """Let the layers of a model that are to be synchronized take their statistics over all ranks.

    Args:
        model: its layers may come into being later; then to be called again.
    """
    for layer in model._flatten_layers():
        if type(layer) is keras.layers.BatchNormalization and getattr(layer, "synchronized", False):
            vars(layer)["_moments"] = functools.partial(_moments_of, layer)


def _moments_of(layer: Any, inputs: Any, mask: Any) -> Any:
    if keras.backend.is_keras_tensor(inputs):
        return type(layer)._moments(layer, inputs, mask)
    return moments_over_ranks(inputs, layer._reduction_axes, mask)


def moments_over_ranks(inputs: Any, axes: Sequence[int], mask: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance over some axes, and over the ranks. Collective."""
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
