"""`TrainStep`: one call that trains a Keras model on a batch, the same with every strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unidist.runtime import context
from unidist.strategy.interface import GradientOwner
from unidist.strategy.plan import StrategyLike
from unidist.training.mean_loss import MeanLoss
from unidist.waits import calling
from unidist_jax.compiled import translated
from unidist_jax.keras.training import bind_model
from unidist_keras.loss_weight import divisor_of_loss

LossFunction = Callable[[Any, Any], Any]
"""Keras' order: targets and the model's outputs to the loss, of which the mean is taken."""


class TrainStep:
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

    Attributes:
        model: its variables have the values after the last step.
        optimizer: the bound optimizer.

    Raises:
        ConfigurationError: the strategies do not fit the world, each other, or Keras on JAX.
        NotInitializedError: `init()` was not called.
    """

    def __init__(self, model: Any, optimizer: Any, loss_fn: LossFunction, strategy: StrategyLike = None) -> None:
        plan = context.current().plan_for(strategy)
        self.model = model
        self.optimizer = bind_model(model, optimizer, plan)
        self._loss_fn = loss_fn
        self._steps_alone = plan.the(GradientOwner).steps_alone
        self._run = jax.jit(self._traced)
        self._evaluate = jax.jit(self._evaluated)

    @calling("train_step()")
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
        self._build(inputs)
        groups = (self.model.trainable_variables, self.model.non_trainable_variables, self.optimizer.variables)
        values = [[variable.value for variable in group] for group in groups]
        weight = 1.0 if self._steps_alone else self._weight_of(inputs)
        with translated():
            loss, new = self._run(values, np.asarray(weight, float), inputs, targets)
            mean = loss if self._steps_alone else self._mean(loss, weight)
        for group, found in zip(groups, new, strict=True):
            for variable, value in zip(group, found, strict=True):
                variable.assign(value)
        context.current().progress.report({"loss": mean}, _num_samples(inputs))
        return mean

    @calling("train_step.evaluate()")
    def evaluate(self, inputs: Any, targets: Any) -> Any:
        """Return the mean loss of a batch as in inference; arguments as for a call. Changes nothing."""
        self._build(inputs)
        groups = (self.model.trainable_variables, self.model.non_trainable_variables)
        values = [[variable.value for variable in group] for group in groups]
        weight = self._weight_of(inputs)
        return self._mean(self._evaluate(*values, inputs, targets), weight)

    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs for this rank's inputs as in inference."""
        return self.model(inputs, training=False)

    def _build(self, inputs: Any) -> None:
        """Build the model and the optimizer, if they are not. Collective then."""
        if not all(layer.built for layer in self.model._flatten_layers()):
            self.model(jax.tree.map(lambda leaf: keras.KerasTensor(leaf.shape, str(leaf.dtype)), inputs))
        if not self.optimizer.built:
            self.optimizer.build(self.model.trainable_variables)

    def _traced(self, values: Sequence[Any], weight: Any, inputs: Any, targets: Any) -> Any:
        trainable, non_trainable, state = values

        def loss_of(trainable: Any) -> Any:
            loss, new = self._loss(trainable, non_trainable, inputs, targets, training=True)
            mapping = list(zip(self.optimizer.variables, state, strict=True))
            with keras.StatelessScope(state_mapping=mapping), self.optimizer._unidist.weighting_loss(weight):
                scaled = self.optimizer.scale_loss(loss)
            return scaled, (loss, new)

        gradients, (loss, non_trainable) = jax.grad(loss_of, has_aux=True)(trainable)
        trainable, state = self.optimizer.stateless_apply(state, gradients, trainable)
        return loss, (trainable, non_trainable, state)

    def _evaluated(self, trainable: Any, non_trainable: Any, inputs: Any, targets: Any) -> Any:
        return self._loss(trainable, non_trainable, inputs, targets, training=False)[0]

    def _loss(self, trainable: Any, non_trainable: Any, inputs: Any, targets: Any, *, training: bool) -> Any:
        outputs, new, losses = self.model.stateless_call(
            trainable, non_trainable, inputs, training=training, return_losses=True
        )
        loss = jnp.mean(self._loss_fn(targets, outputs))
        return sum((jnp.asarray(each, loss.dtype) for each in losses), loss), new

    def _weight_of(self, inputs: Any) -> float:
        """Return the weight of this rank's loss. Collective."""
        return context.current().owned(MeanLoss).weight_of(divisor_of_loss(self._loss_fn, _num_samples(inputs)))

    def _mean(self, loss: Any, weight: float) -> Any:
        return jnp.asarray(context.current().owned(MeanLoss).of_all(weight * float(loss)), loss.dtype)


def _num_samples(inputs: Any) -> int:
    sizes = [np.shape(leaf)[0] for leaf in jax.tree.leaves(inputs) if np.ndim(leaf)]
    return sizes[0] if sizes else 0
