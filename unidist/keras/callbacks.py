"""Keras callbacks by Horovod's names: `unidist.keras.callbacks`."""

from typing import TYPE_CHECKING

from unidist.keras._backend import names_of_backend

if TYPE_CHECKING:
    from unidist_tensorflow.keras.callbacks import (
        BackupAndRestore,
        BroadcastGlobalVariablesCallback,
        LearningRateScheduleCallback,
        LearningRateWarmupCallback,
        MetricAverageCallback,
    )
    from unidist_tensorflow.keras.checkpoint import BestModelCheckpoint

__all__ = [
    "BackupAndRestore", "BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback",
    "LearningRateWarmupCallback", "MetricAverageCallback",
]  # fmt: skip

__getattr__ = names_of_backend(__name__)
