"""Named operations on arrays and trees of arrays, with Horovod's names: at once, and within whatever JAX traces.

Matching: the ranks' operations meet by `name`, in whatever order they are submitted. Operations without a name are
numbered per kind and process set, those that are called at once apart from those that are traced. So they must be
called, or traced, in the same order on every rank. Shapes, dtypes and reductions must be equal on every rank, else
MismatchError is raised on every rank, and the runtime stays usable.

Within `jit`, `scan`, `while_loop`, `cond`, `vmap`, `remat` and `grad`, operations run where the program runs: one at a
time, in the order in which they were traced, also if nobody uses their results. Equal calls stay two. So all ranks
trace them in the same order, and take the same branches. Errors there are JAX's (`JaxRuntimeError`, or ValueError) with
the text of unidist's; `translated()` gives the error itself.

May import `compiled`, `spmd` and the modules at the root of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.horovod_api.reduce_ops import Op
    from unidist_jax.operations.compression import Compression
    from unidist_jax.operations.functions import (
        allgather_object,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
        shutdown,
    )
    from unidist_jax.operations.movement import (
        allgather,
        alltoall,
        barrier,
        broadcast,
        grouped_allgather,
        join,
        recv,
        send,
    )
    from unidist_jax.operations.reductions import (
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
    from unidist_jax.operations.samples import gather_samples

__all__ = [
    "Adasum", "Average", "Compression", "Max", "Min", "Op", "Product", "Sum", "allgather", "allgather_object",
    "allreduce", "alltoall", "barrier", "broadcast", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "gather_samples", "grouped_allgather", "grouped_allreduce", "grouped_reducescatter", "join",
    "recv", "reducescatter", "send", "shutdown",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "compression": "Compression",
        "functions": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters shutdown",
        "movement": "allgather alltoall barrier broadcast grouped_allgather join recv send",
        "reductions": (
            "Adasum Average Max Min Op Product Sum allreduce grouped_allreduce grouped_reducescatter reducescatter"
        ),
        "samples": "gather_samples",
    },
)
