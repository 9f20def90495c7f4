"""Horovod's API for Keras: callbacks, optimizers, elastic state and synchronised batch normalisation.

The top of this package: may import any other folder of it.
"""

from unidist_tensorflow.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from unidist_tensorflow.keras.checkpoint import BestModelCheckpoint
from unidist_tensorflow.keras.elastic import (
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from unidist_tensorflow.keras.optimizers import DistributedOptimizer, PartialDistributedOptimizer
from unidist_tensorflow.keras.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "CommitStateCallback", "DistributedOptimizer",
    "KerasState", "LearningRateScheduleCallback", "LearningRateWarmupCallback", "MetricAverageCallback",
    "PartialDistributedOptimizer", "SyncBatchNormalization", "UpdateBatchStateCallback", "UpdateEpochStateCallback",
]  # fmt: skip
