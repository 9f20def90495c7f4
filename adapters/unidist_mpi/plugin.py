"""The plugin of the MPI adapter: registers its engine. Imports neither mpi4py nor a framework."""

from __future__ import annotations

from unidist import hookimpl
from unidist.engine import EngineSpec
from unidist.registry import Registry


@hookimpl
def unidist_register_engines(registry: Registry[EngineSpec]) -> None:
    """Register `mpi`, which is never taken unasked: it needs a job that mpirun started."""
    registry.add(
        EngineSpec(
            "mpi",
            "unidist_mpi.engine:MpiEngine",
            "MPI by mpi4py, any framework; the job is started by mpirun",
            priority=-10,
        )
    )
