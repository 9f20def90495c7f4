"""Steps of `TrainStep` as transactions, for elastic jobs: the state to keep, and hooks of the script."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import override

from unidist.checkpoint.format.interface import KeepsState
from unidist.elastic.durable.parts import DurableParts, parts_of
from unidist.elastic.handlers import GeneratorsHandler, StatefulHandler, update_handlers
from unidist.elastic.state import ObjectState, SharedHandler
from unidist.elastic.step_training import Policy, Progress
from unidist_jax.checkpoint import JaxStates, Training, kept_training
from unidist_jax.elastic.state import TreeHandler, ending_programs


class TrainingState(ObjectState):
    """Parameters, optimizer state, progress and the other state of training.

    Args:
        training: what holds them, the same on every rank.
        progress: of the training; an attribute.
        others: objects with `state_dict` and `load_state_dict`.
    """

    progress: Progress

    def __init__(self, training: Training, progress: Progress, others: Mapping[str, Any]) -> None:
        self._trained, self._others = training, others
        binding = training.optimizer.binding
        handlers = update_handlers({"optimizer": binding.distributed_update})
        handlers.update({f"state.{name}": StatefulHandler(value) for name, value in others.items()})
        is_sharded = binding.inner.sharded
        if not training.holds_pieces:
            handlers["trees"] = _TrainedTrees(training, whole=not is_sharded)
        if is_sharded:
            handlers["shards"] = SharedHandler(training, _shards, JaxStates.framework.convert)
        handlers["generators"] = GeneratorsHandler(None)
        super().__init__(handlers=handlers, progress=progress)

    @override
    def durable_parts(self) -> DurableParts:
        parameters, optimizer = kept_training(self._trained)
        others = {f"state.{name}": value for name, value in self._others.items()}
        return parts_of(JaxStates(), {"model": parameters}, {"optimizer": optimizer}, others, self._plain_sections())


class _TrainedTrees(TreeHandler):
    """The trees of a `TrainStep`, which has others after each step.

    Args:
        training: the step.
        whole: the optimizer state is whole on this rank, and kept here, too.
    """

    def __init__(self, training: Training, *, whole: bool) -> None:
        self._training, self._whole = training, whole
        super().__init__(None, keeps_previous=not whole)

    def _get(self) -> tuple[Any, Any]:
        return self._training.held, self._training.opt_state if self._whole else None

    def _put(self, held: Any, opt_state: Any) -> None:
        self._training.held = held
        if self._whole:
            self._training.opt_state = opt_state

    @override
    def save(self) -> None:
        self.value = self._get()
        super().save()

    @override
    def restore(self) -> None:
        super().restore()
        self._put(*self.value)

    @override
    def sync(self) -> None:
        self.value = self._get()
        super().sync()
        self._put(*self.value)


def _shards(training: Training) -> dict[str, KeepsState]:
    """Return the states of what a `TrainStep` has pieces of."""
    parameters, optimizer = kept_training(training)
    states = {"optimizer": optimizer.kept_state()}
    return {"model": parameters.kept_state(), **states} if training.holds_pieces else states


def translating(policy: Policy) -> Policy:
    """Return a policy whose hooks raise unidist's errors where compiled programs in them fail."""
    hooks = ("after_step", "after_epoch", "on_resize")
    return dataclasses.replace(policy, **{name: _ending(getattr(policy, name)) for name in hooks})


def _ending(hook: Callable[..., object] | None) -> Any:
    if hook is None:
        return None

    @functools.wraps(hook)
    def run(*args: Any) -> object:
        with ending_programs():
            return hook(*args)

    return run
