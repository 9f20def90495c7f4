"""Runners of the passes of a training step: the interface, and the usual one, a `tf.function` of the whole step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from typing_extensions import override

from unidist.errors import UnidistError
from unidist_tensorflow.operations import graph
from unidist_tensorflow.operations.errors import as_op_errors

LossFunction = Callable[[Any, Any], Any]
"""What `TrainStep` takes, Keras' order: targets and the model's outputs to the loss, of which the mean is taken."""


class StepRunner(ABC):
    """Trains a model on this rank's batches. Its methods are collective.

    A strategy with the capability `RunsSteps` brings one: its `step_runner` returns a function that takes

        make(model, loss_fn, optimizer) -> StepRunner

    with the model that its `partition` returned and the bound optimizer; `loss_fn` is None where the model is to be
    compiled with one (`prepare_fit`).
    """

    @abstractmethod
    def run(self, inputs: Any, targets: Any) -> tf.Tensor:
        """Compute the loss and the gradients of this rank's variables, and give them to the optimizer (`apply`).

        Args:
            inputs: for the model: a tensor, or a list, tuple or dict of them, as the model takes it.
            targets: for the loss function.

        Returns:
            The loss of this rank's batch, losses that layers add among it; equal on all ranks along the model's axes.
        """

    @abstractmethod
    def evaluate(self, inputs: Any, targets: Any) -> tf.Tensor:
        """Return the loss of this rank's batch as in inference, without gradients; equal on ranks as `run`'s is."""

    @abstractmethod
    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs as in inference; on every rank along the model's axes."""

    @abstractmethod
    def prepare_fit(self) -> None:
        """Let `fit`, `evaluate`, `predict` and `train_on_batch` of the model, which is compiled later, run by this."""


class WholeStepRunner(StepRunner):
    """The usual runner: the model as it is, whole on this rank.

    Args:
        model: this rank's.
        loss_fn: see `LossFunction`.
        optimizer: the bound one.
    """

    def __init__(self, model: Any, loss_fn: LossFunction, optimizer: Any) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        # As Keras does in `fit`: autograph would also rewrite what binds the optimizer.
        self._run = tf.function(self._train, autograph=False)
        self._evaluate = tf.function(self._loss, autograph=False)
        self._compute = tf.function(self._gradients, autograph=False)

    @override
    def run(self, inputs: Any, targets: Any) -> tf.Tensor:
        with failures_as_they_were():
            return self._run(inputs, targets)

    @override
    def evaluate(self, inputs: Any, targets: Any) -> tf.Tensor:
        with failures_as_they_were():
            return self._evaluate(inputs, targets, training=False)

    @override
    def predict(self, inputs: Any) -> Any:
        return self._model(inputs, training=False)

    @override
    def prepare_fit(self) -> None:
        """Do nothing: `distribute` prepares `fit` of a model that is whole."""

    def compute(self, inputs: Any, targets: Any) -> tuple[tf.Tensor, list[tf.Tensor | None]]:
        """Return the loss of a batch in training, and this rank's gradient of each trainable variable."""
        with failures_as_they_were():
            loss, gradients = self._compute(inputs, targets)
            return loss, [None if each is None else tf.convert_to_tensor(each) for each in gradients]

    def _gradients(self, inputs: Any, targets: Any) -> tuple[tf.Tensor, list[Any]]:
        with tf.GradientTape() as tape:
            loss = self._loss(inputs, targets, training=True)
        return loss, tape.gradient(loss, self._model.trainable_variables)

    def _train(self, inputs: Any, targets: Any) -> tf.Tensor:
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            loss = self._loss(inputs, targets, training=True)
            scaled = self._optimizer.scale_loss(loss)
        self._optimizer.apply(tape.gradient(scaled, variables), variables)
        return loss

    def _loss(self, inputs: Any, targets: Any, training: bool) -> tf.Tensor:
        loss = tf.reduce_mean(self._loss_fn(targets, self._model(inputs, training=training)))
        return tf.add_n([loss, *(tf.cast(added, loss.dtype) for added in self._model.losses)])


@contextmanager
def failures_as_they_were() -> Iterator[None]:
    """Raise unidist's original error of a node; TensorFlow passes on only its text, within that of the graph."""
    graph.take_failure()
    try:
        yield
    except tf.errors.OpError as error:
        failure = graph.take_failure()
        if not isinstance(failure, UnidistError) or isinstance(error, UnidistError):
            raise
        with as_op_errors():
            raise failure from None


def structure_of(value: Any) -> Any:
    """Return lists, tuples and mappings of tensors with everything else turned into tensors; None stays None."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: structure_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(structure_of(item) for item in value)
    return tf.convert_to_tensor(value)
