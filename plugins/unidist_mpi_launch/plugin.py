"""Registers the launcher `mpi`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.launcher import LauncherSpec
from unidist.registry import Registry


@hookimpl
def unidist_register_launchers(registry: Registry[LauncherSpec]) -> None:
    """Register the launcher."""
    registry.add(
        LauncherSpec(
            "mpi",
            "unidist_mpi_launch.launcher:MpiLauncher",
            "ranks that mpirun starts, for the engine mpi (Open MPI 5)",
        )
    )
