"""The names of `unidist.keras` for Keras 3 on JAX."""

from unidist_jax.keras.callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from unidist_jax.keras.data import shard
from unidist_jax.keras.functions import (
    allgather,
    allreduce,
    broadcast,
    cuda_built,
    device,
    load_model,
    nccl_built,
    reducescatter,
    rocm_built,
    seed,
)
from unidist_jax.keras.sync_batch_norm import SyncBatchNormalization
from unidist_jax.keras.train_step import TrainStep
from unidist_jax.keras.training import DistributedOptimizer, PartialDistributedOptimizer, distribute
from unidist_jax.operations import Adasum, Average, Compression, Sum, shutdown

__all__ = [
    "Adasum", "Average", "BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "Compression",
    "DistributedOptimizer", "LearningRateScheduleCallback", "LearningRateWarmupCallback", "MetricAverageCallback",
    "PartialDistributedOptimizer", "Sum", "SyncBatchNormalization", "TrainStep", "allgather", "allreduce", "broadcast",
    "cuda_built", "device", "distribute", "load_model", "nccl_built", "reducescatter", "rocm_built", "seed", "shard",
    "shutdown",
]  # fmt: skip
