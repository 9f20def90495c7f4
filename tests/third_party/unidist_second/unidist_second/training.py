"""`distribute(model, optimizer)` and `TrainStep` for numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from unidist.checkpoint.format import Piece
from unidist.errors import ConfigurationError
from unidist.optim import Update
from unidist.runtime import current
from unidist.strategy import StrategyLike
from unidist.training import Distribution, PlannedStep, SampleWeight, Trees, check_leaves_loop
from unidist_second.binding import bind
from unidist_second.checkpoint import NumpyStates
from unidist_second.framework import NumpyFramework
from unidist_second.models import SGD, Model

Array = npt.NDArray[Any]
Loss = Callable[[Model, Array, Array], float]
"""The mean loss over a batch, `loss_fn(model, inputs, targets)`, of which the model computes gradients."""


class NumpyDistribution(Distribution):
    """Distributes a `Model`: what numpy does in the steps that every framework goes through."""

    framework = NumpyFramework()

    def check(self, *, keeps_division: bool) -> None:
        """Refuse plans that divide the model."""
        if self.plan.model_axes:
            raise ConfigurationError(f"numpy's models cannot be divided along {' and '.join(self.plan.model_axes)}")

    def bind_optimizer(self, update: Update) -> None:
        """Bind the optimizer."""
        bind(self.optimizer, update)

    def pieces(self) -> Sequence[Piece]:
        """Return the model's arrays, which `--verify` compares over the ranks."""
        return NumpyStates().model(self.model).pieces()

    def make_equal(self, *, is_new: bool) -> None:
        """Give every rank rank 0's arrays."""
        for array in self.model.arrays.values():
            self.runtime.world.broadcast(self.framework.buffer(array), root=0).wait()


def distribute(model: Model, optimizer: SGD, strategy: StrategyLike = None) -> tuple[Model, SGD]:
    """Distribute training over all ranks: copy rank 0's model to all, and bind the optimizer. Collective.

    Args:
        model: built in the same way on every rank.
        optimizer: over its parameters.
        strategy: default: the command line's.
    """
    plan = current().plan_for(strategy)
    check_leaves_loop(plan)
    distribution = NumpyDistribution(model, optimizer, plan)
    distribution.bind()
    return distribution.model, distribution.optimizer


class TrainStep(PlannedStep):
    """`step(inputs, targets)` trains on this rank's batch; returns the mean loss over the samples of all. Collective.

    Args:
        model: built in the same way on every rank.
        optimizer: over its parameters.
        loss_fn: see `Loss`.
        strategy: default: the command line's.
    """

    _trees = Trees(list, map)
    _elastic_alternative = "a function of unidist.elastic.run with an ArrayState"

    def __init__(self, model: Model, optimizer: SGD, loss_fn: Loss, strategy: StrategyLike = None) -> None:
        self._model, self._optimizer = distribute(model, optimizer, strategy)
        self._loss_fn = loss_fn
        super().__init__(current().plan_for(strategy), NumpyFramework())

    def __call__(self, inputs: Array, targets: Array) -> float:
        """Train on one batch."""
        return float(self._train(inputs, targets))

    def evaluate(self, inputs: Array, targets: Array) -> float:
        """Return the mean loss of a batch; changes nothing."""
        return float(self._mean_loss_of(inputs, targets))

    def _run_batch(self, batch: tuple[Any, ...], weight: SampleWeight | None) -> float:
        loss = self._evaluate_batch(batch)
        factor = 1.0 if weight is None else weight.factor(lambda: loss)
        self._optimizer.step({name: factor * each for name, each in self._model.gradients(*batch).items()})
        return factor * loss

    def _evaluate_batch(self, batch: tuple[Any, ...]) -> float:
        return self._loss_fn(self._model, *batch)

    def _scalar(self, value: float, like: Any) -> float:
        return value
