"""The names of `unidist.keras` for Keras 3 on TensorFlow."""

from unidist.horovod_api.lifecycle import shutdown
from unidist_keras.metrics import metrics
from unidist_tensorflow.basics import cuda_built, device, nccl_built, rocm_built, seed
from unidist_tensorflow.checkpoint.api import load, redistribute, save
from unidist_tensorflow.elastic.state import TensorFlowKerasState, run
from unidist_tensorflow.gradients.samples import gather_samples
from unidist_tensorflow.gradients.weighted_loss import weighted
from unidist_tensorflow.keras.callbacks import (
    BackupAndRestore,
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from unidist_tensorflow.keras.checkpoint import BestModelCheckpoint
from unidist_tensorflow.keras.elastic import (
    CommitStateCallback,
    KerasState,
    Policy,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from unidist_tensorflow.keras.functions import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    load_model,
    reducescatter,
)
from unidist_tensorflow.keras.optimizers import DistributedOptimizer, PartialDistributedOptimizer
from unidist_tensorflow.keras.sync_batch_norm import SyncBatchNormalization
from unidist_tensorflow.operations import Adasum, Average, Max, Min, Product, Sum, alltoall, barrier, join
from unidist_tensorflow.operations.compression import Compression
from unidist_tensorflow.operations.functions import allgather_object, broadcast_object
from unidist_tensorflow.training.data import shard
from unidist_tensorflow.training.distributed_optimizer import distribute
from unidist_tensorflow.training.train_step import TrainStep

__all__ = [
    "Adasum", "Average", "BackupAndRestore", "BestModelCheckpoint", "BroadcastGlobalVariablesCallback",
    "CommitStateCallback", "Compression", "DistributedOptimizer", "KerasState", "LearningRateScheduleCallback",
    "LearningRateWarmupCallback", "Max", "MetricAverageCallback", "Min", "PartialDistributedOptimizer", "Policy",
    "Product", "Sum", "SyncBatchNormalization", "TensorFlowKerasState", "TrainStep", "UpdateBatchStateCallback",
    "UpdateEpochStateCallback", "allgather", "allgather_object", "allreduce", "alltoall", "barrier", "broadcast",
    "broadcast_global_variables", "broadcast_object", "cuda_built", "device", "distribute", "gather_samples", "join",
    "load", "load_model", "metrics", "nccl_built", "redistribute", "reducescatter", "rocm_built", "run", "save", "seed",
    "shard", "shutdown", "weighted",
]  # fmt: skip
