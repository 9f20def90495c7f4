"""Handlers of an elastic state for values besides model and optimizer: updates, stateful objects, generators."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from unidist.elastic.state import Handler
from unidist.negotiation import objects
from unidist.optim.interface import OutlivesGenerations
from unidist.optim.update import Update
from unidist.runtime import context


class StatefulHandler(Handler):
    """An object with `state_dict` and `load_state_dict`; newcomers get that of rank 0."""

    @override
    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    @override
    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    @override
    def given(self) -> Any:
        return self.value.state_dict()

    @override
    def take(self, given: Any) -> None:
        self.value.load_state_dict(given)

    @override
    def sync(self) -> None:
        operations = context.current().negotiator
        self.value.load_state_dict(
            objects.broadcast_object(operations, self.value.state_dict(), root=0, name="elastic.stateful")
        )


class GeneratorsHandler(Handler):
    """The random generators of this process: a step that is taken again draws the same; each rank has its own.

    Those of Python and NumPy; adapters add their framework's.
    """

    is_checkpointed = False

    @override
    def save(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    @override
    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def sync(self) -> None:
        """Leave them as they are."""


class UpdateHandler(Handler):
    """The observers of an optimizer's updates between whose exchanges the ranks differ, and the number of updates.

    Put it before the handlers of model and optimizer: at a synchronization it changes what rank 0 gives to the others.

    Args:
        value: the update of a bound optimizer.
    """

    is_checkpointed = False

    def __init__(self, value: Update) -> None:
        self._kept: dict[str, Any] = {}
        super().__init__(value)

    @property
    @override
    def differs(self) -> bool:  # type: ignore[override]  # which is a constant for most
        return True

    def _followers(self) -> list[Any]:
        return [each for each in self.value.strategies if isinstance(each, OutlivesGenerations)]

    @override
    def set_value(self, value: Any) -> None:
        """Do nothing: the update belongs to the optimizer."""

    @override
    def save(self) -> None:
        self._kept = {each.name: (self.value.step, each.kept()) for each in self._followers()}

    @override
    def restore(self) -> None:
        for each in self._followers():
            if each.name in self._kept:
                self.value.step, kept = self._kept[each.name]
                each.restore(kept)

    @override
    def make_equal(self) -> None:
        for each in self._followers():
            each.make_equal()

    @override
    def sync(self) -> None:
        for each in self._followers():
            each.synchronize_generation(context.current())


def update_handlers(updates: Mapping[str, Update | None]) -> dict[str, Handler]:
    """Return handlers of those updates that need one.

    Args:
        updates: of optimizers, by the attribute of the state that each optimizer is; None: it is not bound.
    """
    return {
        f"updates of {name}": UpdateHandler(update)
        for name, update in updates.items()
        if update is not None and any(isinstance(each, OutlivesGenerations) for each in update.strategies)
    }
