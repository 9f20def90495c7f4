"""Every hook that a plugin can implement: documented, empty, fully annotated.

A plugin is a module (or object) named by an entry point of the group `unidist`; its hook functions are
marked with `unidist.hookimpl`. Two kinds of hooks exist. *Registration* hooks are called once per process
when the kind is first needed; they must be import-light: no torch, tensorflow or numpy at the top of the
module, only specs with lazy import paths. *Event* hooks are called at turning points, never per tensor.
All hooks are called on every plugin, in the order of registration; results are ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from click import Group

    from unidist.registry import (
        CompressorSpec,
        EngineSpec,
        FrameworkSpec,
        LauncherSpec,
        Registry,
        ScheduleSpec,
        StrategyType,
    )
    from unidist.runtime.context import Context

hookspec = pluggy.HookspecMarker("unidist")


@hookspec
def unidist_register_engines(registry: Registry[EngineSpec]) -> None:
    """Register engines: `registry.add(EngineSpec(name=..., path="module:Class", ...))`."""


@hookspec
def unidist_register_frameworks(registry: Registry[FrameworkSpec]) -> None:
    """Register framework adapters."""


@hookspec
def unidist_register_strategies(registry: Registry[StrategyType]) -> None:
    """Register strategies. Their modules are loaded by the launcher too, so they import no framework at the top."""


@hookspec
def unidist_register_compressors(registry: Registry[CompressorSpec]) -> None:
    """Register gradient compressors. Their modules import no framework and no numpy at the top."""


@hookspec
def unidist_register_schedules(registry: Registry[ScheduleSpec]) -> None:
    """Register schedules of pipeline parallelism. Their modules import no framework and no numpy at the top."""


@hookspec
def unidist_register_launchers(registry: Registry[LauncherSpec]) -> None:
    """Register launchers."""


@hookspec
def unidist_add_commands(cli: Group) -> None:
    """Add commands to the `unidist` command line. Runs for every call of it, so it must be quick."""


@hookspec
def unidist_initialized(context: Context) -> None:
    """The runtime is up on this rank; the world communicator may be used, by all ranks alike."""


@hookspec
def unidist_step_applied(context: Context, step: int) -> None:
    """Update number `step` (from 1, per optimizer) was applied on this rank. Once per update: be quick."""


@hookspec
def unidist_failure(context: Context, error: BaseException) -> None:
    """An operation of this rank failed with `error`, which is raised to the script afterwards."""


@hookspec
def unidist_shutdown(context: Context) -> None:
    """The runtime is about to go down on this rank. Peers may be gone: use no communicator."""
