"""The weight of this rank's loss in a call of `TrainStep`: with it the mean over the ranks is that of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from unidist.training.mean_loss import SampleWeight
from unidist_keras.losses.divisor import LossDivisor
from unidist_tensorflow.gradients.tensors import HostFunction, host_node
from unidist_tensorflow.memory import Array
from unidist_tensorflow.optimizer.binding import Binding

_SCALE = tf.TensorSpec([], tf.float64)
_OF_SAMPLES = float("nan")
"""Stands for a divisor that is the number of samples."""


class StepWeight:
    """Weights the losses of steps. Collective, when it is made and whenever it is used.

    Args:
        loss_fn: the script's.
        binding: of the optimizer.
        in_graph: a graph computes the loss of a whole batch and asks for its weight meanwhile; False: the weight is
            known before.
        given: the script's function of the targets that returns by what the loss is divided; None: it is found.
        in_parts: a strategy runs the passes, and takes the mean over the samples of micro-batches.

    Attributes:
        loss_fn: to compute the loss with in place of the script's.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Any],
        binding: Binding,
        *,
        in_graph: bool,
        given: Callable[[Any], Any] | None,
        in_parts: bool,
    ) -> None:
        self._plain, self._binding, self._in_graph, self._given = loss_fn, binding, in_graph, given
        self._in_parts = in_parts and given is not None
        noting = self._noting if in_graph else loss_fn
        self.loss_fn: Callable[[Any, Any], Any] = noting if given is None else self._of_given
        self._weight: SampleWeight | None = None
        self._host_functions: list[HostFunction] = []
        with tf.device("CPU:0"):  # which compiled functions read and write
            self._divisor, self._factor, self._samples_per_weight = (
                tf.Variable(tf.constant(1.0, tf.float64), trainable=False) for _ in range(3)
            )

    @contextmanager
    def weighting(self, weight: SampleWeight, samples: int) -> Iterator[None]:
        """Weight the loss of the training step in this block; afterwards the factor of `weight` is known. Collective.

        Args:
            weight: of the loss.
            samples: of this rank.
        """
        if self._in_graph:
            self._weight = weight
            with self._binding.weighting_by(self._factor_in_graph):
                yield
            self._weight = None
            return
        self._divide(weight, samples)
        self._factor.assign(weight.factor())
        with self._binding.weighting_loss(self._factor):
            yield

    def evaluated(
        self, compute: Callable[[], tf.Tensor], weight: SampleWeight | None, samples: int
    ) -> tuple[tf.Tensor, float]:
        """Return a loss without an update, and by what it is divided.

        Args:
            compute: returns the loss.
            weight: of this rank's loss; None: it is found.
            samples: of this rank.
        """
        if weight is not None:
            self._divide(weight, samples)
            return compute(), weight.samples
        self._divisor.assign(_OF_SAMPLES)
        loss, divisor = compute(), float(self._divisor)
        return loss, samples if np.isnan(divisor) else divisor

    def _divide(self, weight: SampleWeight, samples: int) -> None:
        if self._in_parts:
            self._samples_per_weight.assign(samples / (weight.samples or 1.0))

    def _noting(self, targets: Any, outputs: Any) -> Any:
        divisor = LossDivisor(self._plain)
        loss = divisor.noting(self._plain, targets, outputs)
        self._binding.warn_once(divisor.problem)
        self._divisor.assign(_OF_SAMPLES if divisor.value is None else tf.cast(divisor.value, tf.float64))
        return loss

    def _of_given(self, targets: Any, outputs: Any) -> Any:
        """Return the loss of a batch or a micro-batch; without a call of the loss function if nothing counts."""
        assert self._given is not None
        number = tf.reshape(tf.cast(self._given(targets), tf.float64), [])
        self._divisor.assign(number)

        def compute() -> Any:
            return tf.reduce_mean(self._plain(targets, outputs))

        def nothing() -> Any:
            leaves = [each for each in tf.nest.flatten(outputs) if each.dtype.is_floating]
            return tf.add_n([tf.reduce_sum(each * 0) for each in leaves])

        loss = tf.cond(number > 0, compute, nothing)
        if not self._in_parts:
            return loss
        first = tf.nest.flatten(targets)[0]
        samples = tf.cast(tf.shape(first)[0], tf.float64)
        return loss * tf.cast(number / samples * self._samples_per_weight, loss.dtype)

    def _factor_in_graph(self) -> Any:
        def exchange(own: Array) -> list[Array]:
            assert self._weight is not None
            if self._given is not None or not np.isnan(own):
                self._weight.count(float(own))
            return [np.asarray(self._weight.factor(), np.float64)]

        name = "unidist_samples_of_a_step"
        return host_node(exchange, [self._divisor.read_value()], [_SCALE], name=name, keeper=self._host_functions)[0]
