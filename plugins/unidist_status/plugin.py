"""Registers the command `unidist top`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist_launch.command_spec import CommandSpec


@hookimpl
def unidist_register_commands(registry: Registry[CommandSpec]) -> None:
    """Register `unidist top`."""
    registry.add(
        CommandSpec("top", "unidist_status.top_command:top", "Show a running job: ranks, hosts, steps, events.")
    )
