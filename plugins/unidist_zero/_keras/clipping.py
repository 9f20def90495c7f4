"""Keras' own clipping when gradients are sharded: the same result as in one process.

`clipvalue` acts on each element by itself and needs nothing of this. `global_clipnorm` and `clipnorm` need sums of
squares over all ranks, of all gradients or of each: one exchange per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReduceOp
from unidist_tensorflow.gradients.tensors import host_node
from unidist_tensorflow.memory import Array
from unidist_zero._keras.shards import VariableShard

_NODE = "unidist_exchange_of_norms_which_needs_jit_compile_False"


class ShardedClipping:
    """Clips the gradients of shards.

    Args:
        optimizer: has the options; the one that clips, not a LossScaleOptimizer around it.
        plain_clip: clips gradients that are whole.
        communicator: returns that of the shard group.
        num_variables: of the model.
        whole: each shard is a whole variable.
    """

    def __init__(
        self,
        optimizer: Any,
        plain_clip: Callable[[Sequence[Any]], Sequence[Any]],
        communicator: Callable[[], Communicator],
        num_variables: int,
        *,
        whole: bool,
    ) -> None:
        self.shards: Sequence[VariableShard | None] = ()
        """Of the gradients that are clipped next; None for one that is local to this rank, and whole."""
        self._optimizer = optimizer
        self._plain_clip = plain_clip
        self._communicator = communicator
        self._num_variables = num_variables
        self._whole = whole

    def __call__(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients clipped; Keras calls it in each step."""
        optimizer = self._optimizer
        if optimizer.clipnorm and optimizer.clipnorm > 0:
            return self._plain_clip(gradients) if self._whole else self._by_each_norm(gradients)
        if optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
            return self._by_global_norm(gradients)
        return self._plain_clip(gradients)

    def _by_global_norm(self, gradients: Sequence[Any]) -> Sequence[Any]:
        limit = tf.constant(self._optimizer.global_clipnorm, tf.float64)
        values = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in gradients]
        squares = [tf.reduce_sum(tf.square(tf.cast(each, tf.float64))) for each in values]
        sharded = [square for square, shard in zip(squares, self.shards, strict=True) if shard is not None]
        own = [square for square, shard in zip(squares, self.shards, strict=True) if shard is None]
        total = self._sum(tf.reshape(tf.add_n(sharded) if sharded else tf.zeros([], tf.float64), [1]))[0]
        norm = tf.sqrt(tf.add_n([total, *own]))
        # As Keras does: a norm that is not finite makes everything NaN.
        scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [tf.convert_to_tensor(gradient) * tf.cast(scale, gradient.dtype) for gradient in gradients]

    def _by_each_norm(self, gradients: Sequence[Any]) -> Sequence[Any]:
        squares = tf.zeros([self._num_variables], tf.float64)
        for gradient, shard in zip(gradients, self.shards, strict=True):
            if shard is not None:
                squared: Any = keras.ops.square(keras.ops.cast(gradient, "float64"))  # each occurrence by itself
                parts = [tf.reduce_sum(part) for part in shard.flat_pieces(tf.convert_to_tensor(squared))]
                squares = tf.tensor_scatter_nd_add(squares, [[place] for place in shard.places], tf.stack(parts))
        limit = tf.constant(self._optimizer.clipnorm, tf.float64)
        scales = limit / tf.maximum(tf.sqrt(self._sum(squares)), limit)
        clipped: list[Any] = []
        for gradient, shard in zip(gradients, self.shards, strict=True):
            if shard is None:
                clipped += self._plain_clip([gradient])
            else:
                scale = tf.gather(tf.cast(scales, gradient.dtype), shard.places)
                clipped.append(keras.ops.multiply(gradient, shard.spread(scale, 1.0)))
        return clipped

    def _sum(self, values: tf.Tensor) -> tf.Tensor:
        """Return `(n,)` float64 values, summed over the shard group."""
        return exchanged(self._communicator(), values, DType.FLOAT64, ReduceOp.SUM)


def exchanged(communicator: Communicator, values: tf.Tensor, dtype: DType, op: ReduceOp) -> tf.Tensor:
    """Return `(n,)` values reduced over the ranks of a communicator. Collective; in eager mode and in graphs."""
    if communicator.size == 1:
        return values

    def run(array: Any) -> list[Array]:
        memory = np.array(array).reshape(-1)
        communicator.allreduce(Buffer.of(memory), Buffer.of(memory), op=op).wait()
        return [memory]

    return host_node(run, [values], [tf.TensorSpec(values.shape, values.dtype)], name=_NODE)[0]
