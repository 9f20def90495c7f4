"""Communication among the ranks that have the tokens of one batch, on TensorFlow tensors `(batch, tokens, ...)`.

As in PyTorch, backward passes are the exact transposes: of a gather a reduce-scatter, of a slice of a whole tensor the
slice. Each exchange is a node of the host; TensorFlow runs these in program order, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from unidist_context_parallel.layout.sequence import SequenceLayout, zigzag
from unidist_tensorflow.gradients import differentiable_once, host_node
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

    def divides(self, tokens: int) -> bool:
        """Return whether every rank has a part of so many tokens; else all ranks compute all of them."""
        return min(self.layout(tokens).counts) > 0

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

        @differentiable_once("context")
        def gathered(x: tf.Tensor) -> Any:
            return self._gathered(x, layout), lambda gradient: self._scattered(gradient, layout)

        rows = tf.convert_to_tensor(rows)
        whole = gathered(rows) if rows.dtype.is_floating else self._gathered(rows, layout)
        mask = keras.src.backend.get_keras_mask(rows)
        if mask is not None:
            keras.src.backend.set_keras_mask(whole, self._gathered(tf.convert_to_tensor(mask), layout))
        return whole

    def shift(self, arrays: Sequence[tf.Tensor], rows: int, after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Send arrays `(..., tokens, width)` to the next rank, and return those of the rank before. Without gradients.

        Args:
            arrays: to be sent.
            rows: tokens of those that arrive.
            after: in graphs, what is computed before they are sent.
        """

        def run(*given: Any) -> list[Array]:
            found, works = [], []
            sources = [np.ascontiguousarray(each) for each in given]  # stay until they have been sent
            for source in sources:
                target = empty_array((*source.shape[:-2], rows, source.shape[-1]), source.dtype)
                works.append(self._communicator.send(buffer_of_array(source), to=(self.rank + 1) % self.size))
                works.append(self._communicator.recv(buffer_of_array(target), source=(self.rank - 1) % self.size))
                found.append(target)
            for work in works:
                work.wait()
            return found

        specs = [tf.TensorSpec((*each.shape[:-2], rows, each.shape[-1]), each.dtype) for each in arrays]
        if tf.executing_eagerly():
            return host_node(run, arrays, specs, name=_NAME)
        with tf.control_dependencies(after):
            return host_node(run, arrays, specs, name=_NAME)

    def to_heads(self, rows: tf.Tensor, tokens: int) -> tf.Tensor:
        """Return this rank's heads of all tokens, from all heads of this rank's tokens. Differentiable; collective.

        Args:
            rows: `(batch, tokens of this rank, heads, width)`; the heads divide.
            tokens: of the whole sequence.
        """
        layout = self.layout(tokens)

        @differentiable_once("context")
        def exchanged(x: tf.Tensor) -> Any:
            return self._to_heads(x, layout), lambda gradient: self._to_rows(gradient, layout)

        result: tf.Tensor = exchanged(rows)
        return result

    def to_rows(self, heads: tf.Tensor, tokens: int) -> tf.Tensor:
        """Return all heads of this rank's tokens, from this rank's heads of all tokens. Differentiable; collective."""
        layout = self.layout(tokens)

        @differentiable_once("context")
        def exchanged(x: tf.Tensor) -> Any:
            return self._to_rows(x, layout), lambda gradient: self._to_heads(gradient, layout)

        result: tf.Tensor = exchanged(heads)
        return result

    def _to_heads(self, x: tf.Tensor, layout: SequenceLayout) -> tf.Tensor:
        own = x.shape[2] // self.size

        def run(given: Any) -> list[Array]:
            batch, rows, _, width = given.shape
            # (ranks, tokens, batch, heads of a rank, width): what each rank gets is in one place.
            source = np.ascontiguousarray(given.reshape(batch, rows, self.size, own, width).transpose(2, 1, 0, 3, 4))
            target = np.empty((layout.size, batch, own, width), given.dtype)
            unit = batch * own * width
            self._alltoall(source, target, [rows * unit] * self.size, [count * unit for count in layout.counts])
            return [_turned(target[layout.gathered_order()])]

        [result] = host_node(run, [x], [tf.TensorSpec((x.shape[0], layout.size, own, x.shape[3]), x.dtype)], name=_NAME)
        return result

    def _to_rows(self, x: tf.Tensor, layout: SequenceLayout) -> tf.Tensor:
        order = np.concatenate([layout.positions(rank) for rank in range(self.size)])
        rows = layout.counts[self.rank]

        def run(given: Any) -> list[Array]:
            batch, _, own, width = given.shape
            source = np.ascontiguousarray(np.swapaxes(given, 0, 1)[order])
            target = np.empty((self.size, rows, batch, own, width), given.dtype)
            unit = batch * own * width
            self._alltoall(source, target, [count * unit for count in layout.counts], [rows * unit] * self.size)
            result = empty_array((batch, rows, self.size * own, width), given.dtype)
            result.reshape(batch, rows, self.size, own, width)[...] = target.transpose(2, 1, 0, 3, 4)
            return [result]

        shape = (x.shape[0], rows, self.size * x.shape[2], x.shape[3])
        [result] = host_node(run, [x], [tf.TensorSpec(shape, x.dtype)], name=_NAME)
        return result

    def _alltoall(self, source: Array, target: Array, sent: list[int], received: list[int]) -> None:
        work = self._communicator.alltoall(
            buffer_of_array(source), buffer_of_array(target), send_counts=sent, receive_counts=received
        )
        work.wait()

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
