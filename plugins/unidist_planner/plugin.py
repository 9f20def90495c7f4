"""Registers the commands `unidist plan` and `unidist estimate`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist_launch.command_spec import CommandSpec


@hookimpl
def unidist_register_commands(registry: Registry[CommandSpec]) -> None:
    """Register `unidist plan` and `unidist estimate`."""
    registry.add(CommandSpec("plan", "unidist_planner.plan_command:plan", "Propose how to divide training over ranks."))
    registry.add(
        CommandSpec(
            "estimate", "unidist_planner.estimate_command:estimate", "Show how much memory training takes on one rank."
        )
    )
