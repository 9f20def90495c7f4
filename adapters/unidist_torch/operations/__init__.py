"""Named operations on tensors, with Horovod's signatures.

Matching: the ranks' operations meet by `name`, in whatever order they are submitted; operations without a name
are numbered per kind and process set, so those must come in the same order on every rank. Shapes, dtypes and
reductions must be equal on every rank (an all-gather's and all-to-all's dim 0 may differ), else MismatchError is
raised on every rank, and the runtime stays usable.

May import the modules at the root of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.horovod_api.reduce_ops import Op
    from unidist_torch.operations import communicators, differentiable
    from unidist_torch.operations.compression import Compression
    from unidist_torch.operations.functions import (
        allgather_object,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
    )
    from unidist_torch.operations.handles import GroupHandle, Handle, poll, synchronize
    from unidist_torch.operations.movement import (
        allgather,
        allgather_async,
        alltoall,
        alltoall_async,
        barrier,
        broadcast,
        broadcast_,
        broadcast_async,
        broadcast_async_,
        grouped_allgather,
        grouped_allgather_async,
        join,
        recv,
        send,
        sparse_allreduce_async,
    )
    from unidist_torch.operations.reductions import (
        Adasum,
        Average,
        Max,
        Min,
        Product,
        Sum,
        allreduce,
        allreduce_,
        allreduce_async,
        allreduce_async_,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_allreduce_async,
        grouped_allreduce_async_,
        grouped_reducescatter,
        grouped_reducescatter_async,
        reducescatter,
        reducescatter_async,
    )
    from unidist_torch.operations.samples import gather_samples

__all__ = [
    "Adasum", "Average", "Compression", "GroupHandle", "Handle", "Max", "Min", "Op", "Product", "Sum", "allgather",
    "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "communicators", "differentiable", "gather_samples",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "join", "poll", "recv", "reducescatter", "reducescatter_async", "send", "sparse_allreduce_async", "synchronize",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "": "communicators differentiable",
        "compression": "Compression",
        "functions": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
        "handles": "GroupHandle Handle poll synchronize",
        "movement": (
            "allgather allgather_async alltoall alltoall_async barrier broadcast broadcast_ broadcast_async "
            "broadcast_async_ grouped_allgather grouped_allgather_async join recv send sparse_allreduce_async"
        ),
        "reductions": (
            "Adasum Average Max Min Op Product Sum allreduce allreduce_ allreduce_async allreduce_async_ "
            "grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ "
            "grouped_reducescatter grouped_reducescatter_async reducescatter reducescatter_async"
        ),
        "samples": "gather_samples",
    },
)
