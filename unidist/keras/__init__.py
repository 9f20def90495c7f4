"""The Keras facade: `import unidist.keras as ud` (or `as hvd`, in a Horovod script).

Keras 3 on TensorFlow or on JAX, as KERAS_BACKEND says; the reference is that of TensorFlow.
"""

from typing import TYPE_CHECKING

from unidist.keras._backend import names_of_backend

if TYPE_CHECKING:
    from unidist.horovod_api.lifecycle import (
        add_process_set,
        ccl_built,
        cross_rank,
        cross_size,
        data_rank,
        data_size,
        ddl_built,
        gloo_built,
        gloo_enabled,
        init,
        is_initialized,
        local_rank,
        local_size,
        mpi_built,
        mpi_enabled,
        mpi_threads_supported,
        rank,
        remove_process_set,
        report,
        role,
        shutdown,
        size,
        start_timeline,
        stop_timeline,
        world,
    )
    from unidist.keras import callbacks, elastic
    from unidist.negotiation.process_sets import ProcessSet, global_process_set
    from unidist_keras.metrics import metrics
    from unidist_tensorflow.basics import cuda_built, device, nccl_built, rocm_built, seed
    from unidist_tensorflow.checkpoint.api import load, redistribute, save
    from unidist_tensorflow.gradients.samples import gather_samples
    from unidist_tensorflow.gradients.weighted_loss import weighted
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
    "Adasum", "Average", "Compression", "DistributedOptimizer", "Max", "Min", "PartialDistributedOptimizer",
    "ProcessSet", "Product", "Sum", "SyncBatchNormalization", "TrainStep", "add_process_set", "allgather",
    "allgather_object", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_global_variables",
    "broadcast_object", "callbacks", "ccl_built", "cross_rank", "cross_size", "cuda_built", "data_rank", "data_size",
    "ddl_built", "device", "distribute", "elastic", "gather_samples", "global_process_set", "gloo_built",
    "gloo_enabled", "init", "is_initialized", "join", "load", "load_model", "local_rank", "local_size", "metrics",
    "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "redistribute", "reducescatter",
    "remove_process_set", "report", "rocm_built", "role", "save", "seed", "shard", "shutdown", "size", "start_timeline",
    "stop_timeline", "weighted", "world",
]  # fmt: skip

__getattr__ = names_of_backend(
    __name__,
    {
        "": "callbacks elastic",
        "unidist.horovod_api.lifecycle": (
            "add_process_set ccl_built cross_rank cross_size data_rank data_size ddl_built gloo_built "
            "gloo_enabled init is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported "
            "rank remove_process_set report role size start_timeline stop_timeline world"
        ),
        "unidist.negotiation.process_sets": "ProcessSet global_process_set",
    },
)
