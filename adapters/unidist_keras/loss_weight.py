"""The weight of a rank's loss in a step: ranks may have batches of different size, and each sample counts the same.

Keras' train step scales its loss by the optimizer, which is where the loss gets its weight. One that does not has its
gradients weighted instead.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras

from unidist.errors import UsageError
from unidist.strategy.interface import GradientOwner

if TYPE_CHECKING:
    from unidist.strategy.interface import Plan

__all__ = ["WeightsLoss", "divisor_of_loss", "weigh_batches", "weights_samples"]


class WeightsLoss(ABC):
    """The part of an optimizer's binding that weights losses, or gradients."""

    _weight: Any = None
    _has_weighted = False

    @contextmanager
    def weighting_loss(self, weight: Any) -> Iterator[None]:
        """Multiply this rank's loss by a weight: the one that is scaled within the block, else the gradients."""
        self._weight, self._has_weighted = weight, False
        try:
            yield
        finally:
            self._weight = None

    def weighted(self, loss: Any) -> Any:
        """Return the loss with the weight that `weighting_loss` gives it."""
        if self._weight is None:
            return loss
        self._has_weighted = True
        return self.times(loss, self._weight)

    def weighted_gradients(self, gradients: Iterable[Any]) -> list[Any]:
        """Return the gradients with that weight, if those of the loss do not have it."""
        if self._weight is None or self._has_weighted:
            return list(gradients)
        return [None if gradient is None else self.times(gradient, self._weight) for gradient in gradients]

    @contextmanager
    def weighting_batch(self, model: Any, data: Any) -> Iterator[None]:
        """Weight the loss of a train step so that the mean over the ranks is one over the samples of all. Collective.

        Not if something else weights it, or the model is compiled with another optimizer.

        Args:
            model: whose step it is.
            data: as the step takes it.

        Raises:
            UsageError: it has no input.
        """
        if self._weight is not None or getattr(model.optimizer, "_unidist", None) is not self:
            yield
            return
        x, _, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        leaf = next((each for each in keras.tree.flatten(x) if each is not None), None)
        if leaf is None:
            raise UsageError("a batch has no input, and its number of samples is the weight of this rank's loss")
        losses = getattr(getattr(model, "_compile_loss", None), "_user_loss", None)
        weight = self.weight_of(divisor_of_loss(losses, self.num_samples(leaf), sample_weight))
        with self.weighting_loss(weight):
            yield

    @abstractmethod
    def times(self, value: Any, weight: Any) -> Any:
        """Return a loss or a gradient multiplied by a weight, a scalar of any type of floating point."""

    @abstractmethod
    def num_samples(self, inputs: Any) -> Any:
        """Return the first dim of one input of a model, in a graph or at once."""

    @abstractmethod
    def weight_of(self, samples: Any) -> Any:
        """Return `MeanLoss.weight_of`, in a graph or at once. Collective."""


def weigh_batches(model: Any, optimizer: Any) -> None:
    """Let each sample of the ranks' batches count the same in `fit` and `train_on_batch`.

    Args:
        model: compiled later.
        optimizer: bound; its binding derives from `WeightsLoss`.
    """
    plain = model.train_step

    @functools.wraps(plain)
    def train_step(*given: Any) -> Any:  # the data, on JAX after the state
        with optimizer._unidist.weighting_batch(model, given[-1]):
            return plain(*given)

    model.train_step = train_step


def weights_samples(plan: Plan, *, average: bool) -> bool:
    """Return whether the steps of a plan are means over the samples of all ranks.

    Args:
        plan: of the run.
        average: gradients are averaged over the ranks, else added up.
    """
    return average and not plan.the(GradientOwner).steps_alone


def divisor_of_loss(losses: Any, num_samples: Any, sample_weight: Any = None) -> Any:
    """Return the number by which Keras divides the sum of a batch's losses: the weight of this rank's mean.

    Args:
        losses: what a model was compiled with, in any structure, or one loss; None: unknown.
        num_samples: of the batch.
        sample_weight: as a train step takes it, or None.

    Returns:
        The number of samples; the sum of their weights, if that is what all losses are divided by; 1 if all are sums.
    """
    given = [] if losses is None else [each for each in keras.tree.flatten(losses) if each is not None]
    reductions = {each.reduction if isinstance(each, keras.losses.Loss) else None for each in given}
    if reductions == {"sum"}:
        return 1
    weights = [] if sample_weight is None else [each for each in keras.tree.flatten(sample_weight) if each is not None]
    if reductions == {"mean_with_sample_weight"} and weights:
        return keras.ops.sum(weights[0])
    return num_samples
