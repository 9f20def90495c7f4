"""The part of Horovod's API that is the same for every framework: lifecycle, arguments, reductions, process sets.

The adapters' modules of the same names build on it. Imports `runtime`, `gradients`, `negotiation`, `settings` and the
root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.horovod_api.arguments import (
        Groups,
        OptimizerArguments,
        Position,
        bucket_compressor,
        check_groups,
        check_passes,
    )
    from unidist.horovod_api.compression import Compressor, NoneCompressor
    from unidist.horovod_api.gather_advice import GatherAdvice
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
    from unidist.horovod_api.reduce_ops import (
        Op,
        allreduction,
        check_adasum,
        checked_op,
        reducescattering,
        reduction_of,
    )
    from unidist.horovod_api.scope import Scope, scope_of

__all__ = [
    "Compressor", "GatherAdvice", "Groups", "NoneCompressor", "Op", "OptimizerArguments", "Position", "Scope",
    "add_process_set",
    "allreduction", "bucket_compressor", "ccl_built", "check_adasum", "check_groups", "check_passes", "checked_op",
    "cross_rank", "cross_size", "data_rank", "data_size", "ddl_built", "gloo_built", "gloo_enabled", "init",
    "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "rank", "reducescattering", "reduction_of", "remove_process_set", "report", "role",
    "scope_of",
    "shutdown", "size", "start_timeline", "stop_timeline", "world",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "arguments": "Groups Position bucket_compressor check_groups check_passes OptimizerArguments",
        "compression": "Compressor NoneCompressor",
        "gather_advice": "GatherAdvice",
        "lifecycle": (
            "add_process_set ccl_built cross_rank cross_size data_rank data_size ddl_built gloo_built gloo_enabled "
            "init is_homogeneous is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported "
            "rank remove_process_set report role shutdown size start_timeline stop_timeline world"
        ),
        "reduce_ops": "Op allreduction check_adasum checked_op reducescattering reduction_of",
        "scope": "Scope scope_of",
    },
)
