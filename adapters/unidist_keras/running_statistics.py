"""Variables that training changes without a gradient, the same on all ranks: running statistics, codebooks.

Each rank's forward pass changes them by its own samples. After each step they become the mean of the ranks'.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from unidist.runtime import context
from unidist.training.mean_loss import MeanLoss

if TYPE_CHECKING:
    from unidist_arrays.memory import Array

__all__ = ["SharesStatistics", "average_statistics", "share_statistics", "statistics_of"]

_NAME = "running statistics of a step"


class SharesStatistics(ABC):
    """The part of an optimizer's binding that makes a model's running statistics the same on all ranks."""

    @abstractmethod
    def after_step(self, model: Any, given: Sequence[Any], result: Any) -> Any:
        """Return what a train step has returned, with statistics that are the mean of the ranks'. Collective.

        Args:
            model: whose `train_step` it was.
            given: to it: the data, on JAX after the state.
            result: of it.
        """

    @abstractmethod
    def _averaged(self, flat: Any) -> Any:
        """Return `average_statistics` of a vector, in a graph or at once."""

    def means(self, values: Sequence[Any]) -> list[Any]:
        """Return the mean of each value over the ranks, in a graph or at once. Collective.

        Args:
            values: tensors of any type of floating point, of the same shapes on all ranks.
        """
        types = {keras.backend.standardize_dtype(each.dtype) for each in values}
        dtype = "float64" if "float64" in types else "float32"
        parts = [keras.ops.reshape(keras.ops.cast(each, dtype), (-1,)) for each in values]
        flat = self._averaged(keras.ops.concatenate([*parts, keras.ops.ones((1,), dtype)]))
        found, begin = [], 0
        for value, part in zip(values, parts, strict=True):
            end = begin + part.shape[0]
            mean = keras.ops.reshape(flat[begin:end], value.shape)
            found.append(keras.ops.cast(mean, keras.backend.standardize_dtype(value.dtype)))
            begin = end
        return found


def share_statistics(model: Any, optimizer: Any, *, prepare: Callable[[], object] = lambda: None) -> None:
    """Let the ranks have the same running statistics after each step of `fit` and `train_on_batch`.

    Args:
        model: compiled later. Its variables may come into being later.
        optimizer: bound; its binding derives from `SharesStatistics`.
        prepare: called before a step is traced: the model may have new layers.
    """
    plain = model.train_step

    @functools.wraps(plain)
    def train_step(*given: Any) -> Any:
        prepare()
        result = plain(*given)
        is_own = getattr(model.optimizer, "_unidist", None) is optimizer._unidist
        return optimizer._unidist.after_step(model, given, result) if is_own else result

    model.train_step = train_step


def statistics_of(model: Any) -> list[Any]:
    """Return the variables of floating point that layers have made as not trainable.

    Frozen weights are none, and neither are metrics and the states of random generators.
    """
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        for variable in layer._non_trainable_variables:
            if keras.backend.is_float_dtype(variable.dtype):
                found[id(variable)] = variable
    return list(found.values())


def average_statistics(flat: Array) -> None:
    """Replace a vector, of which the last element is 1, by the mean of the ranks' that have not joined. Collective."""
    context.current().owned(MeanLoss).average(flat, _NAME)
