"""The JAX facade: `import unidist.jax as ud`."""

from typing import TYPE_CHECKING

import unidist_jax.compiled  # noqa: F401 - replaces functions of JAX, and imports some of its modules: not while it traces
from unidist.runtime.facade_names import facade_names

if TYPE_CHECKING:
    from unidist.errors import HorovodInternalError
    from unidist.horovod_api.lifecycle import (
        add_process_set,
        cross_rank,
        cross_size,
        data_rank,
        data_size,
        init,
        is_homogeneous,
        is_initialized,
        local_rank,
        local_size,
        rank,
        remove_process_set,
        report,
        role,
        size,
        start_timeline,
        stop_timeline,
        world,
    )
    from unidist.jax import elastic
    from unidist.negotiation.process_sets import ProcessSet, global_process_set
    from unidist_jax.basics import buffer, device, empty, seed
    from unidist_jax.checkpoint import load, redistribute, save
    from unidist_jax.compiled import flush, translated
    from unidist_jax.operations import (
        Adasum,
        Average,
        Compression,
        Max,
        Min,
        Op,
        Product,
        Sum,
        allgather,
        allgather_object,
        allreduce,
        alltoall,
        barrier,
        broadcast,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
        grouped_allgather,
        grouped_allreduce,
        grouped_reducescatter,
        join,
        recv,
        reducescatter,
        send,
        shutdown,
    )
    from unidist_jax.operations.samples import gather_samples
    from unidist_jax.spmd import spmd
    from unidist_jax.training.data import shard
    from unidist_jax.training.distributed_optimizer import DistributedOptimizer, distribute
    from unidist_jax.training.train_step import TrainStep
    from unidist_jax.training.weighted_loss import weighted


if TYPE_CHECKING:
    import unidist_context_parallel.jax
    from unidist_data_service._jax import data_service as data_service

    context = unidist_context_parallel.jax

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max", "Min", "Op",
    "ProcessSet", "Product", "Sum", "TrainStep", "add_process_set", "allgather", "allgather_object", "allreduce",
    "alltoall", "barrier", "broadcast", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters",
    "buffer", "cross_rank", "cross_size", "data_rank", "data_size", "device", "distribute", "elastic", "empty", "flush",
    "gather_samples", "global_process_set", "grouped_allgather", "grouped_allreduce", "grouped_reducescatter", "init",
    "is_homogeneous", "is_initialized", "join", "load", "local_rank", "local_size", "rank", "recv", "redistribute",
    "reducescatter", "remove_process_set", "report", "role", "save", "seed", "send", "shard", "shutdown", "size",
    "spmd", "start_timeline", "stop_timeline", "translated", "weighted", "world",
]  # fmt: skip

__getattr__, __dir__ = facade_names(
    __name__,
    {
        "": "elastic",
        "unidist.errors": "HorovodInternalError",
        "unidist.horovod_api.lifecycle": (
            "add_process_set cross_rank cross_size data_rank data_size init is_homogeneous is_initialized "
            "local_rank local_size rank remove_process_set report role size start_timeline stop_timeline world"
        ),
        "unidist.negotiation.process_sets": "ProcessSet global_process_set",
        "unidist_jax.basics": "buffer device empty seed",
        "unidist_jax.checkpoint": "load redistribute save",
        "unidist_jax.compiled": "flush translated",
        "unidist_jax.operations": (
            "Adasum Average Compression Max Min Op Product Sum allgather allgather_object allreduce alltoall "
            "barrier broadcast broadcast_object broadcast_optimizer_state broadcast_parameters grouped_allgather "
            "grouped_allreduce grouped_reducescatter join recv reducescatter send shutdown"
        ),
        "unidist_jax.operations.samples": "gather_samples",
        "unidist_jax.spmd": "spmd",
        "unidist_jax.training.data": "shard",
        "unidist_jax.training.distributed_optimizer": "DistributedOptimizer distribute",
        "unidist_jax.training.train_step": "TrainStep",
        "unidist_jax.training.weighted_loss": "weighted",
    },
)
