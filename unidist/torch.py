"""The PyTorch facade: `import unidist.torch as ud` (or `as hvd`, in a Horovod script)."""

from unidist_torch.basics import (
    buffer,
    cross_rank,
    cross_size,
    empty,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    world,
)
from unidist_torch.distribute import DistributedOptimizer, distribute
from unidist_torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from unidist_torch.operations import (
    Average,
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
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    poll,
    recv,
    reducescatter,
    reducescatter_async,
    send,
    synchronize,
)

__all__ = [
    "Average", "DistributedOptimizer", "Handle", "Max", "Min", "Op", "Product", "Sum", "allgather", "allgather_async",
    "allgather_object", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "barrier",
    "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "buffer", "cross_rank", "cross_size", "distribute", "empty", "init", "is_initialized",
    "local_rank", "local_size", "poll", "rank", "recv", "reducescatter", "reducescatter_async", "send", "shutdown",
    "size", "synchronize", "world",
]  # fmt: skip
