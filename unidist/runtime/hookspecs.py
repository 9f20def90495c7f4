"""Every hook that a plugin can implement: documented, empty, fully annotated.

A plugin is a module (or object) named by an entry point of the group `unidist`; its hook functions are
marked with `unidist.hookimpl`. Two kinds of hooks exist. *Registration* hooks are called once per process
when the kind is first needed; they must be import-light: no torch, tensorflow or numpy at the top of the
module, only specs with lazy import paths. *Event* hooks are called at turning points, never per tensor.
All hooks are called on every plugin, in the order of registration; results are ignored. A plugin can bring
hooks for its own plugins, see `unidist_add_kinds`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from unidist.engine import EngineSpec
    from unidist.facade import FacadeNameSpec
    from unidist.framework import FrameworkSpec
    from unidist.gradients import CompressorSpec
    from unidist.launcher import LauncherSpec
    from unidist.registry import Registry
    from unidist.runtime.context import Context
    from unidist.runtime.plugin_manager import PluginManager
    from unidist.strategy import BindingSpec, StrategySpec

hookspec = pluggy.HookspecMarker("unidist")


@hookspec
def unidist_register_engines(registry: Registry[EngineSpec]) -> None:
    """Register engines: `registry.add(EngineSpec(name=..., path="module:Class", ...))`."""


@hookspec
def unidist_register_frameworks(registry: Registry[FrameworkSpec]) -> None:
    """Register framework adapters."""


@hookspec
def unidist_register_strategies(registry: Registry[StrategySpec]) -> None:
    """Register strategies. Their modules are loaded by the launcher too, so they import no framework at the top."""


@hookspec
def unidist_register_compressors(registry: Registry[CompressorSpec]) -> None:
    """Register gradient compressors. Their modules import no framework and no numpy at the top."""


@hookspec
def unidist_register_launchers(registry: Registry[LauncherSpec]) -> None:
    """Register launchers."""


@hookspec
def unidist_register_bindings(registry: Registry[BindingSpec]) -> None:
    """Register a strategy's binding to a framework: `registry.add(BindingSpec("zero", "torch", "module:Class"))`."""


@hookspec
def unidist_register_facade_names(registry: Registry[FacadeNameSpec]) -> None:
    """Register names of `unidist.torch` and its like: `registry.add(FacadeNameSpec("torch", "name", "module:object"))`.

    Asked for when a script uses a name that the module does not define itself.
    """


@hookspec
def unidist_add_kinds(manager: PluginManager) -> None:
    """Add a kind of plugins with its registration hook: `manager.add_kind(ScheduleSpec, module)`.

    For plugins that are extended by plugins themselves. Called when the plugin is loaded, before any registration hook.
    """


@hookspec
def unidist_initialized(context: Context) -> None:
    """The runtime is initialized. Plugins may use the world communicator, with the same calls on all ranks."""


@hookspec
def unidist_step_applied(context: Context, step: int) -> None:
    """Update number `step` (from 1, per optimizer) was applied on this rank. Once per update: be quick."""


@hookspec
def unidist_failure(context: Context, error: BaseException) -> None:
    """An operation of this rank failed with `error`, which is raised to the script afterwards."""


@hookspec
def unidist_shutdown(context: Context) -> None:
    """The runtime is about to go down on this rank. Peers may be gone: use no communicator."""
