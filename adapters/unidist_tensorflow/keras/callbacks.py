"""Keras callbacks by Horovod's names, for the Keras that `tf.keras` is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from unidist_keras import backup, callbacks
from unidist_tensorflow.checkpoint.api import load, save
from unidist_tensorflow.keras_api import IS_LEGACY, VARIABLES, api, build_legacy_optimizer, is_old
from unidist_tensorflow.memory import Array
from unidist_tensorflow.operations.functions import broadcast_variables
from unidist_tensorflow.operations.reductions import Average, grouped_allreduce
from unidist_tensorflow.optimizer.inner_step import has_sharded_state


class BroadcastGlobalVariablesCallback(api.callbacks.Callback):
    """Gives every rank one rank's weights and optimizer state: before the first batch, or after it if built by it.

    `distribute` does this by itself; it is for `DistributedOptimizer`.

    Args:
        root_rank: whose they are.
        device: for Horovod's sake: variables travel from host memory.
        local_variables: one variable or several that stay as they are.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local: set[int] = set()
        if local_variables is not None:
            single = isinstance(local_variables, VARIABLES)
            for variable in [local_variables] if single else local_variables:
                self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leave a variable as it is on each rank."""
        if not isinstance(var, VARIABLES):
            raise ValueError(f"local variables must be variables, not {type(var).__name__}")
        self._local.add(id(var))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast, if there is a built model and optimizer."""
        optimizer = self.model.optimizer
        if self.model.built and IS_LEGACY and not self.broadcast_done:
            build_legacy_optimizer(optimizer, self.model.trainable_variables)  # Keras 3's is built before
        if self.model.built and (IS_LEGACY or optimizer.built):
            self._broadcast()

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast, if that was not possible before the batch; by Horovod's name, for loops that call it."""
        self._broadcast()

    def _broadcast(self) -> None:
        if not self.broadcast_done:
            self.broadcast_done = True
            optimizer = self.model.optimizer
            if has_sharded_state(optimizer):
                variables = optimizer._unidist.inner.equal_everywhere(self.model)
            else:
                own = optimizer.variables
                variables = [*self.model.weights, *(own() if callable(own) else own)]
            broadcast_variables([each for each in variables if id(each) not in self._local], self.root_rank)


class MetricAverageCallback(callbacks.AveragesMetrics, api.callbacks.Callback):
    """Averages an epoch's metrics over the ranks, also those of `evaluate`: see `callbacks.AveragesMetrics`."""

    def _means(self, values: Sequence[Array], name: str) -> Sequence[Any]:
        return grouped_allreduce([tf.constant(value) for value in values], op=Average, name=name)


class LearningRateScheduleCallback(callbacks.SchedulesLearningRate, api.callbacks.Callback):
    """Sets the learning rate to a multiple of a first one: see `callbacks.SchedulesLearningRate`."""

    def _momentums(self, optimizer: Any) -> Sequence[Any]:
        if not (IS_LEGACY and is_old(optimizer)):
            return super()._momentums(optimizer)
        built = "momentum" in optimizer.get_slot_names()
        return [optimizer.get_slot(each, "momentum") for each in self.model.trainable_variables] if built else []


class LearningRateWarmupCallback(callbacks.RaisesLearningRate, LearningRateScheduleCallback):
    """Raises the learning rate over the first epochs, batch by batch: see `callbacks.RaisesLearningRate`."""


class BestModelCheckpoint(callbacks.SavesBestModel, api.callbacks.ModelCheckpoint):
    """Saves the best model: see `callbacks.SavesBestModel`."""


class BackupAndRestore(backup.BacksUpTraining, api.callbacks.Callback):
    """Saves the state of `fit` as it goes on, and resumes from it: see `backup.BacksUpTraining`."""

    def _save(self, path: str, *, step: int, keep: int, extra: dict[str, Any]) -> None:
        save(path, self.model, self.model.optimizer, step=step, keep=keep, extra=extra)

    def _load(self, path: str) -> dict[str, Any]:
        return load(path, self.model, self.model.optimizer).extra


__all__: Sequence[str] = [
    "BackupAndRestore",
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
