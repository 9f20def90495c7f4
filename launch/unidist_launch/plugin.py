"""What the launch package registers, through the same entry point as everybody else."""

from __future__ import annotations

from unidist.launcher import LauncherSpec
from unidist.registry import Registry
from unidist.runtime.plugin_manager import hookimpl


@hookimpl
def unidist_register_launchers(registry: Registry[LauncherSpec]) -> None:
    """Register the launchers."""
    registry.add(
        LauncherSpec("local", "unidist_launch.launchers.local:LocalLauncher", "all ranks on this host (the default)")
    )
    registry.add(
        LauncherSpec(
            "elastic", "unidist_launch.launchers.elastic:ElasticLauncher", "ranks that come and go (--min-np, --max-np)"
        )
    )
    registry.add(LauncherSpec("ssh", "unidist_launch.launchers.ssh:SshLauncher", "ranks on the hosts of -H, by ssh"))
