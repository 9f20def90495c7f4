"""`TrainStep`: one call that trains a Keras model on a batch, the same with every strategy."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from typing_extensions import override

from unidist.runtime import context
from unidist.strategy.plan import StrategyLike
from unidist.training.mean_loss import SampleWeight
from unidist_keras.train_step import KerasStep
from unidist_tensorflow.optimizer.step_weight import StepWeight
from unidist_tensorflow.training.distributed_optimizer import KerasDistribution, build_on_all_ranks
from unidist_tensorflow.training.step_runner import LossFunction, StepRunner, WholeStepRunner, structure_of
from unidist_tensorflow.training.verification import before_step


class TrainStep(KerasStep):
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
        super().__init__(model, optimizer, loss_fn, strategy, KerasDistribution)
        runtime = context.current()
        exchanges = runtime.topology.world_size > 1 or runtime.is_elastic
        in_graph = self._make_runner is None and exchanges
        self._weight = StepWeight(loss_fn, self.optimizer._unidist, in_graph=in_graph)
        make: Any = self._make_runner or WholeStepRunner
        runner: StepRunner = make(self.model, self._weight.loss_fn, self.optimizer)
        self._runner_of = lambda: runner

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
        return self._train(inputs, targets)

    # See `PlannedStep`

    @override
    def _prepared(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        batch = structure_of(batch)
        build_on_all_ranks(self.model, self.optimizer, batch[0])
        return batch

    @override
    def _check_first(self, batch: tuple[Any, ...]) -> None:
        inputs, targets = batch
        before_step(
            self.model,
            lambda: (self._runner_of().predict(inputs), self._runner_of().evaluate(inputs, targets)),
            inputs,
            lambda outputs: tf.reduce_mean(self._loss_fn(targets, outputs)),
        )

    @override
    def _run_batch(self, batch: tuple[Any, ...], weight: SampleWeight | None) -> tf.Tensor:
        if weight is None:
            return self._runner_of().run(*batch)
        with self._weight.weighting(weight, self._num_samples(batch)):
            loss = self._runner_of().run(*batch)
        loss = self.optimizer._unidist.after_step(self.model, (), loss)
        factor = weight.factor()
        return loss if factor == 1.0 else factor * loss

    @override
    def _evaluate_batch(self, batch: tuple[Any, ...]) -> tf.Tensor:
        evaluate = functools.partial(self._runner_of().evaluate, *batch)
        loss, self._counted = self._weight.evaluated(evaluate, self._num_samples(batch))
        return loss
