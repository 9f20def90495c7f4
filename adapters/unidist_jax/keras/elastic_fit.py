"""`fit` of Keras models on JAX in an elastic job, by a flag: see `unidist_keras.elastic_fit`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import keras
from typing_extensions import override

from unidist.elastic.batches import BatchShare
from unidist.elastic.handlers import GeneratorsHandler, StatefulHandler
from unidist.elastic.state import ObjectState
from unidist.elastic.step_training import Policy, Progress, Redistributable
from unidist.strategy.interface import Plan
from unidist_jax.elastic import ending_programs
from unidist_jax.keras.binding import raise_failure
from unidist_jax.keras.data import ElasticBatches, ShardedBatches
from unidist_jax.keras.elastic import KerasState
from unidist_keras import elastic_fit


class ElasticFit(elastic_fit.ElasticFit):
    """`fit` of one model, through the generations of an elastic job.

    Keras' state of training, which it hands from step to step, is that of the variables after each step here.

    Args:
        model: built or not; `fit` becomes this one's.
        optimizer: bound.
        plan: of the run.
        choice: the user's, see `distribute`.
    """

    def __init__(self, model: Any, optimizer: Any, plan: Plan, choice: bool | Policy | None) -> None:
        super().__init__(model, optimizer, plan, choice)
        self._batches: ElasticBatches | None = None
        self._function: Any = None  # Keras' own train function, of a micro-batch
        self._compiled: tuple[Any, ...] = ()  # what it was made for
        self._logs: Any = None

    @override
    def data_of(self, x: Any) -> Redistributable | None:
        return x.elastic if isinstance(x, ShardedBatches) else None

    @override
    def input_of(self, data: Redistributable, x: Any) -> Any:
        """Return batches without an end, that nobody trains on: Keras counts those of a sequence for one rank."""
        assert isinstance(data, ElasticBatches), "of data_of"
        one = data.batch([0])
        return (one for _ in itertools.count())

    @override
    def prepare(self, data: Redistributable, x: Any) -> None:
        assert isinstance(data, ElasticBatches), "of data_of"
        self._batches = data
        self.model._symbolic_build(data_batch=data.batch([0]))
        if not self.optimizer.built:
            with keras.name_scope(self.optimizer.name, caller=self.optimizer):
                self.optimizer.build(self.model.trainable_variables)

    @override
    def warm_up(self, data: Redistributable, x: Any) -> None:
        assert self._batches is not None, "prepared"
        with self.taking_steps():
            self._train(self._batches.take_share_alone())

    @override
    def make_state(self, progress: Progress, others: Mapping[str, Any]) -> ObjectState:
        return FitState(self.model, self.optimizer, progress, others)

    @override
    def raising_peer_losses(self) -> AbstractContextManager[Any]:
        return ending_programs()

    @contextmanager
    @override
    def taking_steps(self) -> Iterator[None]:
        model = self.model
        plain_step, plain_function, plain_make = model.train_step, model.train_function, model.make_train_function
        plain_number = model.steps_per_execution
        compiled = (model.optimizer, model._compile_loss, model._compile_metrics)  # others after each compile
        if self._function is None or any(a is not b for a, b in zip(compiled, self._compiled, strict=True)):
            self._compiled = compiled
            model.train_step = functools.partial(self._weighted_step, plain_step)
            model.steps_per_execution = 1
            plain_make(force=True)
            model.train_step, model.steps_per_execution = plain_step, plain_number
            self._function = model.train_function
        model.make_train_function = lambda force=False: None
        try:
            yield
        finally:
            model.train_function, model.make_train_function = plain_function, plain_make

    @override
    def train_function(self, calls: elastic_fit.Calls) -> Callable[..., Any]:
        def train(state: Any, iterator: Any) -> tuple[Any, Any]:
            del iterator  # the samples follow the progress of training
            self._assign(state)
            return calls(self._train), self._state()

        return train

    def _train(self, share: BatchShare) -> Any:
        """Train on this rank's samples of a step; returns Keras' logs. Collective."""
        assert self._batches is not None, "prepared"
        assert self._batches.batch_size is not None, "given"
        self._logs = None
        batch = self._batches.batch(share.indices or (0,))
        parts = share.micro_batches(self._batches.batch_size, [jax.tree.leaves(batch)])
        with ending_programs():
            self.optimizer._unidist.accumulate_steps(len(parts))
            for cut, weight in parts:
                self._take_piece(jax.tree.map(cut, batch), weight)
        return self.model.get_metrics_result() if self._logs is None else self._logs

    def _take_piece(self, batch: Any, weight: float) -> None:
        """Train on a micro-batch; Keras keeps its loss in its metrics."""
        logs, state = self._function(self._state(), iter([(batch, jnp.asarray(weight))]))
        raise_failure(wait=True)
        self._assign(state)
        if weight:
            self._logs = logs

    def _weighted_step(self, plain: Callable[..., Any], state: Any, data: Any) -> Any:
        """Train on a micro-batch whose loss has a weight; one of weight 0 leaves metrics, statistics and seeds alone.

        Args:
            plain: the model's own `train_step`, which scales its loss by the optimizer's `scale_loss`.
            state: values of the variables, as `_state` returns them.
            data: a batch as `fit` takes it, and the weight, a scalar.
        """
        batch, weight = data
        with self.optimizer._unidist.weighting_loss(weight):
            logs, (trainable, others, own, metrics) = plain(state, batch)

        def counted(new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
            return [jnp.where(weight > 0, one, other) for one, other in zip(new, old, strict=True)]

        return logs, (trainable, counted(others, state[1]), own, counted(metrics, state[3]))

    def _groups(self) -> tuple[list[Any], ...]:
        model = self.model
        return (
            model.trainable_variables,
            model.non_trainable_variables,
            self.optimizer.variables,
            model.metrics_variables,
        )

    def _state(self) -> tuple[list[Any], ...]:
        return tuple([variable.value for variable in group] for group in self._groups())

    def _assign(self, state: Sequence[Sequence[Any]]) -> None:
        for group, values in zip(self._groups(), state, strict=True):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)
        self.model._jax_state_synced = True


class FitState(KerasState):
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
