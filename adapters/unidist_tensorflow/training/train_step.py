"""`TrainStep`: one call that trains a Keras model on a batch, the same with every strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
        weight: takes the targets, and returns by what the loss of this batch is divided, a number or a tensor with one
            element: `lambda y: tf.math.count_nonzero(y != -1)`. It is compiled. Then losses and gradients are those of
            sum(losses) / sum(weights) over all ranks, micro-batches of a pipeline, and passes of an update
            (`accumulate=N`); so is `evaluate`. 0: nothing counts, as in a batch of padding, and the loss does not
            matter; if so on all ranks, it is 0 and the gradients are zeros. Default: what Keras divides the loss by
            (the samples, or what masks and `ignore_class` let count), and each pass and each micro-batch counts the
            same.

    Attributes:
        model: as this rank holds it.
        optimizer: the bound optimizer.

    Raises:
        ConfigurationError: the strategies do not fit the world, each other or the model.
        NotInitializedError: `init()` was not called.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss_fn: LossFunction,
        strategy: StrategyLike = None,
        *,
        weight: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(model, optimizer, loss_fn, strategy, KerasDistribution, weight)
        runtime = context.current()
        exchanges = runtime.topology.world_size > 1 or runtime.is_elastic
        in_graph = self._make_runner is None and exchanges
        in_parts = self._make_runner is not None
        self._weight = StepWeight(loss_fn, self.optimizer._unidist, in_graph=in_graph, given=weight, in_parts=in_parts)
        make: Any = self._make_runner or WholeStepRunner
        runner: StepRunner = make(self.model, self._weight.loss_fn, self.optimizer)
        self._runner_of = lambda: runner
        self._unweighted = WholeStepRunner(self.model, loss_fn, self.optimizer)

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

        def loss_of(outputs: Any) -> tf.Tensor:
            loss = tf.reduce_mean(self._loss_fn(targets, outputs))
            counted = 1.0 if self._given_weight is None else self._samples_of(batch)
            return loss if (counted() if callable(counted) else counted) else tf.zeros_like(loss)

        before_step(self.model, lambda: (self._runner_of().predict(inputs), self._evaluated(batch)[0]), inputs, loss_of)

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
    def _computed(self, batch: tuple[Any, ...]) -> tuple[tf.Tensor, Sequence[Any]]:
        return self._unweighted.compute(*batch)

    @override
    def _evaluate_batch(self, batch: tuple[Any, ...]) -> tf.Tensor:
        loss, self._counted = self._evaluated(batch)
        return loss

    def _evaluated(self, batch: tuple[Any, ...]) -> tuple[tf.Tensor, float]:
        evaluate = functools.partial(self._runner_of().evaluate, *batch)
        weight = None
        if self._given_weight is not None:
            weight = SampleWeight(None, self._samples_of(batch), is_given=True)
        return self._weight.evaluated(evaluate, weight, self._num_samples(batch))
