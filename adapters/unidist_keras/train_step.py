"""`TrainStep` of Keras, as far as it is the same on every backend."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from typing_extensions import override

from unidist.runtime import context
from unidist.strategy.plan import StrategyLike
from unidist.training.distribution import Distribution
from unidist.training.train_step import PlannedStep, Trees
from unidist.verification import replica_check
from unidist_arrays.memory import digest_of_array
from unidist_keras.fit_agreement import hyperparameters

__all__ = ["KerasStep"]


class KerasStep(PlannedStep):
    """Distributes a model of Keras 3, whose losses of a batch are divided as Keras says.

    Args:
        model: see `TrainStep`.
        optimizer: the same.
        loss_fn: the same.
        strategy: the same.
        distribution: of the backend.
        weight: see `TrainStep`.

    Attributes:
        model: as this rank holds it.
        optimizer: the bound optimizer.
    """

    _trees = Trees(keras.tree.flatten, keras.tree.map_structure)
    _counted: float | None = None
    """By what the loss that was evaluated last is divided; None: by the samples. In a step the program finds it."""
    _elastic_alternative = "fit with distribute(model, optimizer), or a function of ud.elastic.run"

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss_fn: Any,
        strategy: StrategyLike,
        distribution: type[Distribution],
        weight: Callable[[Any], Any] | None,
    ) -> None:
        runtime = context.current()
        super().__init__(runtime.plan_for(strategy), distribution.framework, weight=weight)
        made = distribution(model, optimizer, self._plan)
        made.bind()
        self.model, self.optimizer, self._loss_fn = made.model, made.optimizer, loss_fn
        self._means()
        self._replica_check = replica_check(
            runtime, self._plan, made.pieces, more=lambda: hyperparameters(self.optimizer)
        )

    def evaluate(self, inputs: Any, targets: Any) -> Any:
        """Return the mean loss of a batch as in inference; arguments as for a call. Changes nothing."""
        return self._mean_loss_of(inputs, targets)

    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs for this rank's inputs as in inference, on every rank along the model's axes."""
        return self._outputs_of(inputs)

    @override
    def _digests_of(self, batch: tuple[Any, ...]) -> Mapping[str, bytes]:
        if not self._is_whole:
            return super()._digests_of(batch)
        kept = [(variable, keras.ops.copy(variable.value)) for variable in self.model.non_trainable_variables]
        loss, gradients = self._computed(batch)
        for variable, before in kept:
            variable.assign(before)
        found = {"the loss": digest_of_array(loss)}
        for variable, gradient in zip(self.model.trainable_variables, gradients, strict=True):
            if gradient is not None:
                found[f"the gradient of {variable.path!r}"] = digest_of_array(gradient)
        return found

    @abstractmethod
    def _computed(self, batch: tuple[Any, ...]) -> tuple[Any, Sequence[Any]]:
        """Return the loss of a batch in training, and the gradient of each trainable variable; None: it has none."""

    @override
    def _divisor(self, batch: tuple[Any, ...]) -> float:
        counted, self._counted = self._counted, None
        return self._num_samples(batch) if counted is None else counted

    @override
    def _samples_of(self, batch: tuple[Any, ...]) -> float | Callable[[], float]:
        given = self._given_weight
        if given is None:
            return super()._samples_of(batch)

        def number() -> float:  # asked for where no program finds it
            found = self._number(given(*self._weighed(batch)))
            return found() if callable(found) else found

        return number

    @override
    def _scalar(self, value: float, like: Any) -> Any:
        return keras.ops.convert_to_tensor(value, keras.backend.standardize_dtype(like.dtype))
