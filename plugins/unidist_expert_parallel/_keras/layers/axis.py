"""Exchanges of a divided layer on TensorFlow tensors, each a node of the host, eager or in a graph.

TensorFlow runs such nodes in program order, which is the same on every rank, in the backward pass too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from unidist.mesh import REPLICA_AXES
from unidist.runtime import context
from unidist_expert_parallel.layout.owners import AXIS
from unidist_tensorflow.gradients import host_node, pair
from unidist_tensorflow.memory import Array, buffer_of_array, empty_array

if TYPE_CHECKING:
    from unidist.communicator import Communicator
    from unidist.runtime_api import RuntimeAPI

_NAME = "unidist_expert_parallel_exchange_which_needs_jit_compile_False"


class Replicas:
    """The replicas of a model, for the statistics of its routers. Creation is collective.

    Args:
        context: the runtime.

    Attributes:
        replica: of this rank among all that train on different tokens.
        num_replicas: number of those.
    """

    def __init__(self, context: RuntimeAPI) -> None:
        self._replicas: Communicator = context.new_communicator(REPLICA_AXES)
        self.replica, self.num_replicas = self._replicas.rank, self._replicas.size

    def gathered_counts(self, counts: tf.Tensor) -> tf.Tensor:
        """Return the counts of all replicas, `(num_replicas, *counts.shape)`, int64."""

        def run(given: Any) -> list[Array]:
            source = np.ascontiguousarray(given)
            target = empty_array((self.num_replicas, *source.shape), source.dtype)
            sizes = [source.size] * self.num_replicas
            self._replicas.allgather(buffer_of_array(source), buffer_of_array(target), counts=sizes).wait()
            return [target]

        spec = tf.TensorSpec((self.num_replicas, *counts.shape), tf.int64)
        [found] = host_node(run, [counts], [spec], name=_NAME)
        return found

    def total(self, values: tf.Tensor) -> tf.Tensor:
        """Return the sum over all replicas; the gradient is that of all replicas' losses, which depend on the sum."""
        return pair(self._summed, self._summed)(values)

    def _summed(self, values: tf.Tensor) -> tf.Tensor:
        def run(given: Any) -> list[Array]:
            source = np.ascontiguousarray(given)
            target = empty_array(source.shape, source.dtype)
            self._replicas.allreduce(buffer_of_array(source), buffer_of_array(target)).wait()
            return [target]

        [found] = host_node(run, [values], [tf.TensorSpec(values.shape, values.dtype)], name=_NAME)
        return found

    def close(self) -> None:
        """See `unidist.runtime_api.Owned`: the runtime closes the communicators."""


class ExpertAxis(Replicas):
    """The ranks that divide the experts of a model, and all replicas of what is not divided. Creation is collective.

    Args:
        context: the runtime.

    Attributes:
        rank: of this rank on the axis.
        size: ranks on the axis.
    """

    def __init__(self, context: RuntimeAPI) -> None:
        self._experts: Communicator = context.new_communicator(AXIS)
        super().__init__(context)
        self.rank, self.size = self._experts.rank, self._experts.size

    def exchange_counts(self, counts: tf.Tensor) -> tf.Tensor:
        """Send each rank its part of `counts`, int64, and return what the ranks have sent here, in rank order."""

        def run(given: Any) -> list[Array]:
            source = np.ascontiguousarray(given)
            target = empty_array(source.shape, source.dtype)
            split = [len(source) // self.size] * self.size
            self._experts.alltoall(
                buffer_of_array(source), buffer_of_array(target), send_counts=split, receive_counts=split
            ).wait()
            return [target]

        [found] = host_node(run, [counts], [tf.TensorSpec(counts.shape, tf.int64)], name=_NAME)
        return found

    def exchange(self, rows: tf.Tensor, sent: tf.Tensor, received: tf.Tensor) -> tf.Tensor:
        """Send each rank its rows, and return those from all ranks, in rank order; differentiable.

        Args:
            rows: `(rows, width)`, those for the first rank first.
            sent: number of rows, int64; as many numbers for each rank, which are added up.
            received: number of rows from the ranks, likewise.
        """
        return pair(
            lambda value: self._moved(value, sent, received), lambda gradient: self._moved(gradient, received, sent)
        )(rows)

    def _moved(self, rows: tf.Tensor, sent: tf.Tensor, received: tf.Tensor) -> tf.Tensor:
        def run(given: Any, out: Any, back: Any) -> list[Array]:
            source = np.ascontiguousarray(given)
            width = source.shape[1]
            send = np.asarray(out).reshape(self.size, -1).sum(1) * width
            receive = np.asarray(back).reshape(self.size, -1).sum(1) * width
            target = empty_array((int(receive.sum()) // width, width), source.dtype)
            self._experts.alltoall(
                buffer_of_array(source),
                buffer_of_array(target),
                send_counts=send.tolist(),
                receive_counts=receive.tolist(),
            ).wait()
            return [target]

        spec = tf.TensorSpec((None, rows.shape[1]), rows.dtype)
        [found] = host_node(run, [rows, sent, received], [spec], name=_NAME)
        return found


def replicas_in_training() -> Replicas | None:
    """Return the replicas that a training by `distribute` or `TrainStep` averages over; None in any other process."""
    if not context.is_initialized():
        return None
    runtime = context.current()
    if not runtime.has_strategies or runtime.axis_size(REPLICA_AXES) == 1:
        return None
    return runtime.owned(Replicas)


def rows_at(rows: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Return the rows at places, some maybe several times, as `tf.gather`; the gradient is a dense tensor."""

    def backward(gradient: tf.Tensor) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(gradient, places, tf.shape(rows)[0])

    return pair(lambda value: tf.gather(value, places), backward)(rows)
