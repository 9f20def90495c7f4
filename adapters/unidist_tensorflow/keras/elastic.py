"""Elastic state of Keras models, and callbacks that maintain it, by Horovod's names."""

from __future__ import annotations

from typing import Any

from unidist.elastic.step_training import Policy
from unidist_keras import callbacks
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


class CommitStateCallback(callbacks.CommitsState, api.callbacks.Callback):
    """Commits a state every few batches, and at the end of each epoch: see `callbacks.CommitsState`."""


class UpdateBatchStateCallback(callbacks.KeepsBatch, api.callbacks.Callback):
    """Keeps the number of the batch in `state.batch`; 0 at the end of an epoch: see `callbacks.KeepsBatch`."""


class UpdateEpochStateCallback(callbacks.KeepsEpoch, api.callbacks.Callback):
    """Keeps the number of epochs that were completed, over resets, in `state.epoch`: see `callbacks.KeepsEpoch`."""
