"""Losses of loops with a `tf.GradientTape` that count as much as their weights say."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from unidist.errors import UsageError
from unidist.optim.update import Update, update_of
from unidist.training.weighted_loss import WeightedPass, weighted_update
from unidist_tensorflow.gradients.custom import differentiable_once
from unidist_tensorflow.gradients.tensors import host_node
from unidist_tensorflow.memory import Array

__all__ = ["weighted"]

_NUMBER = tf.TensorSpec([], tf.float64)


def weighted(loss: Any, weight: Any, *, optimizer: Any = None) -> Any:
    """Return a loss whose gradients count as much as its weight: a mean over all ranks' tokens, not of ranks' means.

        with tf.GradientTape() as tape:
            loss = ud.weighted(loss_fn(y, model(x, training=True)), tf.math.count_nonzero(y != -1))
        optimizer.apply(tape.gradient(loss, variables), variables)

    The gradient of the update is that of sum(losses) / sum(weights) over all ranks and over all passes of an update
    (`accumulate=N`). Collective: one exchange of a number. In eager mode and in graphs.

    Args:
        loss: of this rank's batch, a scalar: the sum of its losses, divided by the weight.
        weight: by what it was divided, a scalar: the tokens that count. 0: nothing of this batch does, and the loss
            does not matter, but its backward pass has to be finite (`tf.math.divide_no_nan`).
        optimizer: whose gradients these are, from `distribute`; default: the only one that is distributed.

    Returns:
        A scalar whose mean over the ranks is the mean over the tokens of all ranks in this pass; 0 if there are none.

    Raises:
        UsageError: on all ranks: a weight is negative or not finite. There is no distributed optimizer, or there are
            several; several passes make an update, and one of them adds up losses with different weights.
    """
    update = weakref.ref(weighted_update(optimizer, update_of))  # a graph keeps what its nodes refer to
    number = tf.reshape(tf.cast(weight, tf.float64), [])

    def of_value(own: Array) -> list[Array]:
        return [np.asarray(each, np.float64) for each in WeightedPass.of(_alive(update), float(own))]

    def of_gradients(share: Array, total: Array) -> list[Array]:
        return [np.asarray(WeightedPass(float(share), float(total)).of_gradients(_alive(update)), np.float64)]

    @differentiable_once("ud.weighted")
    def scaled(loss: Any) -> Any:
        share, total = host_node(of_value, [number], [_NUMBER, _NUMBER], name="unidist_weight_of_a_loss")

        def backward(gradient: Any) -> Any:
            factor = host_node(of_gradients, [share, total], [_NUMBER], name="unidist_weight_of_gradients")[0]
            return gradient * tf.cast(factor, gradient.dtype)

        factor = tf.cast(tf.math.divide_no_nan(share, total), loss.dtype)
        return tf.where(share > 0, loss * factor, tf.zeros_like(loss)), backward

    return scaled(tf.convert_to_tensor(loss))


def _alive(update: weakref.ref[Update]) -> Update:
    found = update()
    if found is None:
        raise UsageError("a function weights a loss for an optimizer that is no more: keep the optimizer")
    return found
