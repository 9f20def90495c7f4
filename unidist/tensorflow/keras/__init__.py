"""The facade for tf.keras: `import unidist.tensorflow.keras as ud` (or `as hvd`, in a Horovod script).

tf.keras is Keras 3, or with TF_USE_LEGACY_KERAS=1 the package tf_keras.
"""

from typing import TYPE_CHECKING

from unidist.runtime.facade_names import facade_names

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
    )
    from unidist.negotiation.process_sets import ProcessSet, global_process_set
    from unidist.tensorflow.keras import callbacks, elastic
    from unidist_tensorflow.basics import cuda_built, device, nccl_built, rocm_built, seed
    from unidist_tensorflow.checkpoint.api import load, redistribute, save
    from unidist_tensorflow.gradients.weighted_loss import weighted
    from unidist_tensorflow.keras.functions import (
        allgather,
        allreduce,
        broadcast,
        broadcast_global_variables,
        load_model,
        reducescatter,
    )
    from unidist_tensorflow.keras.optimizers import PartialDistributedOptimizer
    from unidist_tensorflow.keras.sync_batch_norm import SyncBatchNormalization
    from unidist_tensorflow.operations import Adasum, Average, Sum
    from unidist_tensorflow.operations.compression import Compression
    from unidist_tensorflow.training.data import shard
    from unidist_tensorflow.training.distributed_optimizer import DistributedOptimizer, distribute
    from unidist_tensorflow.training.train_step import TrainStep


__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "PartialDistributedOptimizer", "ProcessSet", "Sum",
    "SyncBatchNormalization", "TrainStep", "add_process_set", "allgather", "allreduce", "broadcast",
    "broadcast_global_variables", "callbacks", "ccl_built", "cross_rank", "cross_size", "cuda_built", "data_rank",
    "data_size", "ddl_built", "device", "distribute", "elastic", "global_process_set", "gloo_built", "gloo_enabled",
    "init", "is_initialized", "load", "load_model", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "redistribute", "reducescatter", "remove_process_set", "report",
    "rocm_built", "role", "save", "seed", "shard", "shutdown", "size", "start_timeline", "stop_timeline", "weighted",
]  # fmt: skip

__getattr__, __dir__ = facade_names(
    __name__,
    {
        "": "callbacks elastic",
        "unidist.horovod_api.lifecycle": (
            "add_process_set ccl_built cross_rank cross_size data_rank data_size ddl_built gloo_built "
            "gloo_enabled init is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported "
            "rank remove_process_set report role shutdown size start_timeline stop_timeline"
        ),
        "unidist.negotiation.process_sets": "ProcessSet global_process_set",
        "unidist_tensorflow.basics": "cuda_built device nccl_built rocm_built seed",
        "unidist_tensorflow.checkpoint.api": "load redistribute save",
        "unidist_tensorflow.gradients.weighted_loss": "weighted",
        "unidist_tensorflow.keras.functions": (
            "allgather allreduce broadcast broadcast_global_variables load_model reducescatter"
        ),
        "unidist_tensorflow.keras.optimizers": "PartialDistributedOptimizer",
        "unidist_tensorflow.keras.sync_batch_norm": "SyncBatchNormalization",
        "unidist_tensorflow.operations": "Adasum Average Sum",
        "unidist_tensorflow.operations.compression": "Compression",
        "unidist_tensorflow.training.data": "shard",
        "unidist_tensorflow.training.distributed_optimizer": "DistributedOptimizer distribute",
        "unidist_tensorflow.training.train_step": "TrainStep",
    },
)
