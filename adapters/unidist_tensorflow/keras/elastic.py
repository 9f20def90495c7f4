"""Elastic state of Keras models, and callbacks that maintain it, by Horovod's names."""

from __future__ import annotations

from typing import Any

from unidist.elastic.state import State
from unidist.elastic.step_training import Policy
from unidist_tensorflow.elastic.state import TensorFlowKerasState, run
from unidist_tensorflow.keras_api import api

__all__ = ["CommitStateCallback", "KerasState", "Policy", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


class KerasState(TensorFlowKerasState):
    """State of a Keras model and its optimizer: `KerasState(model, epoch=0, batch=0)`.

    Args:
        model: built.
        optimizer: default: the one that the model was compiled with.
        values: further attributes.
    """

    def __init__(self, model: Any, optimizer: Any = None, **values: Any) -> None:
        super().__init__(model, optimizer=optimizer, **values)


class CommitStateCallback(api.callbacks.Callback):
    """Commits a state every few batches, and at the end of each epoch.

    Args:
        state: to commit.
        batches_per_commit: batches between two commits.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Start counting, at the same batch on every rank."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit if it is due."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self.commit()

    def commit(self) -> None:
        """Commit now; a derived class may do more."""
        self.state.commit()


class UpdateBatchStateCallback(api.callbacks.Callback):
    """Keeps the number of the batch in `state.batch`; 0 at the end of an epoch.

    Args:
        state: has an attribute `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Reset the number of steps of an epoch."""
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Shorten the first epoch after a reset by the batches that were processed."""
        if self.params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin with batch 0 again."""
        self.state.batch = 0


class UpdateEpochStateCallback(api.callbacks.Callback):
    """Keeps the number of epochs that were completed, over resets, in `state.epoch`.

    Args:
        state: has an attribute `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Count from the epoch of the state."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count an epoch."""
        self.state.epoch = self.initial_epoch + epoch + 1
