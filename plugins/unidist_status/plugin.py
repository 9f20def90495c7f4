"""Registers what watches jobs for the status page, and the command `unidist top`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist_launch.command_spec import CommandSpec
from unidist_launch.observers import ObserverSpec


@hookimpl
def unidist_register_commands(registry: Registry[CommandSpec]) -> None:
    """Register `unidist top`."""
    registry.add(
        CommandSpec("top", "unidist_status.top_command:top", "Show a running job: ranks, hosts, steps, events.")
    )


@hookimpl
def unidist_register_observers(registry: Registry[ObserverSpec]) -> None:
    """Register the status page, with its options of `unidist launch`."""
    from unidist_status.options import OPTIONS

    registry.add(ObserverSpec("status", "unidist_status.options:observer", "a web page that shows the job", OPTIONS))
