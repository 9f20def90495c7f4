"""Weighted losses in training loops that the script writes itself: each adapter has a function `weighted`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from unidist.errors import UsageError
from unidist.optim.loss_weights import BoundUpdates
from unidist.runtime import context
from unidist.training.mean_loss import MeanLoss, SampleWeight

if TYPE_CHECKING:
    from unidist.optim.update import Update

__all__ = ["WeightedPass", "weighted_update"]


class WeightedPass(NamedTuple):
    """The weight of one backward pass.

    Args:
        share: this rank's weight, times the number of ranks of which a mean is taken.
        total: the weight of all ranks.
    """

    share: float
    total: float

    @classmethod
    def of(cls, update: Update, weight: float | Callable[[], float]) -> WeightedPass:
        """Exchange the weights. Collective.

        Args:
            update: whose gradients the pass computes.
            weight: of this rank, or a function that waits for it.

        Raises:
            UsageError: on all ranks: a weight is negative or not finite.
        """
        means = None if update.steps_alone else context.current().owned(MeanLoss)
        own = SampleWeight(means, weight, is_given=True)
        total = own.total()
        return cls(own.samples * (1 if means is None or not update.average else means.size), total)

    @property
    def of_value(self) -> float:
        """The factor of the loss, whose mean over the ranks is then that over all samples; 0 if nothing counts here."""
        return self.share / self.total if self.share else 0.0

    def of_gradients(self, update: Update) -> float:
        """Return the factor of the gradients; called just before they are computed. Not collective.

        Raises:
            UsageError: see `Update.weigh`.
        """
        return self.share / update.weigh(self.total)


def weighted_update(optimizer: Any, update_of: Callable[[Any], Update | None]) -> Update:
    """Return the update of an optimizer, or of the only one that is distributed if it is None.

    Args:
        optimizer: as the script gives it.
        update_of: the adapter's.

    Raises:
        UsageError: there is none, or there are several; or it exchanges gradients in a process set.
    """
    if optimizer is None:
        update = context.current().owned(BoundUpdates).only()
    else:
        found = update_of(optimizer)
        if found is None:
            raise UsageError("ud.weighted(loss, weight, optimizer=...): this optimizer is not distributed")
        update = found
    if update.options.process_set is not None:
        raise UsageError(
            "ud.weighted and an optimizer that exchanges gradients in a process set: leave one of them out"
        )
    return update
