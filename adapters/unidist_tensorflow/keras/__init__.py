"""Horovod's API for Keras: callbacks, optimizers, elastic state and synchronised batch normalisation.

The top of this package: may import any other folder of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
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

__getattr__ = lazy_names(
    __name__,
    {
        "callbacks": (
            "BroadcastGlobalVariablesCallback LearningRateScheduleCallback LearningRateWarmupCallback "
            "MetricAverageCallback"
        ),
        "checkpoint": "BestModelCheckpoint",
        "elastic": "CommitStateCallback KerasState UpdateBatchStateCallback UpdateEpochStateCallback",
        "optimizers": "DistributedOptimizer PartialDistributedOptimizer",
        "sync_batch_norm": "SyncBatchNormalization",
    },
)
