"""A Keras train step on this rank's share of a global batch, in micro-batches; the mean is over all ranks' samples.

The number of micro-batches is known when the graph runs: it is a loop in the graph, and ranks that join or leave do not
make TensorFlow trace it again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from unidist_tensorflow.elastic.data import ElasticDataset
from unidist_tensorflow.gradients.tensors import host_node
from unidist_tensorflow.memory import Array


class PiecewiseTrainStep:
    """Replaces `model.train_step`.

    Args:
        model: whose `train_step` takes each micro-batch; it scales its loss by the optimizer's `scale_loss`, as
            Keras' does.
        optimizer: bound; updates after the last micro-batch.
        data: the batches that were taken.
        together: ranks can compute only together, so one without samples computes with a sample that has no weight.
    """

    def __init__(self, model: Any, optimizer: Any, data: ElasticDataset, *, together: bool) -> None:
        self._plain = model.train_step
        self._model, self._optimizer, self._data = model, optimizer, data
        self._together = together

    def __call__(self, data: Any) -> Any:
        """Train on one batch; returns the logs of its last micro-batch, which Keras' metrics accumulate."""
        self._optimizer._unidist.takes_pieces()
        specs = [tf.TensorSpec([None, 2], tf.int64), tf.TensorSpec([None], tf.float64)]
        bounds, weights = host_node(self._begin, [], specs, name="unidist_pieces_of_a_batch")
        if tf.executing_eagerly():
            logs = None
            for bound, weight in zip(bounds, weights, strict=True):
                logs = self._eager_piece(data, bound, weight, logs)
            return self._model.get_metrics_result() if logs is None else logs
        return self._in_graph(data, bounds, weights)

    def _begin(self) -> list[Array]:
        """Return the bounds of the micro-batches, `(pieces, 2)`, and their weights, 0 for one without samples."""
        share = self._data.next_share()
        assert self._data.batch_size is not None, "given"
        pieces = share.pieces(self._data.batch_size)
        self._optimizer._unidist.accumulate_steps(len(pieces))
        weights = [share.weight(stop - start) for start, stop in pieces]
        bounds = [(start, stop) if stop > start else (0, 1) for start, stop in pieces]
        return [np.array(bounds, np.int64), np.array(weights, np.float64)]

    def _eager_piece(self, data: Any, bound: tf.Tensor, weight: tf.Tensor, logs: Any) -> Any:
        if self._together or weight > 0:
            return self._train(data, bound, weight)
        self._apply_nothing()
        return logs

    def _in_graph(self, data: Any, bounds: tf.Tensor, weights: tf.Tensor) -> Any:
        none = tf.experimental.Optional.empty(None)  # of logs, whose structure is known when a micro-batch is traced

        def piece(i: tf.Tensor, logs: Any) -> Any:
            def train() -> Any:
                found = tf.experimental.Optional.from_value(self._train(data, bounds[i], weights[i]))
                none._element_spec = found.element_spec
                return found

            def pass_by() -> Any:
                self._apply_nothing()
                logs._element_spec = none.element_spec
                return logs

            return i + 1, train() if self._together else tf.cond(weights[i] > 0, train, pass_by)

        count = tf.shape(weights)[0]
        start = (tf.constant(0), none)
        _, logs = tf.while_loop(lambda i, _: i < count, piece, start, parallel_iterations=1)
        logs._element_spec = none.element_spec

        def nothing() -> Any:
            return tf.nest.map_structure(lambda each: tf.zeros(each.shape, each.dtype), none.element_spec)

        return tf.cond(logs.has_value(), logs.get_value, nothing)

    def _train(self, data: Any, bound: tf.Tensor, weight: tf.Tensor) -> Any:
        with self._optimizer._unidist.weighting_loss(weight):
            return self._plain(tf.nest.map_structure(lambda each: each[bound[0] : bound[1]], data))

    def _apply_nothing(self) -> None:
        variables = self._model.trainable_variables
        self._optimizer.apply([None] * len(variables), variables)
