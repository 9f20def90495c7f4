"""`TrainStep`: one call that trains a Keras model on a batch, the same with every strategy."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from unidist.runtime import context
from unidist.strategy.interface import GradientOwner, OwnsParameters, RunsSteps
from unidist.strategy.plan import StrategyLike
from unidist.training.mean_loss import MeanLoss
from unidist.waits import calling
from unidist_keras.loss_weight import divisor_of_loss
from unidist_tensorflow.framework import TensorFlowFramework
from unidist_tensorflow.training.distributed_optimizer import bind_model, build_on_all_ranks
from unidist_tensorflow.training.step_runner import LossFunction, StepRunner, WholeStepRunner, structure_of
from unidist_tensorflow.training.verification import before_step


class TrainStep:
    """Forward, backward, exchange and update in one call, which is the same with every strategy.

        step = ud.TrainStep(model, keras.optimizers.Adam(), keras.losses.MeanSquaredError())
        for x, y in ud.shard(dataset, batch_size=32):
            loss = step(x, y)

    For custom training loops; `model.fit` needs `distribute` only. Gives all ranks rank 0's weights. Collective, and so
    is every call of its methods. The step is compiled as a `tf.function`.

    Args:
        model: of Keras 3, built in the same way on every rank, or not at all if no strategy divides it.
        optimizer: of Keras 3, not distributed.
        loss_fn: takes targets and outputs, as Keras' losses do; the mean of what it returns is the loss, to which those
            that layers add (regularisation) are added.
        strategy: a strategy line ("pipeline=2,zero=1"), strategy objects, or a list of both; default: the command
            line's (`unidist launch --strategy`), else plain data parallelism.

    Attributes:
        model: as this rank holds it.
        optimizer: the bound optimizer.

    Raises:
        ConfigurationError: the strategies do not fit the world, each other or the model.
        NotInitializedError: `init()` was not called.
    """

    def __init__(self, model: Any, optimizer: Any, loss_fn: LossFunction, strategy: StrategyLike = None) -> None:
        runtime = context.current()
        plan = runtime.plan_for(strategy)
        runs = plan.find(RunsSteps)
        make: Any = WholeStepRunner if runs is None else runs.step_runner(TensorFlowFramework(), context.current())
        self.model, self.optimizer = bind_model(model, optimizer, plan)
        self._runner: StepRunner = make(self.model, loss_fn, self.optimizer)
        self._loss_fn = loss_fn
        runtime.owned(MeanLoss)  # collective
        self._owner = plan.find(OwnsParameters)
        self._steps_alone = plan.the(GradientOwner).steps_alone
        with tf.device("CPU:0"):
            self._weight = tf.Variable(tf.constant(1.0, tf.float64), trainable=False)  # which compiled functions read

    @calling("train_step()")
    def __call__(self, inputs: Any, targets: Any) -> tf.Tensor:
        """Train on one batch.

        With `accumulate=N` every N-th call updates the weights.

        Args:
            inputs: this rank's share of the batch along the data axis, the same on all ranks along the others: a tensor
                or array, or a list, tuple or dict of them, as the model takes it.
            targets: likewise, for the loss function.

        Returns:
            The mean loss over the samples of all ranks, a scalar, equal on every rank. If ranks step alone
            (local_sgd, parameter_server=async), that of this rank's batch. Where ranks have different numbers of
            samples, losses and gradients weigh as much as there are samples.

        Raises:
            PeerLostError: a rank has died or could not go on; names it.
        """
        inputs, targets = structure_of(inputs), structure_of(targets)
        build_on_all_ranks(self.model, self.optimizer, inputs)
        before_step(
            self.model,
            lambda: (self._runner.predict(inputs), self._runner.evaluate(inputs, targets)),
            inputs,
            lambda outputs: tf.reduce_mean(self._loss_fn(targets, outputs)),
        )
        loss = self._runner.run(inputs, targets) if self._steps_alone else self._weighted_step(inputs, targets)
        context.current().progress.report({"loss": loss}, _num_samples(inputs))
        return loss

    @calling("train_step.evaluate()")
    def evaluate(self, inputs: Any, targets: Any) -> tf.Tensor:
        """Return the mean loss of a batch as in inference; arguments as for a call. Changes nothing."""
        inputs, targets = structure_of(inputs), structure_of(targets)
        build_on_all_ranks(self.model, self.optimizer, inputs)
        if self._owner is not None:
            self._owner.pull()
        weight = self._weight_of(inputs)
        return self._mean(self._runner.evaluate(inputs, targets), weight)

    @calling("train_step.predict()")
    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs for this rank's inputs as in inference, on every rank along the model's axes."""
        inputs = structure_of(inputs)
        build_on_all_ranks(self.model, self.optimizer, inputs)
        return self._runner.predict(inputs)

    def _weighted_step(self, inputs: Any, targets: Any) -> tf.Tensor:
        """Train on a batch, each sample of all ranks with the same weight; return their mean loss."""
        weight = self._weight_of(inputs)
        self._weight.assign(weight)
        with self.optimizer._unidist.weighting_loss(self._weight):
            loss = self._runner.run(inputs, targets)
        return self._mean(loss, weight)

    def _weight_of(self, inputs: Any) -> float:
        """Return the weight of this rank's loss. Collective."""
        return context.current().owned(MeanLoss).weight_of(divisor_of_loss(self._loss_fn, _num_samples(inputs)))

    def _mean(self, loss: tf.Tensor, weight: float) -> tf.Tensor:
        return tf.constant(context.current().owned(MeanLoss).of_all(weight * float(loss)), loss.dtype)


def _num_samples(inputs: Any) -> int:
    shapes = [tensor.shape for tensor in tf.nest.flatten(inputs) if tensor is not None and tensor.shape.rank]
    return int(shapes[0][0]) if shapes else 0
