"""Distributed training in TensorFlow: `distribute`, `TrainStep`, `shard`, elastic `fit` and optimizers of TF1.

May import any other folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_tensorflow.training.data import shard
    from unidist_tensorflow.training.distributed_optimizer import distribute
    from unidist_tensorflow.training.iterators import end_in_background, read_to_its_end
    from unidist_tensorflow.training.lazy_init import lacks_value
    from unidist_tensorflow.training.step_runner import LossFunction, StepRunner, structure_of
    from unidist_tensorflow.training.tf1 import DistributedOptimizer
    from unidist_tensorflow.training.train_step import TrainStep
    from unidist_tensorflow.training.verification import before_step
    from unidist_tensorflow.training.waiting import measured

__all__ = [
    "DistributedOptimizer", "LossFunction", "StepRunner", "TrainStep", "before_step", "distribute",
    "end_in_background", "lacks_value", "measured", "read_to_its_end", "shard", "structure_of",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "data": "shard",
        "distributed_optimizer": "distribute",
        "iterators": "end_in_background read_to_its_end",
        "lazy_init": "lacks_value",
        "step_runner": "LossFunction StepRunner structure_of",
        "tf1": "DistributedOptimizer",
        "train_step": "TrainStep",
        "verification": "before_step",
        "waiting": "measured",
    },
)
