"""The TensorFlow facade: `import unidist.tensorflow as ud` (or `as hvd`, in a Horovod script)."""

from typing import TYPE_CHECKING

import tensorflow  # noqa: F401 - a facade without its framework is of no use, and says so at once

from unidist.runtime.facade_names import facade_names

if TYPE_CHECKING:
    from unidist.errors import HorovodInternalError
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
        is_homogeneous,
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
    from unidist.horovod_api.reduce_ops import reduction_of as handle_average_backwards_compatibility
    from unidist.horovod_api.util import num_rank_is_power_2 as check_num_rank_power_of_2
    from unidist.negotiation.process_sets import ProcessSet, global_process_set
    from unidist.tensorflow import compression, data, elastic, functions, keras, mpi_ops, sync_batch_norm
    from unidist_tensorflow.basics import (
        buffer,
        cuda_built,
        device,
        empty,
        gpu_available,
        local_rank_op,
        local_size_op,
        nccl_built,
        process_set_included_op,
        rank_op,
        rocm_built,
        seed,
        size_op,
    )
    from unidist_tensorflow.checkpoint.api import load, redistribute, save
    from unidist_tensorflow.gradients.samples import gather_samples
    from unidist_tensorflow.gradients.weighted_loss import weighted
    from unidist_tensorflow.keras.optimizers import PartialDistributedOptimizer
    from unidist_tensorflow.keras.sync_batch_norm import SyncBatchNormalization
    from unidist_tensorflow.operations import (
        Adasum,
        Average,
        Max,
        Min,
        Op,
        Product,
        Sum,
        allgather,
        allreduce,
        alltoall,
        barrier,
        broadcast,
        broadcast_,
        grouped_allgather,
        grouped_allreduce,
        grouped_reducescatter,
        join,
        recv,
        reducescatter,
        send,
    )
    from unidist_tensorflow.operations.compression import Compression
    from unidist_tensorflow.operations.functions import (
        BroadcastGlobalVariablesHook,
        allgather_object,
        broadcast_global_variables,
        broadcast_object,
        broadcast_object_fn,
        broadcast_variables,
    )
    from unidist_tensorflow.optimizer.tape import DistributedGradientTape, PartialDistributedGradientTape
    from unidist_tensorflow.training.data import shard
    from unidist_tensorflow.training.distributed_optimizer import distribute
    from unidist_tensorflow.training.tf1 import DistributedOptimizer
    from unidist_tensorflow.training.train_step import TrainStep


if TYPE_CHECKING:
    from unidist_data_service._tensorflow import data_service as data_service

__all__ = [
    "Adasum", "Average", "BroadcastGlobalVariablesHook", "Compression", "DistributedGradientTape",
    "DistributedOptimizer", "HorovodInternalError", "Max", "Min", "Op", "PartialDistributedGradientTape",
    "PartialDistributedOptimizer", "ProcessSet", "Product", "Sum", "SyncBatchNormalization", "TrainStep",
    "add_process_set", "allgather", "allgather_object", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_",
    "broadcast_global_variables", "broadcast_object", "broadcast_object_fn", "broadcast_variables", "buffer",
    "ccl_built", "check_num_rank_power_of_2", "compression", "cross_rank", "cross_size", "cuda_built", "data",
    "data_rank", "data_size", "ddl_built", "device", "distribute", "elastic", "empty", "functions", "gather_samples",
    "global_process_set", "gloo_built", "gloo_enabled", "gpu_available", "grouped_allgather", "grouped_allreduce",
    "grouped_reducescatter", "handle_average_backwards_compatibility", "init", "is_homogeneous", "is_initialized",
    "join", "keras", "load", "local_rank", "local_rank_op", "local_size", "local_size_op", "mpi_built", "mpi_enabled",
    "mpi_ops", "mpi_threads_supported", "nccl_built", "process_set_included_op", "rank", "rank_op", "recv",
    "redistribute", "reducescatter", "remove_process_set", "report", "rocm_built", "role", "save", "seed", "send",
    "shard", "shutdown", "size", "size_op", "start_timeline", "stop_timeline", "sync_batch_norm", "weighted", "world",
]  # fmt: skip

__getattr__, __dir__ = facade_names(
    __name__,
    {
        "": "compression data elastic functions keras mpi_ops sync_batch_norm",
        "unidist.errors": "HorovodInternalError",
        "unidist.horovod_api.lifecycle": (
            "add_process_set ccl_built cross_rank cross_size data_rank data_size ddl_built gloo_built "
            "gloo_enabled init is_homogeneous is_initialized local_rank local_size mpi_built mpi_enabled "
            "mpi_threads_supported rank remove_process_set report role shutdown size start_timeline stop_timeline "
            "world"
        ),
        "unidist.horovod_api.reduce_ops:reduction_of": "handle_average_backwards_compatibility",
        "unidist.horovod_api.util:num_rank_is_power_2": "check_num_rank_power_of_2",
        "unidist.negotiation.process_sets": "ProcessSet global_process_set",
        "unidist_tensorflow.basics": (
            "buffer cuda_built device empty gpu_available local_rank_op local_size_op nccl_built "
            "process_set_included_op rank_op rocm_built seed size_op"
        ),
        "unidist_tensorflow.checkpoint.api": "load redistribute save",
        "unidist_tensorflow.gradients.samples": "gather_samples",
        "unidist_tensorflow.gradients.weighted_loss": "weighted",
        "unidist_tensorflow.keras.optimizers": "PartialDistributedOptimizer",
        "unidist_tensorflow.keras.sync_batch_norm": "SyncBatchNormalization",
        "unidist_tensorflow.operations": (
            "Adasum Average Max Min Op Product Sum allgather allreduce alltoall barrier broadcast broadcast_ "
            "grouped_allgather grouped_allreduce grouped_reducescatter join recv reducescatter send"
        ),
        "unidist_tensorflow.operations.compression": "Compression",
        "unidist_tensorflow.operations.functions": (
            "BroadcastGlobalVariablesHook allgather_object broadcast_global_variables broadcast_object "
            "broadcast_object_fn broadcast_variables"
        ),
        "unidist_tensorflow.optimizer.tape": "DistributedGradientTape PartialDistributedGradientTape",
        "unidist_tensorflow.training.data": "shard",
        "unidist_tensorflow.training.distributed_optimizer": "distribute",
        "unidist_tensorflow.training.tf1": "DistributedOptimizer",
        "unidist_tensorflow.training.train_step": "TrainStep",
    },
)
