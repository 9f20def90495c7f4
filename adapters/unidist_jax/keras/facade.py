"""The names of `unidist.keras` for Keras 3 on JAX."""

from unidist_jax.keras.callbacks import (
    BackupAndRestore,
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from unidist_jax.keras.checkpoint import load, redistribute, save
from unidist_jax.keras.data import shard
from unidist_jax.keras.elastic import (
    CommitStateCallback,
    KerasState,
    Policy,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)
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
from unidist_jax.operations import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    allgather_object,
    alltoall,
    barrier,
    broadcast_object,
    join,
    shutdown,
)
from unidist_jax.operations.samples import gather_samples
from unidist_jax.training.weighted_loss import weighted
from unidist_keras.metrics import metrics

__all__ = [
    "Adasum", "Average", "BackupAndRestore", "BestModelCheckpoint", "BroadcastGlobalVariablesCallback",
    "CommitStateCallback", "Compression", "DistributedOptimizer", "KerasState", "LearningRateScheduleCallback",
    "LearningRateWarmupCallback", "Max", "MetricAverageCallback", "Min", "PartialDistributedOptimizer", "Policy",
    "Product", "Sum", "SyncBatchNormalization", "TrainStep", "UpdateBatchStateCallback", "UpdateEpochStateCallback",
    "allgather", "allgather_object", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_object", "cuda_built",
    "device", "distribute", "gather_samples", "join", "load", "load_model", "metrics", "nccl_built", "redistribute",
    "reducescatter", "rocm_built", "run", "save", "seed", "shard", "shutdown", "weighted",
]  # fmt: skip
