"""`model.fit` in an elastic job, by a flag: each call of Keras' train function is a transaction.

A step that lost a peer is taken again, by the remaining ranks, before Keras hears of it; so its loop, its progress bar
and the callbacks go on as if nothing had happened. A rank that joins later runs the same `fit`: its steps do nothing
for what the others have done before. An adapter derives from `ElasticFit`.
"""

from __future__ import annotations

import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

from unidist.control.elastic.member import Member
from unidist.elastic.batches import BatchShare, Position
from unidist.elastic.state import Handler, ObjectState
from unidist.elastic.step_training import Policy, Progress, Redistributable, StepTraining, passes_of_step
from unidist.errors import PeerLostError, UsageError
from unidist.negotiation import allgather_object
from unidist.runtime import context
from unidist.strategy.interface import Plan

__all__ = ["Calls", "ElasticFit", "LostAtBeginningError", "MetricsHandler"]

_log = logging.getLogger("unidist.elastic")


class ElasticFit(ABC):
    """`fit` of one model, through the generations of an elastic job.

    Args:
        model: built or not; `fit` becomes this one's.
        optimizer: bound.
        plan: of the run.
        choice: the user's, see `distribute`.
    """

    def __init__(self, model: Any, optimizer: Any, plan: Plan, choice: bool | Policy | None) -> None:
        self.model, self.optimizer, self._plan = model, optimizer, plan
        self._choice = choice
        self._plain_fit = model.fit
        self._training: StepTraining | None = None
        self._data: Redistributable | None = None
        self._epochs_before = 0  # of earlier calls of `fit`
        model.fit = self.fit

    keeps_division = False
    """The adapter goes on with a model that is divided, see `unidist.strategy.KeepsDivision`."""

    @abstractmethod
    def data_of(self, x: Any) -> Redistributable | None:
        """Return the data that can be redistributed, given the first argument of `fit`; None if there is none."""

    def input_of(self, data: Redistributable, x: Any) -> Any:
        """Return what Keras' `fit` is given as its first argument, from which `train_function` gets an iterator."""
        del data
        return x

    @abstractmethod
    def prepare(self, data: Redistributable, x: Any) -> None:
        """Build the model and the optimizer, and what takes steps. Collective.

        Args:
            data: of the first argument of `fit`.
            x: that argument.
        """

    @abstractmethod
    def warm_up(self, data: Redistributable, x: Any) -> None:
        """Take a step alone, so that functions are traced before others wait; the others overwrite its changes."""

    @abstractmethod
    def make_state(self, progress: Progress, others: Mapping[str, Any]) -> ObjectState:
        """Return the state of model and optimizer, with an attribute `progress`, and of objects with `state_dict`."""

    @abstractmethod
    def taking_steps(self) -> AbstractContextManager[Any]:
        """Prepare to take steps within the block, and restore the model's own train function after it."""

    @abstractmethod
    def train_function(self, calls: Calls) -> Callable[..., Any]:
        """Return the train function for Keras: it calls `calls` with what trains on a share."""

    @abstractmethod
    def raising_peer_losses(self) -> AbstractContextManager[Any]:
        """Let the block raise PeerLostError where the framework has another error for it."""

    def fit(self, *args: Any, **options: Any) -> Any:
        """Train as `keras.Model.fit` does, with the same arguments; see docs/elastic.md.

        Raises:
            UsageError: the data cannot be redistributed, or is not that of the calls before.
            SystemExit, StalledError, StateLostError: see `Generations.enter_next_generation`.
        """
        given = inspect.signature(self._plain_fit).bind(*args, **options)
        given.apply_defaults()
        data = self.data_of(given.arguments["x"])
        if not self._is_chosen(data):
            return self._plain_fit(*args, **options)
        assert data is not None, "chosen"
        _check_arguments(given.arguments)
        training = self._begin(data, given.arguments["x"])
        given.arguments["x"] = self.input_of(data, given.arguments["x"])
        with self.taking_steps():
            return self._through_generations(training, dict(given.arguments))

    def _is_chosen(self, data: Redistributable | None) -> bool:
        membership = context.current().membership
        if self._choice is False or membership is None:
            return False
        leader = membership.generations
        if leader is not None and leader.is_function:
            if self._choice is None:
                return False
            raise UsageError(
                "elastic=True, and fit runs inside of a function of ud.elastic.run, which makes training elastic "
                "itself: leave one out"
            )
        if data is None and self._plan.divides_model:
            raise UsageError(
                "this job is elastic, and strategies divide the model: fit's data has to come from ud.shard(..., "
                "batch_size=...), which can divide the samples again when ranks change. Or use ud.elastic.run"
            )
        if data is None and self._choice is None:
            _log.warning(
                "this job is elastic, but the loss of a rank will end it: fit does not train on data of "
                "ud.shard(..., batch_size=...), which can be redistributed. See docs/elastic.md"
            )
            return False
        if data is None:
            raise UsageError(
                "elastic=True, and fit's data does not come from ud.shard(..., batch_size=...): only that can be "
                "redistributed when ranks join or leave"
            )
        if leader is not None and self._training is None:
            raise UsageError(
                "this job is elastic, and another model's fit keeps its state: train one model, or use elastic=False "
                "for both"
            )
        return True

    def _begin(self, data: Redistributable, x: Any) -> StepTraining:
        if self._training is not None:
            if data is not self._data:
                raise UsageError(
                    "fit was called with other data than before: an elastic job goes through the epochs of one dataset "
                    "of ud.shard(). Make it once, before the first fit"
                )
            return self._training
        passes = passes_of_step(self._plan, keeps_division=self.keeps_division)
        membership: Member | None = context.current().membership
        policy = self._choice if isinstance(self._choice, Policy) else Policy()
        self._data = data
        self.prepare(data, x)
        assert membership is not None, "chosen"
        if membership.assignment is None:
            self.warm_up(data, x)
        self._training = StepTraining(
            membership, data, policy, lambda progress: self.make_state(progress, policy.state), passes=passes
        )
        return self._training

    def _through_generations(self, training: StepTraining, given: dict[str, Any]) -> Any:
        """Call Keras' `fit`, and again after the loss of a peer outside of a step."""
        model, first = self.model, self._epochs_before
        initial, epochs = given["initial_epoch"], given["epochs"]
        end = self._epochs_before = first + max(epochs - initial, 0)
        given |= {
            "callbacks": [*_listed(given["callbacks"]), _StopTogether()],
            "shuffle": False,
        }  # which `shard` has done
        seen: dict[int, dict[str, Any]] = {}
        is_lost = True
        while is_lost and (begun := _first_epoch(training.progress.position, first)) < end:
            calls = Calls(self.model, training, first_epoch=begun)
            model.train_function = self.train_function(calls)
            given |= {"initial_epoch": initial + begun - first, "steps_per_epoch": calls.steps_per_epoch}
            reason, is_lost = "", True
            try:
                with self.raising_peer_losses():
                    self._plain_fit(**given)
                    if training.progress.position < Position(end):
                        training.skip_to(end)  # a callback has ended training, on all ranks
                    training.finish()
                is_lost = False
            except LostAtBeginningError:
                pass
            except PeerLostError as exc:
                reason = training.reason_of(exc)
            _note(seen, model.history)
            if reason:
                training.enter_next_generation(reason)
        return _history(model, seen)


class Calls:
    """The calls of Keras' train function in one call of its `fit`.

    Each call brings training to where it would be after as many steps in a job to which nothing happens: as a rule by
    a step; by none where that is done already; by more where steps were lost.

    Args:
        model: that `fit` trains.
        training: keeps what belongs to it.
        first_epoch: the one that Keras begins with, as `training` counts them.

    Attributes:
        steps_per_epoch: for Keras' `fit`.
    """

    def __init__(self, model: Any, training: StepTraining, *, first_epoch: int) -> None:
        self._model, self._training = model, training
        self._epoch, self._call = first_epoch, 0
        progress, per_call = training.progress, model.steps_per_execution
        self.steps_per_epoch = progress.order.num_batches(progress.global_batch)
        self._calls_per_epoch = -(-self.steps_per_epoch // per_call)
        self._samples_per_call = progress.global_batch * per_call
        self._logs: Any = None

    def __call__(self, train: Callable[[BatchShare], Any]) -> Any:
        """Take the steps of a call; returns Keras' logs.

        Args:
            train: trains on a share, and returns the logs.
        """
        target = self._next_target()
        training = self._training

        def run(share: BatchShare) -> float:
            self._logs = train(share)
            return math.nan  # Keras keeps the loss, in its metrics

        while (before := training.progress.position) < target:
            world = context.current()
            training.step(run)
            after = training.progress.position
            if context.current() is not world and after.processed == 0 and after <= before:
                raise LostAtBeginningError
        return self._model.get_metrics_result() if self._logs is None else self._logs

    def _next_target(self) -> Position:
        self._call += 1
        if self._call < self._calls_per_epoch:
            return Position(self._epoch, self._call * self._samples_per_call)
        self._epoch, self._call = self._epoch + 1, 0
        return Position(self._epoch)


class LostAtBeginningError(Exception):
    """A peer was lost in the first step of an epoch; the ranks have formed a new world.

    Another one may have been lost in an exchange of callbacks at the end of the epoch before: so all go back there.
    """


class _StopTogether(keras.callbacks.Callback):
    """Ends training on all ranks when a callback has ended it on one of them."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree on whether to stop. Collective."""
        operations = context.current().negotiator
        self.model.stop_training = any(
            allgather_object(operations, self.model.stop_training, name="elastic.stop_training")
        )


class MetricsHandler(Handler):
    """This rank's metrics of the epoch, without the samples of a lost step."""

    def save(self) -> None:
        """Keep the values."""
        self._saved = [(variable, np.array(variable)) for variable in self.value.metrics_variables]

    def restore(self) -> None:
        """Bring the values back."""
        for variable, value in self._saved:
            variable.assign(value)

    def sync(self) -> None:
        """Leave the metrics: each rank has its own."""


def _check_arguments(given: Mapping[str, Any]) -> None:
    if given["steps_per_epoch"] is not None:
        raise UsageError(
            "fit(steps_per_epoch=...) in elastic training: an epoch is all samples of the dataset, on however "
            "many ranks. Leave it out, or use elastic=False and ud.elastic.run"
        )
    if isinstance(given["callbacks"], keras.callbacks.CallbackList):
        raise UsageError("fit(callbacks=CallbackList) in elastic training: give a list of callbacks")


def _listed(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def _first_epoch(position: Position, first: int) -> int:
    """Return the epoch for Keras to begin with: between two, the earlier one, whose end all ranks reach together.

    Args:
        position: of the training.
        first: epoch of this call of `fit`.
    """
    is_at_border = position.processed == 0 and position.epoch > first
    return max(position.epoch - is_at_border, first)


def _note(seen: dict[int, dict[str, Any]], history: Any) -> None:
    """Add the epochs of one call of Keras' `fit`, which counts them from its `initial_epoch`."""
    if history is not None:
        for i, epoch in enumerate(history.epoch):
            seen[epoch] = {name: values[i] for name, values in history.history.items() if i < len(values)}


def _history(model: Any, seen: Mapping[int, Mapping[str, Any]]) -> Any:
    """Return what `fit` returns, with the epochs that this process has seen."""
    history = keras.callbacks.History()
    history.set_model(model)
    history.epoch = sorted(seen)
    for epoch in history.epoch:
        for name, value in seen[epoch].items():
            history.history.setdefault(name, []).append(value)
    model.history = history
    return history
