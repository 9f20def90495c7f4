"""Distributed training in PyTorch: `distribute`, `TrainStep`, `shard` and Horovod's `DistributedOptimizer`.

The top of this package: may import any other folder of it.
"""

from unidist_torch.training.data import shard
from unidist_torch.training.distributed_optimizer import DistributedOptimizer, distribute
from unidist_torch.training.metrics import metrics, sync_metrics
from unidist_torch.training.train_step import TrainStep
from unidist_torch.training.weighted_loss import weighted

__all__ = ["DistributedOptimizer", "TrainStep", "distribute", "metrics", "shard", "sync_metrics", "weighted"]
