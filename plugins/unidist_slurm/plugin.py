"""Registers the launcher `slurm`, and the commands `unidist slurm ...`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.launcher import LauncherSpec
from unidist.registry import Registry
from unidist_launch.command_spec import CommandSpec


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
def unidist_register_commands(registry: Registry[CommandSpec]) -> None:
    """Register `unidist slurm`."""
    registry.add(CommandSpec("slurm", "unidist_slurm.command:slurm", "Write scripts for Slurm."))
