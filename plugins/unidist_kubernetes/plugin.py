"""Registers the launcher `kubernetes`, and the commands `unidist kubernetes ...`."""

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
            "kubernetes",
            "unidist_kubernetes.launcher:KubernetesLauncher",
            "ranks in the pods of a job that `unidist kubernetes manifest` wrote",
            marker="UNIDIST_POD_LEADER",
        )
    )


@hookimpl
def unidist_add_commands(cli: Group) -> None:
    """Add `unidist kubernetes`."""
    from unidist_kubernetes.command import kubernetes

    cli.add_command(kubernetes)
