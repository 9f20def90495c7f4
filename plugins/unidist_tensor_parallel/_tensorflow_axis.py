"""Megatron's conjugate functions on tensors of TensorFlow: what goes over the axis `tensor` in a pass, and back.

Each is a node of the host, eager or in a graph. TensorFlow runs such nodes in program order, which is the same on every
rank, in the backward pass too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from unidist.communicator import Communicator
from unidist_tensorflow.memory import Array, buffer_of_array, empty_array
from unidist_tensorflow.training_tensors import host_node

_NAME = "unidist_tensor_parallel_exchange_which_needs_jit_compile_False"


class TensorAxis:
    """The exchanges of one model's cut layers.

    Args:
        communicator: along the axis; nothing else uses it.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size

    def enter(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a whole tensor as the input of a cut layer: unchanged; its gradients of all ranks are added up."""
        return _differentiable(tf.identity, self._sum)(tensor)

    def leave(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the sum of the partial results of all ranks; its gradient is every rank's."""
        return _differentiable(self._sum, tf.identity)(tensor)

    def gather(self, tensor: tf.Tensor, counts: Sequence[int]) -> tf.Tensor:
        """Return the parts of all ranks side by side along the last dim; of the gradient each takes its part.

        Args:
            tensor: `(..., counts[rank])` elements.
            counts: of the last dim on each rank.
        """
        return _differentiable(lambda x: self._concatenated(x, counts), lambda x: self._own(x, counts))(tensor)

    def take(self, tensor: tf.Tensor, counts: Sequence[int]) -> tf.Tensor:
        """Return this rank's part of a whole tensor along the last dim, the reverse of `gather`."""
        return _differentiable(lambda x: self._own(x, counts), lambda x: self._concatenated(x, counts))(tensor)

    def _sum(self, tensor: tf.Tensor) -> tf.Tensor:
        def run(given: Any) -> list[Array]:
            source = np.ascontiguousarray(given)
            target = empty_array(source.shape, source.dtype)
            self._communicator.allreduce(buffer_of_array(source), buffer_of_array(target)).wait()
            return [target]

        [summed] = host_node(run, [tensor], [tf.TensorSpec(tensor.shape, tensor.dtype)], name=_NAME)
        return summed

    def _concatenated(self, tensor: tf.Tensor, counts: Sequence[int]) -> tf.Tensor:
        def run(given: Any) -> list[Array]:
            source = np.ascontiguousarray(np.moveaxis(np.asarray(given), -1, 0))
            rows = source.size // counts[self.rank]
            target = np.empty((sum(counts), *source.shape[1:]), source.dtype)
            self._communicator.allgather(
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


def _differentiable(
    forward: Callable[[tf.Tensor], tf.Tensor], backward: Callable[[tf.Tensor], tf.Tensor]
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function whose gradient is another function of the gradient of its result."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def function(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return forward(tensor), backward

    def call(tensor: tf.Tensor) -> tf.Tensor:
        return function(tf.convert_to_tensor(tensor))

    return call
