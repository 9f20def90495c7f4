"""`TrainStep`: one call that trains a Keras model on a batch, the same with every strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from typing_extensions import override

from unidist.runtime import context
from unidist.strategy.plan import StrategyLike
from unidist.training.mean_loss import SampleWeight
from unidist_jax.compiled import translated
from unidist_jax.keras.training import KerasDistribution
from unidist_keras.losses.divisor import LossDivisor
from unidist_keras.train_step import KerasStep

LossFunction = Callable[[Any, Any], Any]
"""Keras' order: targets and the model's outputs to the loss, of which the mean is taken."""


class TrainStep(KerasStep):
    """Forward, backward, exchange and update in one call, which is the same with every strategy.

        step = ud.TrainStep(model, keras.optimizers.Adam(), keras.losses.MeanSquaredError())
        for x, y in ud.shard((features, labels), batch_size=32):
            loss = step(x, y)

    For custom training loops; `model.fit` needs `distribute` only. Gives all ranks rank 0's weights. Collective, and so
    is every call of its methods. The step is compiled by `jax.jit`.

    Args:
        model: of Keras 3, built in the same way on every rank, or not at all.
        optimizer: of Keras 3, not distributed.
        loss_fn: takes targets and outputs, as Keras' losses do; the mean of what it returns is the loss, to which those
            that layers add (regularisation) are added.
        strategy: a strategy line ("zero=1,accumulate=2"), strategy objects, or a list of both; default: the command
            line's (`unidist launch --strategy`), else plain data parallelism.
        weight: takes the targets, and returns by what the loss of this batch is divided, a scalar:
            `lambda y: (y != -1).sum()`. It is compiled. Then losses and gradients are those of
            sum(losses) / sum(weights) over all ranks and passes of an update (`accumulate=N`); so is `evaluate`. 0:
            nothing counts, as in a batch of padding, and the loss does not matter; if so on all ranks, it is 0 and the
            gradients are zeros. Default: what Keras divides the loss by (the samples, or what masks and `ignore_class`
            let count), and each pass counts the same.

    Attributes:
        model: its variables have the values after the last step.
        optimizer: the bound optimizer.

    Raises:
        ConfigurationError: the strategies do not fit the world, each other, or Keras on JAX.
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
        given = None if weight is None else jax.jit(weight)
        super().__init__(model, optimizer, loss_fn, strategy, KerasDistribution, given)
        runtime = context.current()
        self._weighs = not self._plan.steps_alone and (runtime.topology.world_size > 1 or runtime.is_elastic)
        self._run = jax.jit(self._traced)
        self._evaluate = jax.jit(self._evaluated)
        self._gradients = jax.jit(self._differentiated)

    def __call__(self, inputs: Any, targets: Any) -> Any:
        """Train on one batch. With `accumulate=N` every N-th call updates the weights.

        Args:
            inputs: this rank's share of the batch: an array, or a list, tuple or dict of them, as the model takes it.
            targets: likewise, for the loss function.

        Returns:
            The mean loss over the samples of all ranks, a scalar, equal on every rank. If ranks step alone
            (local_sgd), that of this rank's batch. Where ranks have different numbers of samples, losses and gradients
            weigh as much as there are samples.

        Raises:
            PeerLostError: a rank has died or could not go on; names it.
        """
        return self._train(inputs, targets)

    # See `PlannedStep`

    @override
    def _prepared(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        if not all(layer.built for layer in self.model._flatten_layers()):
            self.model(jax.tree.map(lambda leaf: keras.KerasTensor(leaf.shape, str(leaf.dtype)), batch[0]))
        if not self.optimizer.built:
            self.optimizer.build(self.model.trainable_variables)
        return batch

    @override
    def _run_batch(self, batch: tuple[Any, ...], weight: SampleWeight | None) -> Any:
        groups = (self.model.trainable_variables, self.model.non_trainable_variables, self.optimizer.variables)
        values = [[variable.value for variable in group] for group in groups]
        known = None if self._given_weight is None or weight is None else weight.factor()
        with translated():
            loss, factor, new = self._run(values, known, *batch)
            jax.block_until_ready(loss)
        for group, found in zip(groups, new, strict=True):
            for variable, value in zip(group, found, strict=True):
                variable.assign(value)
        if weight is None:
            return loss
        if known is None:
            weight.take(float(factor))
        return loss if weight.factor() == 1.0 else weight.factor() * loss

    @override
    def _evaluate_batch(self, batch: tuple[Any, ...]) -> Any:
        groups = (self.model.trainable_variables, self.model.non_trainable_variables)
        loss, divisor = self._evaluate(*([variable.value for variable in group] for group in groups), *batch)
        self._counted = float(divisor)
        return loss

    @override
    def _computed(self, batch: tuple[Any, ...]) -> tuple[Any, Sequence[Any]]:
        groups = (self.model.trainable_variables, self.model.non_trainable_variables)
        result: tuple[Any, Sequence[Any]] = self._gradients(
            *([variable.value for variable in group] for group in groups), *batch
        )
        return result

    @override
    def _predict_batch(self, inputs: Any) -> Any:
        return self.model(inputs, training=False)

    # Compiled functions

    def _traced(self, values: Sequence[Any], factor: Any, inputs: Any, targets: Any) -> Any:
        trainable, non_trainable, state = values
        binding = self.optimizer._unidist

        def loss_of(trainable: Any) -> Any:
            trainable = binding.handing_over(self.model.trainable_variables, trainable)
            loss, divisor, new = self._loss(trainable, non_trainable, inputs, targets, training=True)
            if factor is not None:
                weight = factor
            else:
                weight = binding.weight_by(divisor, self._num_samples((inputs, targets))) if self._weighs else 1.0
            mapping = list(zip(self.optimizer.variables, state, strict=True))
            with keras.StatelessScope(state_mapping=mapping), binding.weighting_loss(weight):
                scaled = self.optimizer.scale_loss(loss)
            return scaled, (loss, weight, new)

        with binding.overlapping():
            gradients, (loss, weight, new) = jax.grad(loss_of, has_aux=True)(trainable)
            trainable, state = self.optimizer.stateless_apply(state, gradients, trainable)
        if not self._plan.steps_alone:
            new = binding.with_mean_statistics(self.model, non_trainable, new)
        return loss, weight, (trainable, new, state)

    def _differentiated(self, trainable: Any, non_trainable: Any, inputs: Any, targets: Any) -> Any:
        def loss_of(trainable: Any) -> Any:
            return self._loss(trainable, non_trainable, inputs, targets, training=True)[0]

        return jax.value_and_grad(loss_of)(trainable)

    def _evaluated(self, trainable: Any, non_trainable: Any, inputs: Any, targets: Any) -> Any:
        loss, divisor, _ = self._loss(trainable, non_trainable, inputs, targets, training=False)
        return loss, self._num_samples((inputs, targets)) if divisor.value is None else divisor.value

    def _loss(self, trainable: Any, non_trainable: Any, inputs: Any, targets: Any, *, training: bool) -> Any:
        outputs, new, losses = self.model.stateless_call(
            trainable, non_trainable, inputs, training=training, return_losses=True
        )
        if self._given_weight is None:
            divisor = LossDivisor(self._loss_fn)
            loss = jnp.mean(divisor.noting(self._loss_fn, targets, outputs))
        else:
            divisor, loss = LossDivisor(None), self._loss_if_anything_counts(targets, outputs)
        return sum((jnp.asarray(each, loss.dtype) for each in losses), loss), divisor, new

    def _loss_if_anything_counts(self, targets: Any, outputs: Any) -> Any:
        """Return the loss; 0 if nothing counts, without a gradient of the loss function, which may divide by 0."""
        assert self._given_weight is not None

        def compute() -> Any:  # not of an operand, which would have no mask of Keras
            return jnp.mean(self._loss_fn(targets, outputs))

        form = jax.eval_shape(compute)
        return jax.lax.cond(self._given_weight(targets) > 0, compute, lambda: jnp.zeros(form.shape, form.dtype))
