"""Registers what starts data workers, with its options of `unidist launch`, and `unidist data-worker`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist_launch.command_spec import CommandSpec
from unidist_launch.observers import ObserverSpec


@hookimpl
def unidist_register_commands(registry: Registry[CommandSpec]) -> None:
    """Register `unidist data-worker`."""
    registry.add(
        CommandSpec(
            "data-worker", "unidist_data_service.command:data_worker", "Add a data worker to a job that is running."
        )
    )


@hookimpl
def unidist_register_observers(registry: Registry[ObserverSpec]) -> None:
    """Register what starts data workers, with its options."""
    from unidist_data_service.options import OPTIONS

    registry.add(ObserverSpec("data_service", "unidist_data_service.options:observer", "starts data workers", OPTIONS))
