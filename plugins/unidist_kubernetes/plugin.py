"""Registers the launcher `kubernetes`, and the commands `unidist kubernetes ...`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.launcher import LauncherSpec
from unidist.registry import Registry
from unidist_kubernetes.place import MARKERS
from unidist_launch.command_spec import CommandSpec


@hookimpl
def unidist_register_launchers(registry: Registry[LauncherSpec]) -> None:
    """Register the launcher."""
    registry.add(
        LauncherSpec(
            "kubernetes",
            "unidist_kubernetes.launcher:KubernetesLauncher",
            "ranks in the pods of a job that `unidist kubernetes manifest` wrote, of a TFJob or of a TrainJob",
            marker=MARKERS,
        )
    )


@hookimpl
def unidist_register_commands(registry: Registry[CommandSpec]) -> None:
    """Register `unidist kubernetes`."""
    registry.add(
        CommandSpec(
            "kubernetes",
            "unidist_kubernetes.command:kubernetes",
            "Write manifests for Kubernetes, and find pods that run.",
        )
    )
