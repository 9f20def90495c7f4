"""Keras callbacks by Horovod's names, on JAX."""

from __future__ import annotations

from typing import Any

import keras

from unidist_jax.compiled import flush, take_failure
from unidist_jax.keras.binding import broadcast_variables, raise_failure
from unidist_jax.keras.checkpoint import load, save
from unidist_keras import backup, callbacks


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives every rank one rank's weights and optimizer state before the first batch.

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
            single = isinstance(local_variables, keras.Variable)
            for variable in [local_variables] if single else local_variables:
                self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leave a variable as it is on each rank."""
        if not isinstance(var, keras.Variable):
            raise ValueError(f"local variables must be variables, not {type(var).__name__}")
        self._local.add(id(var))

    def on_train_begin(self, logs: Any = None) -> None:
        """Forget errors of programs that the script has called before."""
        flush()
        take_failure()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast, the first time: `fit` has built the model and the optimizer. Collective then.

        Raises:
            UnidistError: an earlier step has failed.
        """
        raise_failure()
        if not self.broadcast_done:
            self.broadcast_done = True
            model = self.model
            variables = [*model.weights, *model.optimizer.variables]
            broadcast_variables([each for each in variables if id(each) not in self._local], self.root_rank)


class MetricAverageCallback(callbacks.AveragesMetrics, keras.callbacks.Callback):
    """Averages an epoch's metrics over the ranks, also those of `evaluate`: see `callbacks.AveragesMetrics`."""


class LearningRateScheduleCallback(callbacks.SchedulesLearningRate, keras.callbacks.Callback):
    """Sets the learning rate to a multiple of a first one: see `callbacks.SchedulesLearningRate`."""


class LearningRateWarmupCallback(callbacks.RaisesLearningRate, LearningRateScheduleCallback):
    """Raises the learning rate over the first epochs, batch by batch: see `callbacks.RaisesLearningRate`."""


class BestModelCheckpoint(callbacks.SavesBestModel, keras.callbacks.ModelCheckpoint):
    """Saves the best model, not its weights alone. It must be given a path before training: `filepath`.

    Args:
        monitor: see `callbacks.SavesBestModel`, as all further arguments.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        *,
        filepath: str | None = None,
    ) -> None:
        super().__init__(monitor, verbose, False, mode, save_freq, filepath=filepath)


class BackupAndRestore(backup.BacksUpTraining, keras.callbacks.Callback):
    """Saves the state of `fit` as it goes on, and resumes from it: see `backup.BacksUpTraining`."""

    def _save(self, path: str, *, step: int, keep: int, extra: dict[str, Any]) -> None:
        save(path, self.model, self.model.optimizer, step=step, keep=keep, extra=extra)

    def _load(self, path: str) -> dict[str, Any]:
        return load(path, self.model, self.model.optimizer).extra
