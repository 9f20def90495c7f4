"""The part of Horovod's API that is the same for every framework: lifecycle, arguments, reductions, process sets.

The adapters' modules of the same names build on it. Imports `runtime`, `gradients`, `negotiation` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist._lazy import lazy_names

if TYPE_CHECKING:
    from unidist.horovod_api.arguments import Groups, Position, bucket_compressor, check_passes, exchange_options
    from unidist.horovod_api.compression import Compressor, NoneCompressor
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
        world,
    )
    from unidist.horovod_api.reduce_ops import Op, allreduction, reducescatter_scale, reduction_of
    from unidist.horovod_api.scope import Scope, scope_of

__all__ = [
    "Compressor",
    "Groups",
    "NoneCompressor",
    "Op",
    "Position",
    "Scope",
    "add_process_set",
    "allreduction",
    "bucket_compressor",
    "ccl_built",
    "check_passes",
    "cross_rank",
    "cross_size",
    "ddl_built",
    "exchange_options",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "rank",
    "reducescatter_scale",
    "reduction_of",
    "remove_process_set",
    "scope_of",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "world",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Compressor": "compression",
        "Groups": "arguments",
        "NoneCompressor": "compression",
        "Op": "reduce_ops",
        "Position": "arguments",
        "Scope": "scope",
        "add_process_set": "lifecycle",
        "allreduction": "reduce_ops",
        "bucket_compressor": "arguments",
        "ccl_built": "lifecycle",
        "check_passes": "arguments",
        "cross_rank": "lifecycle",
        "cross_size": "lifecycle",
        "ddl_built": "lifecycle",
        "exchange_options": "arguments",
        "gloo_built": "lifecycle",
        "gloo_enabled": "lifecycle",
        "init": "lifecycle",
        "is_homogeneous": "lifecycle",
        "is_initialized": "lifecycle",
        "local_rank": "lifecycle",
        "local_size": "lifecycle",
        "mpi_built": "lifecycle",
        "mpi_enabled": "lifecycle",
        "mpi_threads_supported": "lifecycle",
        "rank": "lifecycle",
        "reducescatter_scale": "reduce_ops",
        "reduction_of": "reduce_ops",
        "remove_process_set": "lifecycle",
        "scope_of": "scope",
        "shutdown": "lifecycle",
        "size": "lifecycle",
        "start_timeline": "lifecycle",
        "stop_timeline": "lifecycle",
        "world": "lifecycle",
    },
)
