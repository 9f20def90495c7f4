"""The weights of the losses of one update: its gradient is sum(losses) / sum(weights) over all ranks and passes.

A weighted loss is a mean times its weight. All are divided by the same number, the *unit*, and only the exchange knows
how much the passes weigh together: it multiplies their sum by `correction`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from unidist.errors import UsageError

if TYPE_CHECKING:
    from unidist.optim.update import Update


class LossWeights:
    """The weights of the passes of one window. The same on every rank.

    Attributes:
        is_used: a loss was weighted.
        total: of all passes so far, and of all ranks; 0: no loss was weighted, or nothing counted.
        unit: by which the losses are divided that the present sum of gradients is made of.
    """

    def __init__(self) -> None:
        self.is_used = False
        self.total = self.unit = 0.0
        self._last = 0.0
        self._has_terms = False

    @property
    def correction(self) -> float:
        """The factor that makes the sum of the gradients that of the update."""
        return self.unit / self.total if self.total and not self._has_terms else 1.0

    def add(self, total: float, *, is_term: bool) -> float:
        """Note a weighted loss whose gradients come next; returns the number by which it is divided.

        Several losses of one pass have equal weights, or the pass is the only one of its window.

        Args:
            total: the sum of the weights of all ranks.
            is_term: no gradient has come since the last call, so the loss belongs to the same pass.
        """
        self.is_used = True
        if is_term and total == self._last:
            return self._own_unit
        is_first = self._has_terms or self.total == self._last
        if is_term != self._has_terms and not (is_term and is_first):
            raise UsageError(
                "a window of several backward passes has a pass whose loss is the sum of losses with different "
                "weights, and the gradient of the window is divided by one sum of weights. Weight one loss in each "
                "pass, or let one backward pass make an update (without accumulate)"
            )
        self._last = total
        if is_term:
            self._has_terms = True
            return self._own_unit
        if not self.total:
            self.unit = total or 1.0
        self.total += total
        return self.unit

    @property
    def _own_unit(self) -> float:
        """Return the number by which another loss of the present pass is divided."""
        return self._last or 1.0 if self._has_terms else self.unit

    def settle(self) -> None:
        """Note that the gradients so far are corrected: those of another pass will be added to them."""
        self.unit = self.total


class BoundUpdates:
    """The updates of one runtime, for functions that are given a loss and no optimizer; see `RuntimeAPI.owned`."""

    def __init__(self, context: Any) -> None:
        del context
        self._updates = weakref.WeakSet[Any]()

    def add(self, update: Update) -> None:
        """Add one."""
        self._updates.add(update)

    def only(self) -> Update:
        """Return the only one.

        Raises:
            UsageError: there is none, or there are several.
        """
        found = list(self._updates)
        if len(found) != 1:
            raise UsageError(
                f"ud.weighted(loss, weight): this script has {len(found) or 'no'} distributed optimizers. "
                + ("Say whose loss it is: weighted(loss, weight, optimizer=...)" if found else "Distribute one before")
            )
        update: Update = found[0]
        return update

    def close(self) -> None:
        """Forget them."""
        self._updates.clear()
