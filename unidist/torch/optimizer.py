"""The distributed optimizer, where Horovod has it: `unidist.torch.optimizer`."""

from unidist_torch.training.distributed_optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
