"""Operations and the lifecycle, where Horovod has them: `unidist.tensorflow.mpi_ops`."""

from unidist.horovod_api.lifecycle import (
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
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
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from unidist.horovod_api.reduce_ops import reduction_of as handle_average_backwards_compatibility
from unidist.horovod_api.util import num_rank_is_power_2
from unidist.horovod_api.util import num_rank_is_power_2 as check_num_rank_power_of_2
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist_tensorflow.basics import (
    cuda_built,
    gpu_available,
    local_rank_op,
    local_size_op,
    nccl_built,
    process_set_included_op,
    rank_op,
    rocm_built,
    size_op,
)
from unidist_tensorflow.operations import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    join,
)

__all__ = [
    "Adasum", "Average", "Max", "Min", "ProcessSet", "Product", "Sum", "add_process_set", "allgather", "alltoall",
    "broadcast", "broadcast_", "ccl_built", "check_num_rank_power_of_2", "cross_rank", "cross_size", "cuda_built",
    "ddl_built", "global_process_set", "gloo_built", "gloo_enabled", "gpu_available", "grouped_allgather",
    "handle_average_backwards_compatibility", "init", "is_homogeneous", "is_initialized", "join", "local_rank",
    "local_rank_op", "local_size", "local_size_op", "mpi_built", "mpi_enabled", "mpi_threads_supported",
    "nccl_built", "num_rank_is_power_2", "process_set_included_op", "rank", "rank_op", "remove_process_set",
    "rocm_built", "shutdown", "size", "size_op", "start_timeline", "stop_timeline",
]  # fmt: skip
