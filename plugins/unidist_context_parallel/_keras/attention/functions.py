"""TensorFlow's functions of arrays for the ring of attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from typing_extensions import override

from unidist_context_parallel.attention.arrays import Array, ArrayFunctions


class TensorFlowFunctions(ArrayFunctions):
    """See `ArrayFunctions`. In graphs, too."""

    @override
    def matmul(self, a: Array, b: Array) -> Array:
        return tf.matmul(a, b)

    @override
    def transposed(self, x: Array) -> Array:
        return tf.linalg.matrix_transpose(x)

    @override
    def exp(self, x: Array) -> Array:
        return tf.exp(x)

    @override
    def log(self, x: Array) -> Array:
        return tf.math.log(x)

    @override
    def maximum(self, a: Array, b: Array) -> Array:
        return tf.maximum(a, b)

    @override
    def where(self, condition: Array, x: Array, other: float | Array) -> Array:
        return tf.where(condition, x, tf.cast(other, x.dtype))

    @override
    def sum(self, x: Array, dim: int) -> Array:
        return tf.reduce_sum(x, dim, keepdims=True)

    @override
    def max(self, x: Array, dim: int) -> Array:
        return tf.reduce_max(x, dim, keepdims=True)

    @override
    def concatenate(self, arrays: Sequence[Array], dim: int) -> Array:
        return tf.concat(arrays, dim)

    @override
    def take(self, x: Array, indices: npt.NDArray[np.int64], dim: int) -> Array:
        return tf.gather(x, indices, axis=dim)

    @override
    def constant(self, x: npt.NDArray[np.int64]) -> Array:
        return tf.constant(x)

    @override
    def zeros_like(self, x: Array) -> Array:
        return tf.zeros_like(x)

    @override
    def cast(self, x: Array, like: Array) -> Array:
        return tf.cast(x, like.dtype)

    @override
    def after(self, x: Array, *others: Array) -> Array:
        if tf.executing_eagerly():
            return x
        with tf.control_dependencies(others):
            return tf.identity(x)
