"""Distributed training in PyTorch: `distribute`, `TrainStep`, `shard` and Horovod's `DistributedOptimizer`.

The top of this package: may import any other folder of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_torch.training.data import shard
    from unidist_torch.training.distributed_optimizer import DistributedOptimizer, distribute
    from unidist_torch.training.metrics import sync_metrics
    from unidist_torch.training.train_step import TrainStep
    from unidist_torch.training.weighted_loss import weighted

__all__ = ["DistributedOptimizer", "TrainStep", "distribute", "shard", "sync_metrics", "weighted"]

__getattr__ = lazy_names(
    __name__,
    {
        "data": "shard",
        "distributed_optimizer": "DistributedOptimizer distribute",
        "metrics": "sync_metrics",
        "train_step": "TrainStep",
        "weighted_loss": "weighted",
    },
)
