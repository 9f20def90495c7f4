"""The inner steps of the optimizers that a strategy was bound to, through the generations of an elastic job."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist_parameter_server.binding import StoreStep


class StoreSteps:
    """The inner step of each optimizer, as long as it is alive."""

    def __init__(self) -> None:
        self._steps: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()

    @property
    def present(self) -> list[StoreStep]:
        """The steps of the present generation."""
        return [step for kept in self._steps.values() if (step := kept()) is not None]

    def add(self, optimizer: Any, step: StoreStep, *, is_elastic: bool) -> None:
        """Take the new inner step of an optimizer in place of the one before, which an elastic job goes on with."""
        if isinstance(optimizer, tuple):  # of optax, to which nothing can refer weakly: it has one step
            optimizer = step
        last = self._steps.get(optimizer)
        before: Any = None if last is None or not is_elastic else last()
        if before is not None and not before.is_filled:  # that generation has ended before its first step
            unused, before = before, before.before
            unused.close()
        step.before = before
        self._steps[optimizer] = weakref.ref(step)

    def follow(self, context: RuntimeAPI, *, is_wanted: bool) -> None:
        """Bring what the stores of the generation before have to this rank, if it is wanted, and leave them.

        Args:
            context: of the present generation.
            is_wanted: whether this rank is to have it.
        """
        for step in self.present:
            before, step.before = step.before, None
            if before is None and not step.is_of(context):  # it goes on itself, with another store
                before = step
            if before is not None:
                if is_wanted:
                    before.bring()
                before.close()
