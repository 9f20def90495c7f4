"""`fit` of Keras models on TensorFlow in an elastic job, by a flag: see `unidist_keras.elastic_fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from unidist.checkpoint.format.interface import kept_state
from unidist.elastic.handlers import GeneratorsHandler, StatefulHandler
from unidist.elastic.state import ObjectState
from unidist.elastic.step_training import Policy, Progress, Redistributable
from unidist.strategy.interface import Plan
from unidist_keras import elastic_fit
from unidist_tensorflow.elastic.data import ElasticDataset, elastic_dataset_of
from unidist_tensorflow.elastic.state import TensorFlowKerasState, raising_peer_losses
from unidist_tensorflow.training.iterators import end_in_background
from unidist_tensorflow.training.piecewise_step import PiecewiseTrainStep


class ElasticFit(elastic_fit.ElasticFit):
    """`fit` of one model, through the generations of an elastic job.

    Args:
        model: built or not; `fit` becomes this one's.
        optimizer: bound.
        plan: of the run.
        choice: the user's, see `distribute`.
        prepare: builds the model for a batch of inputs. Collective.
    """

    keeps_division = True

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        plan: Plan,
        choice: bool | Policy | None,
        prepare: Callable[[Any], object],
    ) -> None:
        super().__init__(model, optimizer, plan, choice)
        self._prepare = prepare
        self._batches_of: ElasticDataset | None = None
        self._step: PiecewiseTrainStep | None = None
        self._function: Any = None  # Keras' own train function, of steps in pieces
        self._compiled: tuple[Any, ...] = ()  # what it was made for
        self._batches: Any = None

    @override
    def data_of(self, x: Any) -> Redistributable | None:
        return elastic_dataset_of(x)

    @override
    def prepare(self, data: Redistributable, x: Any) -> None:
        assert isinstance(data, ElasticDataset), "of data_of"
        self._prepare(keras.utils.unpack_x_y_sample_weight(x.element_spec)[0])
        self._batches_of = data
        together = self._plan.divides_model or kept_state(self.model) is not None
        self._step = PiecewiseTrainStep(self.model, self.optimizer, data, together=together)

    @override
    def warm_up(self, data: Redistributable, x: Any) -> None:
        if self._plan.divides_model:
            return  # of which this rank still holds all, and will hold another part: that is another function
        with self.taking_steps():
            assert self._batches_of is not None, "prepared"
            self._batches_of.take_share_alone()
            self._function(iter(x.take(1)))

    @override
    def make_state(self, progress: Progress, others: Mapping[str, Any]) -> ObjectState:
        return FitState(self.model, self.optimizer, progress, others)

    @override
    def raising_peer_losses(self) -> AbstractContextManager[Any]:
        return raising_peer_losses()

    @override
    def train_function(self, calls: elastic_fit.Calls) -> Callable[..., Any]:
        def train(iterator: Any) -> Any:
            return calls(lambda share: self._take_step(iterator._dataset))

        return train

    @contextmanager
    def taking_steps(self) -> Iterator[None]:
        """See `elastic_fit.ElasticFit.taking_steps`: in pieces."""
        model = self.model
        plain_step, plain_function, plain_make = model.train_step, model.train_function, model.make_train_function
        compiled = (model.optimizer, model._compile_loss, model._compile_metrics)  # others after each compile
        if self._function is None or any(a is not b for a, b in zip(compiled, self._compiled, strict=True)):
            assert self._step is not None, "prepared"
            self._compiled = compiled
            model.train_step = self._step
            plain_make(force=True)
            model.train_step = plain_step
            self._function = model.train_function
        assert self._batches_of is not None, "prepared"
        self._batches_of.shares_per_take = model.steps_per_execution
        model.make_train_function = lambda force=False: None
        try:
            yield
        finally:
            model.train_function, model.make_train_function = plain_function, plain_make

    def _take_step(self, dataset: tf.data.Dataset) -> Any:
        """Train on the batches that the dataset has handed out; returns Keras' logs. Collective.

        Args:
            dataset: the elastic dataset, as Keras has wrapped it.
        """
        assert self._batches_of is not None, "prepared"
        if self._batches_of.has_moved:
            last, self._batches = [self._batches], None
            end_in_background(last)
            self._batches = iter(dataset)
        with raising_peer_losses():
            return self._function(self._batches)


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
        self._handlers["metrics"] = elastic_fit.MetricsHandler(model)
        self._handlers["generators"] = GeneratorsHandler(None)
