"""The PyTorch facade: `import unidist.torch as ud` (or `as hvd`, in a Horovod script)."""

from typing import TYPE_CHECKING

import torch  # noqa: F401 - a facade without its framework is of no use, and says so at once

from unidist.runtime.facade_names import facade_names

if TYPE_CHECKING:
    # What plugins bring is no part of __all__.
    import unidist_context_parallel.torch
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
    from unidist.negotiation.process_sets import ProcessSet, global_process_set
    from unidist.torch import compression, elastic, functions, mpi_ops, optimizer, sync_batch_norm
    from unidist_data_service._torch import data_service as data_service
    from unidist_torch.basics import buffer, cuda_built, device, empty, nccl_built, rocm_built, seed
    from unidist_torch.checkpoint.api import load, redistribute, save
    from unidist_torch.checkpoint.pretrained import load_pretrained, save_pretrained
    from unidist_torch.models.compiled_model import bucketed_backend
    from unidist_torch.models.sync_batch_norm import SyncBatchNorm
    from unidist_torch.operations import (
        Adasum,
        Average,
        GroupHandle,
        Handle,
        Max,
        Min,
        Op,
        Product,
        Sum,
        allgather,
        allgather_async,
        allreduce,
        allreduce_,
        allreduce_async,
        allreduce_async_,
        alltoall,
        alltoall_async,
        barrier,
        broadcast,
        broadcast_,
        broadcast_async,
        broadcast_async_,
        grouped_allgather,
        grouped_allgather_async,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_allreduce_async,
        grouped_allreduce_async_,
        grouped_reducescatter,
        grouped_reducescatter_async,
        join,
        poll,
        recv,
        reducescatter,
        reducescatter_async,
        send,
        sparse_allreduce_async,
        synchronize,
    )
    from unidist_torch.operations.compression import Compression
    from unidist_torch.operations.functions import (
        allgather_object,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
    )
    from unidist_torch.operations.samples import gather_samples
    from unidist_torch.optimizer.clipping import clip_grad_norm_, clip_grad_value_
    from unidist_torch.training.data import shard
    from unidist_torch.training.distributed_optimizer import DistributedOptimizer, distribute
    from unidist_torch.training.metrics import metrics
    from unidist_torch.training.train_step import TrainStep
    from unidist_torch.training.weighted_loss import weighted

    context = unidist_context_parallel.torch

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "GroupHandle", "Handle", "HorovodInternalError", "Max",
    "Min", "Op", "ProcessSet", "Product", "Sum", "SyncBatchNorm", "TrainStep", "add_process_set", "allgather",
    "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "bucketed_backend", "buffer", "ccl_built", "clip_grad_norm_",
    "clip_grad_value_", "compression", "cross_rank", "cross_size", "cuda_built", "data_rank", "data_size", "ddl_built",
    "device", "distribute", "elastic", "empty", "functions", "gather_samples", "global_process_set", "gloo_built",
    "gloo_enabled", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "init", "is_homogeneous", "is_initialized", "join", "load", "load_pretrained", "local_rank", "local_size",
    "metrics", "mpi_built", "mpi_enabled", "mpi_ops", "mpi_threads_supported", "nccl_built", "optimizer", "poll",
    "rank", "recv", "redistribute", "reducescatter", "reducescatter_async", "remove_process_set", "report",
    "rocm_built", "role", "save", "save_pretrained", "seed", "send", "shard", "shutdown", "size",
    "sparse_allreduce_async", "start_timeline", "stop_timeline", "sync_batch_norm", "synchronize", "weighted", "world",
]  # fmt: skip

__getattr__, __dir__ = facade_names(
    __name__,
    {
        "": "compression elastic functions mpi_ops optimizer sync_batch_norm",
        "unidist.errors": "HorovodInternalError",
        "unidist.horovod_api.lifecycle": (
            "add_process_set ccl_built cross_rank cross_size data_rank data_size ddl_built gloo_built "
            "gloo_enabled init is_homogeneous is_initialized local_rank local_size mpi_built mpi_enabled "
            "mpi_threads_supported rank remove_process_set report role shutdown size start_timeline stop_timeline "
            "world"
        ),
        "unidist.negotiation.process_sets": "ProcessSet global_process_set",
        "unidist_torch.basics": "buffer cuda_built device empty nccl_built rocm_built seed",
        "unidist_torch.checkpoint.api": "load redistribute save",
        "unidist_torch.checkpoint.pretrained": "load_pretrained save_pretrained",
        "unidist_torch.models.compiled_model": "bucketed_backend",
        "unidist_torch.models.sync_batch_norm": "SyncBatchNorm",
        "unidist_torch.operations": (
            "Adasum Average GroupHandle Handle Max Min Op Product Sum allgather allgather_async allreduce "
            "allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ "
            "broadcast_async broadcast_async_ grouped_allgather grouped_allgather_async grouped_allreduce "
            "grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter "
            "grouped_reducescatter_async join poll recv reducescatter reducescatter_async send "
            "sparse_allreduce_async synchronize"
        ),
        "unidist_torch.operations.compression": "Compression",
        "unidist_torch.operations.functions": (
            "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters"
        ),
        "unidist_torch.operations.samples": "gather_samples",
        "unidist_torch.optimizer.clipping": "clip_grad_norm_ clip_grad_value_",
        "unidist_torch.training.data": "shard",
        "unidist_torch.training.distributed_optimizer": "DistributedOptimizer distribute",
        "unidist_torch.training.metrics": "metrics",
        "unidist_torch.training.train_step": "TrainStep",
        "unidist_torch.training.weighted_loss": "weighted",
    },
)
