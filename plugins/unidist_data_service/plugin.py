"""Registers `ud.data_service`, what starts data workers, with its options, and `unidist data-worker`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.facade import FacadeNameSpec
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


@hookimpl
def unidist_register_facade_names(registry: Registry[FacadeNameSpec]) -> None:
    """Register `ud.data_service`."""
    for framework in ("torch", "tensorflow", "jax"):
        registry.add(FacadeNameSpec(framework, "data_service", f"unidist_data_service._{framework}:data_service"))
