"""Named operations on tensors, with Horovod's signatures.

Matching: the ranks' operations meet by `name`, in whatever order they are submitted; operations without a name
are numbered per kind, so those must come in the same order on every rank. Shapes, dtypes and reductions must be
equal on every rank (an all-gather's and all-to-all's dim 0 may differ), else MismatchError is raised on every
rank, and the runtime stays usable.
"""

from unidist_torch.handles import Handle, poll, synchronize
from unidist_torch.movement import (
    allgather,
    allgather_async,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    recv,
    send,
)
from unidist_torch.reductions import (
    Average,
    Max,
    Min,
    Op,
    Product,
    Sum,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    reducescatter,
    reducescatter_async,
)

__all__ = [
    "Average", "Handle", "Max", "Min", "Op", "Product", "Sum", "allgather", "allgather_async", "allreduce",
    "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "poll", "recv", "reducescatter", "reducescatter_async", "send",
    "synchronize",
]  # fmt: skip
