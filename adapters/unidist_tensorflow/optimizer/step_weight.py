"""The weight of this rank's loss in a call of `TrainStep`: with it the mean over the ranks is that of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from unidist.training.mean_loss import SampleWeight
from unidist_keras.losses.divisor import LossDivisor
from unidist_tensorflow.optimizer.binding import Binding


class StepWeight:
    """Weights the losses of steps. Collective, when it is made and whenever it is used.

    Args:
        loss_fn: the script's.
        binding: of the optimizer.
        in_graph: a graph computes the loss of a whole batch; False: the weight is the number of samples, by which a
            strategy that runs the passes takes means.

    Attributes:
        loss_fn: to compute the loss with in place of the script's: it notes by what the loss is divided.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Any], binding: Binding, *, in_graph: bool) -> None:
        self._plain, self._binding, self._in_graph = loss_fn, binding, in_graph
        self.loss_fn = self._noting if in_graph else loss_fn
        with tf.device("CPU:0"):  # which compiled functions read and write
            self._samples, self._divisor, self._weight = (
                tf.Variable(tf.constant(1.0, tf.float64), trainable=False) for _ in range(3)
            )

    @contextmanager
    def weighting(self, weight: SampleWeight, samples: int) -> Iterator[None]:
        """Weight the loss of the training step in this block. Collective.

        Args:
            weight: of the loss; its factor is known after the block.
            samples: of this rank.
        """
        if not self._in_graph:
            self._weight.assign(weight.factor())
            with self._binding.weighting_loss(self._weight):
                yield
            return
        self._samples.assign(samples)
        with self._binding.weighting_by(self._weight_in_graph):
            yield
        weight.take(float(self._weight))

    def evaluated(self, compute: Callable[[], tf.Tensor], samples: int) -> tuple[tf.Tensor, float]:
        """Return a loss without an update, and by what it is divided."""
        self._samples.assign(samples)
        loss = compute()
        return loss, float(self._divisor) if self._in_graph else samples

    def _noting(self, targets: Any, outputs: Any) -> Any:
        divisor = LossDivisor(self._plain)
        loss = divisor.noting(self._plain, targets, outputs)
        self._binding.warn_once(divisor.problem)
        self._divisor.assign(self._samples if divisor.value is None else tf.cast(divisor.value, tf.float64))
        return loss

    def _weight_in_graph(self) -> Any:
        return self._weight.assign(self._binding.weight_of(self._divisor.read_value()))
