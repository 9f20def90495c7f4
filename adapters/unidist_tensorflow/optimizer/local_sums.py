"""Sums of this rank's gradients of local variables, which no exchange adds up over the passes of an update."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import tensorflow as tf

from unidist_tensorflow.gradients.tensors import Gradient


class LocalSums:
    """The sums of one optimizer, in variables: passes may be steps of a graph.

    A variable of the model has one from its first gradient on. An update in whose passes it had none is by zeros.
    """

    def __init__(self) -> None:
        self._sums: dict[Hashable, tf.Variable] = {}

    def add(self, key: Hashable, variable: Any, gradient: Gradient | None) -> None:
        """Add the gradient of a pass.

        Args:
            key: of the variable.
            variable: of the model.
            gradient: dense, or slices; None: the pass had none.
        """
        if gradient is None:
            return
        if key not in self._sums:
            with tf.init_scope():
                self._sums[key] = tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
        total = self._sums[key]
        if isinstance(gradient, tf.IndexedSlices):
            values = tf.cast(gradient.values, total.dtype)
            total.scatter_add(tf.IndexedSlices(values, gradient.indices, gradient.dense_shape))
        else:
            total.assign_add(tf.cast(gradient, total.dtype))

    def take(self, key: Hashable, factor: Any) -> tf.Tensor | None:
        """Return the sum of a variable times a factor, and begin the next one; None: it never had a gradient."""
        total = self._sums.get(key)
        if total is None:
            return None
        taken = total.read_value() * tf.cast(factor, total.dtype)
        with tf.control_dependencies([taken]):
            total.assign(tf.zeros_like(taken))
        return taken
