"""Named operations on tensors, with Horovod's signatures, in eager mode, in a `tf.function` and in TF1 graphs.

Matching: the ranks' operations meet by `name`, in whatever order they are submitted. In eager mode, operations without
a name are numbered per kind and process set, so those must come in the same order on every rank. In graphs a name is
made from the tensor's, as Horovod does (`graph.default_name`), name scopes included. Shapes, dtypes and reductions must
be equal on every rank (an all-gather's and all-to-all's dim 0 may differ), else MismatchError is raised on every rank,
and the runtime stays usable.

Tensors that are not in host memory are copied there and back.

May import the modules at the root of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.horovod_api.reduce_ops import Op
    from unidist_tensorflow.operations.compression import Compression
    from unidist_tensorflow.operations.functions import (
        BroadcastGlobalVariablesHook,
        allgather_object,
        broadcast_global_variables,
        broadcast_object,
        broadcast_object_fn,
        broadcast_variables,
    )
    from unidist_tensorflow.operations.movement import (
        allgather,
        alltoall,
        barrier,
        broadcast,
        broadcast_,
        grouped_allgather,
        join,
        recv,
        send,
    )
    from unidist_tensorflow.operations.reductions import (
        Adasum,
        Average,
        Max,
        Min,
        Product,
        Sum,
        allreduce,
        grouped_allreduce,
        grouped_reducescatter,
        reducescatter,
    )

__all__ = [
    "Adasum", "Average", "BroadcastGlobalVariablesHook", "Compression", "Max", "Min", "Op", "Product", "Sum",
    "allgather", "allgather_object", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_",
    "broadcast_global_variables", "broadcast_object", "broadcast_object_fn", "broadcast_variables",
    "grouped_allgather", "grouped_allreduce", "grouped_reducescatter", "join", "recv", "reducescatter", "send",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "compression": "Compression",
        "functions": (
            "BroadcastGlobalVariablesHook allgather_object broadcast_global_variables broadcast_object "
            "broadcast_object_fn broadcast_variables"
        ),
        "movement": "allgather alltoall barrier broadcast broadcast_ grouped_allgather join recv send",
        "reductions": (
            "Adasum Average Max Min Op Product Sum allreduce grouped_allreduce grouped_reducescatter reducescatter"
        ),
    },
)
