"""The weight of a rank's loss in a step: ranks may have batches of different size, and each sample counts the same.

Keras' train step scales its loss by the optimizer, which is where the loss gets its weight. One that does not has its
gradients weighted instead.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import keras

from unidist.errors import UsageError
from unidist.runtime import context
from unidist_keras.losses.divisor import LossDivisor

if TYPE_CHECKING:
    from unidist.strategy.interface import Plan

__all__ = ["WeightsLoss", "weigh_batches", "weights_samples"]

_log = logging.getLogger("unidist")

_ELASTIC = (
    "the loss is divided by what masks, ignore_class or sample weights let count, and elastic training weights the "
    "losses of micro-batches by their samples: they are not those of one process. Use reduction='sum_over_batch_size' "
    "without masks, and sample weights of 0 for what does not count"
)


class WeightsLoss(ABC):
    """The part of an optimizer's binding that weights losses, or gradients."""

    _weight: Callable[[], Any] | None = None
    _has_weighted = False
    _problems: frozenset[str] = frozenset()

    @contextmanager
    def weighting_loss(self, weight: Any) -> Iterator[None]:
        """Multiply this rank's loss by a weight: the one that is scaled within the block, else the gradients."""
        with self.weighting_by(lambda: weight):
            yield

    @contextmanager
    def weighting_by(self, weight: Callable[[], Any]) -> Iterator[None]:
        """Do what `weighting_loss` does, with a weight that is known when the loss is."""
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
        return self.times(loss, self._weight())

    def weighted_gradients(self, gradients: Iterable[Any]) -> list[Any]:
        """Return the gradients with that weight, if those of the loss do not have it."""
        if self._weight is None or self._has_weighted:
            return list(gradients)
        weight = self._weight()
        return [None if gradient is None else self.times(gradient, weight) for gradient in gradients]

    @contextmanager
    def weighting_batch(self, model: Any, data: Any) -> Iterator[None]:
        """Weight the loss of a train step so that the mean over the ranks is that of one process. Collective.

        Not if something else weights it, or the model is compiled with another optimizer.

        Args:
            model: whose step it is.
            data: as the step takes it.

        Raises:
            UsageError: it has no input.
        """
        if getattr(model.optimizer, "_unidist", None) is not self:
            yield
            return
        x, _, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        leaf = next((each for each in keras.tree.flatten(x) if each is not None), None)
        if leaf is None:
            raise UsageError("a batch has no input, and its number of samples is the weight of this rank's loss")
        compiled, is_weighted = getattr(model, "_compile_loss", None), self._weight is not None
        divisor = LossDivisor(getattr(compiled, "_user_loss", None), sample_weight)
        samples = self.num_samples(leaf)
        with divisor.noted_in(compiled), ExitStack() as weighting:
            if not is_weighted:
                weighting.enter_context(self.weighting_by(functools.cache(lambda: self.weight_by(divisor, samples))))
            yield
        if is_weighted:
            self.warn_once(divisor.problem or (_ELASTIC if divisor.value is not None else ""))

    def weight_by(self, divisor: LossDivisor, samples: Any) -> Any:
        """Return the weight of this rank's loss, in a graph or at once; warn if no weight is right. Collective.

        Args:
            divisor: of the loss.
            samples: their number.
        """
        self.warn_once(divisor.problem)
        return self.weight_of(samples if divisor.value is None else divisor.value)

    def warn_once(self, problem: str) -> None:
        """Warn of what makes the ranks' losses other than those of one process, on rank 0."""
        if problem and problem not in self._problems and context.current().topology.rank == 0:
            _log.warning("%s", problem)
        self._problems |= {problem}

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
    return average and not plan.steps_alone
