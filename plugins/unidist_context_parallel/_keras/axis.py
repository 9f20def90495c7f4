"""Communication among the ranks that have the tokens of one batch, on TensorFlow tensors `(batch, tokens, ...)`.

As in PyTorch, backward passes are the exact transposes: of a gather a reduce-scatter, of a slice of a whole tensor the
slice. Each exchange is a node of the host; TensorFlow runs these in program order, which is the same on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from unidist_context_parallel.layout.sequence import SequenceLayout, zigzag
from unidist_tensorflow.gradients import host_node
from unidist_tensorflow.memory import Array, buffer_of_array, empty_array

if TYPE_CHECKING:
    from unidist.communicator import Communicator

_NAME = "unidist_context_parallel_exchange_which_needs_jit_compile_False"


class KerasAxis:
    """The ranks of the axis, as seen by one of them.

    Args:
        communicator: along the axis; used by nothing else.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size

    def layout(self, tokens: int) -> SequenceLayout:
        """Return the division of a sequence."""
        return zigzag(tokens, self.size)

    def take(self, whole: tf.Tensor, tokens: int, dim: int = 1) -> tf.Tensor:
        """Return this rank's tokens of a whole tensor, along a dim, with those of its mask."""
        rows = tf.gather(whole, self.layout(tokens).positions(self.rank), axis=dim)
        mask = keras.src.backend.get_keras_mask(whole) if dim == 1 else None
        if mask is not None:
            keras.src.backend.set_keras_mask(rows, tf.gather(mask, self.layout(tokens).positions(self.rank), axis=1))
        return rows

    def gather(self, rows: tf.Tensor, tokens: int) -> tf.Tensor:
        """Return the tokens of all ranks, in their order, with their mask; `(batch, tokens, ...)`. Collective."""
        layout = self.layout(tokens)

        @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def gathered(x: tf.Tensor) -> Any:
            return self._gathered(x, layout), lambda gradient: self._scattered(gradient, layout)

        rows = tf.convert_to_tensor(rows)
        whole = gathered(rows) if rows.dtype.is_floating else self._gathered(rows, layout)
        mask = keras.src.backend.get_keras_mask(rows)
        if mask is not None:
            keras.src.backend.set_keras_mask(whole, self._gathered(tf.convert_to_tensor(mask), layout))
        return whole

    def _gathered(self, rows: tf.Tensor, layout: SequenceLayout) -> tf.Tensor:
        def run(given: Any) -> list[Array]:
            source = np.ascontiguousarray(np.swapaxes(given, 0, 1))
            target = np.empty((layout.size, *source.shape[1:]), source.dtype)
            width = int(np.prod(source.shape[1:]))
            counts = [count * width for count in layout.counts]
            self._communicator.allgather(buffer_of_array(source), buffer_of_array(target), counts=counts).wait()
            return [_turned(target[layout.gathered_order()])]

        return self._node(run, rows, layout.size)

    def _scattered(self, whole: tf.Tensor, layout: SequenceLayout) -> tf.Tensor:
        order = np.concatenate([layout.positions(rank) for rank in range(self.size)])

        def run(given: Any) -> list[Array]:
            source = np.ascontiguousarray(np.swapaxes(given, 0, 1)[order])
            target = np.empty((layout.counts[self.rank], *source.shape[1:]), source.dtype)
            width = int(np.prod(source.shape[1:]))
            counts = [count * width for count in layout.counts]
            self._communicator.reducescatter(buffer_of_array(source), buffer_of_array(target), counts=counts).wait()
            return [_turned(target)]

        return self._node(run, whole, layout.counts[self.rank])

    def _node(self, run: Any, tensor: tf.Tensor, tokens: int) -> tf.Tensor:
        shape = (tensor.shape[0], tokens, *tensor.shape[2:])
        [result] = host_node(run, [tensor], [tf.TensorSpec(shape, tensor.dtype)], name=_NAME)
        return result


def _turned(rows: Array) -> Array:
    """Return an array with its first two dims swapped, in memory that TensorFlow can use."""
    turned = empty_array((rows.shape[1], rows.shape[0], *rows.shape[2:]), rows.dtype)
    turned[...] = np.swapaxes(rows, 0, 1)
    return turned
