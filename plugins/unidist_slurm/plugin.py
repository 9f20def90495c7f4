"""Registers the launcher `slurm`, and the commands `unidist slurm ...`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist import hookimpl
from unidist.launcher import LauncherSpec
from unidist.registry import Registry

if TYPE_CHECKING:
    from click import Group


@hookimpl
def unidist_register_launchers(registry: Registry[LauncherSpec]) -> None:
    """Register the launcher."""
    registry.add(
        LauncherSpec(
            "slurm",
            "unidist_slurm.launcher:SlurmLauncher",
            "ranks on the nodes of an allocation of Slurm, by srun",
            marker="SLURM_JOB_NODELIST",
        )
    )


@hookimpl
def unidist_add_commands(cli: Group) -> None:
    """Add `unidist slurm`."""
    from unidist_slurm.command import slurm

    cli.add_command(slurm)
