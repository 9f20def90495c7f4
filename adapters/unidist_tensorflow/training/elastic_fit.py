"""`model.fit` in an elastic job, by a flag: each call of Keras' train function is a transaction.

A step that lost a peer is taken again, by the remaining ranks, before Keras hears of it; so its loop, its progress bar
and the callbacks go on as if nothing had happened. A rank that joins later runs the same `fit`: its steps do nothing
for what the others have done before.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from unidist.elastic.batches import Position
from unidist.elastic.handlers import GeneratorsHandler, StatefulHandler
from unidist.elastic.state import Handler
from unidist.elastic.step_training import Policy, Progress, StepTraining, passes_of_step
from unidist.errors import PeerLostError, UsageError
from unidist.negotiation import allgather_object
from unidist.runtime import context
from unidist.strategy.interface import Plan
from unidist_tensorflow.elastic.data import ElasticDataset, elastic_dataset_of
from unidist_tensorflow.elastic.state import TensorFlowKerasState, raising_peer_losses
from unidist_tensorflow.training.piecewise_step import PiecewiseTrainStep

_log = logging.getLogger("unidist.elastic")


class ElasticFit:
    """`fit` of one model, through the generations of an elastic job.

    Args:
        model: built or not; `fit` becomes this one's.
        optimizer: bound.
        plan: of the run.
        choice: the user's, see `distribute`.
        prepare: builds the model for a batch of inputs. Collective.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        plan: Plan,
        choice: bool | Policy | None,
        prepare: Callable[[Any], object],
    ) -> None:
        self.model, self._optimizer, self._plan = model, optimizer, plan
        self._choice, self._prepare = choice, prepare
        self._plain_fit = model.fit
        self._training: StepTraining | None = None
        self._data: ElasticDataset | None = None
        self._step: PiecewiseTrainStep | None = None
        self._function: Any = None  # Keras' own train function, of steps in pieces
        self._compiled: tuple[Any, ...] = ()  # what it was made for
        self._batches: Any = None
        self._epochs_before = 0  # of earlier calls of `fit`
        model.fit = self.fit

    def fit(self, *args: Any, **options: Any) -> Any:
        """Train as `keras.Model.fit` does, with the same arguments; see docs/elastic.md.

        Raises:
            UsageError: the data cannot be redistributed, or is not that of the calls before.
            SystemExit, StalledError, StateLostError: see `Generations.enter_next_generation`.
        """
        given = inspect.signature(self._plain_fit).bind(*args, **options)
        given.apply_defaults()
        data = elastic_dataset_of(given.arguments["x"])
        if not self._is_chosen(data):
            return self._plain_fit(*args, **options)
        assert data is not None, "chosen"
        _check_arguments(given.arguments)
        training = self._begin(data, given.arguments["x"])
        with self._taking_steps():
            return self._through_generations(training, dict(given.arguments))

    def _is_chosen(self, data: ElasticDataset | None) -> bool:
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
        if data is None and self._choice is None:
            _log.warning(
                "this job is elastic, but the loss of a rank will end it: fit does not train on data of "
                "ud.shard(dataset, batch_size=...), which can be redistributed. See docs/elastic.md"
            )
            return False
        if data is None:
            raise UsageError(
                "elastic=True, and fit's data does not come from ud.shard(dataset, batch_size=...): only that can be "
                "redistributed when ranks join or leave"
            )
        if leader is not None and self._training is None:
            raise UsageError(
                "this job is elastic, and another model's fit keeps its state: train one model, or use elastic=False "
                "for both"
            )
        return True

    def _begin(self, data: ElasticDataset, dataset: tf.data.Dataset) -> StepTraining:
        if self._training is not None:
            if data is not self._data:
                raise UsageError(
                    "fit was called with other data than before: an elastic job goes through the epochs of one dataset "
                    "of ud.shard(). Make it once, before the first fit"
                )
            return self._training
        passes = passes_of_step(self._plan)
        membership = context.current().membership
        self._prepare(keras.utils.unpack_x_y_sample_weight(dataset.element_spec)[0])
        policy = self._choice if isinstance(self._choice, Policy) else Policy()
        self._data = data
        self._step = PiecewiseTrainStep(self.model, self._optimizer, data)
        assert membership is not None, "chosen"
        if membership.assignment is None:
            self._warm_up(data, dataset)
        self._training = StepTraining(
            membership,
            data,
            policy,
            lambda progress: FitState(self.model, self._optimizer, progress, policy.state),
            passes=passes,
        )
        return self._training

    def _warm_up(self, data: ElasticDataset, dataset: tf.data.Dataset) -> None:
        """Take a step alone, so that functions are traced before others wait; the others overwrite its changes."""
        with self._taking_steps():
            data.take_share_alone()
            self._function(iter(dataset.take(1)))

    @contextmanager
    def _taking_steps(self) -> Iterator[None]:
        """Let Keras' `fit` take its steps in pieces, and restore the model's own train function after it."""
        model = self.model
        plain_step, plain_function, plain_make = model.train_step, model.train_function, model.make_train_function
        compiled = (model.optimizer, model._compile_loss, model._compile_metrics)  # others after each compile
        if self._function is None or any(a is not b for a, b in zip(compiled, self._compiled, strict=True)):
            assert self._step is not None, "set by _begin"
            self._compiled = compiled
            model.train_step = self._step
            plain_make(force=True)
            model.train_step = plain_step
            self._function = model.train_function
        assert self._data is not None, "set by _begin"
        self._data.shares_per_take = model.steps_per_execution
        model.make_train_function = lambda force=False: None
        try:
            yield
        finally:
            model.train_function, model.make_train_function = plain_function, plain_make

    def take_step(self, dataset: tf.data.Dataset) -> Any:
        """Train on the batches that the dataset has handed out; returns Keras' logs. Collective.

        Args:
            dataset: the elastic dataset, as Keras has wrapped it.
        """
        assert self._data is not None, "set by _begin"
        if self._data.has_moved:
            self._batches = iter(dataset)
        return self._function(self._batches)

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
            calls = _Calls(self, training, first_epoch=begun)
            model.train_function = calls
            given |= {"initial_epoch": initial + begun - first, "steps_per_epoch": calls.steps_per_epoch}
            reason, is_lost = "", True
            try:
                with raising_peer_losses():
                    self._plain_fit(**given)
                    if training.progress.position < Position(end):
                        training.skip_to(end)  # a callback has ended training, on all ranks
                    training.finish()
                is_lost = False
            except _LostAtBeginningError:
                pass
            except PeerLostError as exc:
                reason = training.reason_of(exc)
            _note(seen, model.history)
            if reason:
                training.enter_next_generation(reason)
        return _history(model, seen)


class _Calls:
    """Keras' train function in one call of its `fit`.

    Each call brings training to where it would be after as many steps in a job to which nothing happens: as a rule by
    a step; by none where that is done already; by more where steps were lost.

    Args:
        fit: whose steps these are.
        training: keeps what belongs to it.
        first_epoch: the one that Keras begins with, as `training` counts them.

    Attributes:
        steps_per_epoch: for Keras' `fit`.
    """

    def __init__(self, fit: ElasticFit, training: StepTraining, *, first_epoch: int) -> None:
        self._fit, self._training = fit, training
        self._epoch, self._call = first_epoch, 0
        progress, per_call = training.progress, fit.model.steps_per_execution
        self.steps_per_epoch = progress.order.num_batches(progress.global_batch)
        self._calls_per_epoch = -(-self.steps_per_epoch // per_call)
        self._samples_per_call = progress.global_batch * per_call
        self._logs: Any = None

    def __call__(self, iterator: Any) -> Any:
        target = self._next_target()
        training = self._training
        while (before := training.progress.position) < target:
            world = context.current()
            training.step(lambda share: self._train(iterator._dataset))
            after = training.progress.position
            if context.current() is not world and after.processed == 0 and after <= before:
                raise _LostAtBeginningError
        return self._fit.model.get_metrics_result() if self._logs is None else self._logs

    def _next_target(self) -> Position:
        self._call += 1
        if self._call < self._calls_per_epoch:
            return Position(self._epoch, self._call * self._samples_per_call)
        self._epoch, self._call = self._epoch + 1, 0
        return Position(self._epoch)

    def _train(self, dataset: tf.data.Dataset) -> float:
        with raising_peer_losses():
            self._logs = self._fit.take_step(dataset)
        return math.nan  # Keras keeps the loss, in its metrics


class _LostAtBeginningError(Exception):
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


class FitState(TensorFlowKerasState):
    """Model, optimizer, progress and the other state of training.

    Args:
        model: this rank's, compiled.
        optimizer: bound.
        progress: of the training; an attribute.
        others: objects with `state_dict` and `load_state_dict`.
    """

    progress: Progress

    def __init__(self, model: Any, optimizer: Any, progress: Progress, others: Mapping[str, Any]) -> None:
        super().__init__(model, optimizer, progress=progress)
        self._handlers.update({f"state.{name}": StatefulHandler(value) for name, value in others.items()})
        self._handlers["metrics"] = _MetricsHandler(model)
        self._handlers["generators"] = GeneratorsHandler(None)


class _MetricsHandler(Handler):
    """This rank's metrics of the epoch, without the samples of a lost step."""

    def save(self) -> None:
        self._saved = [(variable, variable.numpy()) for variable in self.value.metrics_variables]

    def restore(self) -> None:
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
