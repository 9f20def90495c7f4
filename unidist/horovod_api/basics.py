"""The lifecycle as an object, as `horovod.common.basics` has it."""

from __future__ import annotations

from collections.abc import Sequence

from unidist.errors import UsageError
from unidist.horovod_api import lifecycle
from unidist.horovod_api.reduce_ops import Op
from unidist.negotiation.process_sets import ProcessSet
from unidist.runtime import context

__all__ = ["HorovodBasics", "basics"]


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

    # Scripts that look at process sets by number call these in spite of their names.

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return {each.process_set_id or 0: list(each.ranks) for each in context.current().process_sets.registered()}

    def _add_process_set_impl(self, ranks: Sequence[int]) -> int | None:
        if sorted(ranks) in self._get_process_set_ids_and_ranks().values():
            return None
        return lifecycle.add_process_set(ranks).process_set_id

    def _remove_process_set_impl(self, process_set_id: int) -> int | None:
        found = context.current().process_sets.find(process_set_id)
        return process_set_id if found is not None and lifecycle.remove_process_set(found) else None

    def _process_set_rank(self, process_set_id: int) -> int:
        rank = self._registered(process_set_id).rank()
        assert rank is not None
        return rank

    def _process_set_size(self, process_set_id: int) -> int:
        return len(self._registered(process_set_id).ranks)

    @staticmethod
    def _registered(process_set_id: int) -> ProcessSet:
        found = context.current().process_sets.find(process_set_id)
        if found is None:
            raise UsageError(f"no process set has the number {process_set_id} (seen on rank {lifecycle.rank()})")
        return found


basics = HorovodBasics()
"""`_basics` of the modules `mpi_ops`."""
