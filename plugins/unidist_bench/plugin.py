"""Registers the command `unidist bench`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist_launch.command_spec import CommandSpec


@hookimpl
def unidist_register_commands(registry: Registry[CommandSpec]) -> None:
    """Register `unidist bench`."""
    registry.add(
        CommandSpec("bench", "unidist_bench.command.measure:bench", "Measure latency and bandwidth of collectives.")
    )
