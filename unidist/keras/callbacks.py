"""Keras callbacks by Horovod's names: `unidist.keras.callbacks`."""

from unidist_tensorflow.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from unidist_tensorflow.keras.checkpoint import BestModelCheckpoint

__all__ = [
    "BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback",
    "LearningRateWarmupCallback", "MetricAverageCallback",
]  # fmt: skip
