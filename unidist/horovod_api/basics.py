"""The lifecycle as an object, as `horovod.common.basics` has it."""

from __future__ import annotations

from unidist.horovod_api import lifecycle
from unidist.horovod_api.reduce_ops import Op

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """Functions and constants that every facade has; whether CUDA is there only the facade of a framework knows.

    Args:
        pkg_path: Horovod's path to its library; not looked at.
        args: names of it; the same.
    """

    Average, Sum, Adasum, Min, Max, Product = Op.Average, Op.Sum, Op.Adasum, Op.Min, Op.Max, Op.Product

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        pass

    init = staticmethod(lifecycle.init)
    shutdown = staticmethod(lifecycle.shutdown)
    is_initialized = staticmethod(lifecycle.is_initialized)
    start_timeline = staticmethod(lifecycle.start_timeline)
    stop_timeline = staticmethod(lifecycle.stop_timeline)
    size = staticmethod(lifecycle.size)
    local_size = staticmethod(lifecycle.local_size)
    cross_size = staticmethod(lifecycle.cross_size)
    rank = staticmethod(lifecycle.rank)
    local_rank = staticmethod(lifecycle.local_rank)
    cross_rank = staticmethod(lifecycle.cross_rank)
    is_homogeneous = staticmethod(lifecycle.is_homogeneous)
    mpi_threads_supported = staticmethod(lifecycle.mpi_threads_supported)
    mpi_enabled = staticmethod(lifecycle.mpi_enabled)
    mpi_built = staticmethod(lifecycle.mpi_built)
    gloo_enabled = staticmethod(lifecycle.gloo_enabled)
    gloo_built = staticmethod(lifecycle.gloo_built)
    ddl_built = staticmethod(lifecycle.ddl_built)
    ccl_built = staticmethod(lifecycle.ccl_built)
