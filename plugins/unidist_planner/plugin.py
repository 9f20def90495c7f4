"""Registers the commands `unidist plan` and `unidist estimate`, and `unidist doctor --measure`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist_launch.command_options import CommandOptionsSpec
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


@hookimpl
def unidist_register_command_options(registry: Registry[CommandOptionsSpec]) -> None:
    """Register `unidist doctor --measure`."""
    from unidist_planner.measure_options import OPTIONS

    registry.add(
        CommandOptionsSpec(
            "measure", "doctor", "unidist_planner.measure_options:run", "time this machine for `unidist plan`", OPTIONS
        )
    )
