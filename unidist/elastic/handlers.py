"""Handlers of an elastic state for values besides model and optimizer: updates, stateful objects, generators."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import override

from unidist.checkpoint.framework_states import FrameworkStates
from unidist.checkpoint.update_state import UpdateState
from unidist.elastic.state import Handler, SharedHandler
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
    """The framework-free part of a bound optimizer: number of updates, scale of the loss, state of strategies.

    Also of observers of its updates between whose exchanges the ranks differ. Put it before the handlers of model and
    optimizer: at a synchronization it changes what rank 0 gives to the others.

    Args:
        value: the update of a bound optimizer.
    """

    is_checkpointed = False

    def __init__(self, value: Update) -> None:
        self._kept: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        super().__init__(value)

    @property
    @override
    def differs(self) -> bool:  # type: ignore[override]  # which is a constant for most
        return bool(self._followers())

    def _followers(self) -> list[Any]:
        return [each for each in self.value.strategies if isinstance(each, OutlivesGenerations)]

    @override
    def set_value(self, value: Any) -> None:
        """Do nothing: the update belongs to the optimizer."""

    @override
    def save(self) -> None:
        self._values = self.given()
        self._kept = {each.name: each.kept() for each in self._followers()}

    @override
    def restore(self) -> None:
        self.take(self._values)
        for each in self._followers():
            if each.name in self._kept:
                each.restore(self._kept[each.name])

    @override
    def make_equal(self) -> None:
        for each in self._followers():
            each.make_equal()

    @override
    def given(self) -> Any:
        return copy.deepcopy(UpdateState(self.value).values())

    @override
    def take(self, given: Any) -> None:
        UpdateState(self.value).load_values(copy.deepcopy(given))

    @override
    def sync(self) -> None:
        runtime = context.current()
        for each in self._followers():
            each.synchronize_generation(runtime)
        self.take(objects.broadcast_object(runtime.negotiator, self.given(), root=0, name="elastic.update"))


def update_handlers(updates: Mapping[str, Update | None]) -> dict[str, Handler]:
    """Return handlers of the updates of bound optimizers.

    Args:
        updates: of optimizers, by the attribute of the state that each optimizer is; None: it is not bound.
    """
    return {f"updates of {name}": UpdateHandler(update) for name, update in updates.items() if update is not None}


def divided_handlers(
    kept: FrameworkStates, model: Any, optimizer: Any, *, is_sharded: Callable[[Any], bool]
) -> dict[str, Handler]:
    """Return handlers of a model that is divided over the ranks, and of its optimizer with its update.

    Args:
        kept: the checkpoint states of the framework's objects.
        model: this rank's part; ranks of other replicas have the same.
        optimizer: over its parameters, bound or not.
        is_sharded: tells of the optimizer whether its state is sharded over the replicas, too.
    """
    return {
        "model": SharedHandler.of_model(kept, model, is_sharded=False),
        "optimizer": SharedHandler.of_optimizer(kept, optimizer, model, is_sharded=is_sharded),
    }
