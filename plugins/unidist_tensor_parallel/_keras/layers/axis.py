"""Megatron's conjugate functions on TensorFlow tensors: the exchanges along the axis `tensor`, forward and backward.

Each is a node of the host, eager or in a graph. TensorFlow runs such nodes in program order, which is the same on every
rank, in the backward pass too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from unidist.communicator import Communicator, ReduceOp
from unidist_tensor_parallel.layout.cuts import split_counts
from unidist_tensorflow.gradients import host_node, pair, pair_of_groups
from unidist_tensorflow.memory import Array, buffer_of_array, empty_array

_NAME = "unidist_tensor_parallel_exchange_which_needs_jit_compile_False"


class TensorAxis:
    """The exchanges of one model's cut layers.

    Args:
        communicator: along the axis; used by nothing else.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size

    def rebind(self, communicator: Communicator) -> None:
        """Exchange over another communicator from now on, also in graphs that were traced before.

        Args:
            communicator: along the axis, on which this rank has the same place.
        """
        self.communicator = communicator

    def enter(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a whole tensor as the input of a cut layer: unchanged; its gradients are summed over the ranks."""
        return pair(tf.identity, self.reduced)(tensor)

    def leave(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the sum of the partial results of all ranks; its gradient goes to every rank unchanged."""
        return pair(self.reduced, tf.identity)(tensor)

    def gather(self, tensor: tf.Tensor, counts: Sequence[int]) -> tf.Tensor:
        """Return the parts of all ranks side by side along the last dim; each rank gets its part of the gradient.

        Args:
            tensor: `(..., counts[rank])` elements.
            counts: of the last dim on each rank.
        """
        return pair(lambda x: self._concatenated(x, counts), lambda x: self._own(x, counts))(tensor)

    def split(self, tensor: tf.Tensor, counts: Sequence[int]) -> tf.Tensor:
        """Return this rank's part of a whole tensor along the last dim, the reverse of `gather`."""
        return pair(lambda x: self._own(x, counts), lambda x: self._concatenated(x, counts))(tensor)

    def reduced(self, tensor: tf.Tensor, op: ReduceOp = ReduceOp.SUM) -> tf.Tensor:
        """Return the sum over all ranks, or another reduction, without a gradient."""

        def run(given: Any) -> list[Array]:
            source = np.ascontiguousarray(given)
            target = empty_array(source.shape, source.dtype)
            self.communicator.allreduce(buffer_of_array(source), buffer_of_array(target), op=op).wait()
            return [target]

        [result] = host_node(run, [tensor], [tf.TensorSpec(tensor.shape, tensor.dtype)], name=_NAME)
        return result

    def _concatenated(self, tensor: tf.Tensor, counts: Sequence[int]) -> tf.Tensor:
        def run(given: Any) -> list[Array]:
            source = np.ascontiguousarray(np.moveaxis(np.asarray(given), -1, 0))
            rows = source.size // counts[self.rank]
            target = np.empty((sum(counts), *source.shape[1:]), source.dtype)
            self.communicator.allgather(
                buffer_of_array(source), buffer_of_array(target), counts=[count * rows for count in counts]
            ).wait()
            gathered = empty_array((*source.shape[1:], sum(counts)), source.dtype)
            gathered[...] = np.moveaxis(target, 0, -1)
            return [gathered]

        shape = tensor.shape[:-1].concatenate(sum(counts))
        [whole] = host_node(run, [tensor], [tf.TensorSpec(shape, tensor.dtype)], name=_NAME)
        return whole

    def _own(self, tensor: tf.Tensor, counts: Sequence[int]) -> tf.Tensor:
        begin = sum(counts[: self.rank])
        return tensor[..., begin : begin + counts[self.rank]]


class SequenceAxis(TensorAxis):
    """The exchanges if activations, `(batch, tokens, width)`, are cut along the sequence.

    Args:
        axis: the same ranks, for whole activations.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis
        self.rank, self.size = axis.rank, axis.size
        self._tokens: Any = None

    @property
    def communicator(self) -> Communicator:  # type: ignore[override]  # which is an attribute of other axes
        """The present one of the same ranks."""
        return self._axis.communicator

    def cut_tokens(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return this rank's tokens of a whole activation; the gradient is gathered."""
        self._tokens = tensor.shape[1] if tensor.shape[1] is not None else tf.shape(tensor)[1]
        return self._exchange(_Tokens.own, _Tokens.all, tensor)

    def gather_tokens(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return all tokens, the reverse of `cut_tokens`."""
        return self._exchange(_Tokens.all, _Tokens.own, tensor)

    def enter(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return all tokens as the input of a cut layer; the gradient is this rank's part of the sum over the ranks."""
        return self._exchange(_Tokens.all, _Tokens.summed, tensor)

    def leave(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return this rank's tokens of the sum of the partial results; the gradient is gathered."""
        return self._exchange(_Tokens.summed, _Tokens.all, tensor)

    def _exchange(self, forward: Any, backward: Any, tensor: tf.Tensor) -> tf.Tensor:
        tokens = _Tokens(self._axis, self._tokens)  # of now: another batch may come before the backward pass
        return pair(partial(forward, tokens), partial(backward, tokens))(tensor)

    def summed_gradients(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return tensors unchanged; their gradients are summed over the ranks, in one exchange for each dtype."""

        def same(*given: tf.Tensor) -> list[tf.Tensor]:
            return [tf.identity(each) for each in given]

        def summed(*gradients: Any) -> list[tf.Tensor]:
            found = [tf.convert_to_tensor(each) for each in gradients]
            for dtype in dict.fromkeys(each.dtype for each in found):
                places = [place for place, each in enumerate(found) if each.dtype == dtype]
                sizes = [found[place].shape.num_elements() for place in places]
                parts = tf.split(self.reduced(tf.concat([tf.reshape(found[i], [-1]) for i in places], 0)), sizes)
                for place, part in zip(places, parts, strict=True):
                    found[place] = tf.reshape(part, found[place].shape)
            return found

        return pair_of_groups(same, summed)(values) if values else []


class _Tokens:
    """Exchanges of activations of one length.

    Args:
        axis: the ranks.
        total: tokens of the whole sequence, a number or a scalar tensor.
    """

    def __init__(self, axis: TensorAxis, total: Any) -> None:
        self._axis, self._total = axis, total
        self._rank, self._size = axis.rank, axis.size

    def all(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tokens of all ranks."""

        def run(given: Any, total: Any) -> list[Array]:
            source = np.ascontiguousarray(np.swapaxes(given, 0, 1))
            target = np.empty((int(total), *source.shape[1:]), source.dtype)
            self._axis.communicator.allgather(
                buffer_of_array(source), buffer_of_array(target), counts=self._counts(target)
            ).wait()
            return [_turned(target)]

        return self._node(run, tensor, self._total)

    def summed(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return this rank's tokens of the sum over all ranks."""

        def run(given: Any, total: Any) -> list[Array]:
            source = np.ascontiguousarray(np.swapaxes(given, 0, 1))
            target = np.empty((self._split_counts(int(total))[self._rank], *source.shape[1:]), source.dtype)
            self._axis.communicator.reducescatter(
                buffer_of_array(source), buffer_of_array(target), counts=self._counts(source)
            ).wait()
            return [_turned(target)]

        return self._node(run, tensor, self._own_count)

    def own(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return this rank's part of the tokens."""
        each, more = self._total // self._size, self._total % self._size
        begin = self._rank * each + tf.minimum(self._rank, more)
        part = tensor[:, begin : begin + each + tf.cast(self._rank < more, tf.int32)]
        return self._shaped(part, tensor, self._own_count)

    def _node(self, run: Callable[..., list[Array]], tensor: tf.Tensor, tokens: Any) -> tf.Tensor:
        specs = [tf.TensorSpec((tensor.shape[0], None, tensor.shape[2]), tensor.dtype)]
        [result] = host_node(run, [tensor, tf.convert_to_tensor(self._total, tf.int32)], specs, name=_NAME)
        return self._shaped(result, tensor, tokens)

    def _shaped(self, result: tf.Tensor, tensor: tf.Tensor, tokens: Any) -> tf.Tensor:
        result.set_shape((tensor.shape[0], tokens if isinstance(tokens, int) else None, tensor.shape[2]))
        return result

    def _counts(self, rows: Array) -> list[int]:
        """Return the elements of each rank, of all rows."""
        row = int(np.prod(rows.shape[1:]))
        return [count * row for count in self._split_counts(len(rows))]

    def _split_counts(self, total: int) -> tuple[int, ...]:
        return split_counts(total, self._size, what="tokens of a sequence")

    @property
    def _own_count(self) -> int | None:
        """This rank's number of tokens, if it is known."""
        return self._split_counts(self._total)[self._rank] if isinstance(self._total, int) else None


def _turned(rows: Array) -> Array:
    """Return an array with its first two dims swapped, in memory that TensorFlow can use."""
    turned = empty_array((rows.shape[1], rows.shape[0], *rows.shape[2:]), rows.dtype)
    turned[...] = np.swapaxes(rows, 0, 1)
    return turned
