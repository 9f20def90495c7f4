"""The plugin manager: finds plugins by entry points, calls their hooks, and keeps failures apart.

A plugin that cannot be imported, implements a hook that does not exist, or registers a name twice is
reported with the name of its distribution; everything else keeps working.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pluggy

from unidist.errors import ConfigurationError, PluginError, unknown_choice
from unidist.registry import (
    CompressorSpec,
    EngineSpec,
    FrameworkSpec,
    LauncherSpec,
    Registry,
    ScheduleSpec,
    StrategyType,
)
from unidist.runtime import hookspecs

ENTRY_POINT_GROUP = "unidist"
OWN_DISTRIBUTION = "unidist-train"

hookimpl = pluggy.HookimplMarker("unidist")
"""Marks a function of a plugin as the implementation of the hook of the same name."""

_log = logging.getLogger("unidist.runtime.plugin_manager")


@dataclass
class PluginInfo:
    """One plugin that was found.

    Attributes:
        name: the entry point's name; the word in `-p no:NAME`.
        distribution: name of the installed distribution that it comes from.
        version: of that distribution.
        problems: what went wrong with it, one sentence each; empty when all is well.
    """

    name: str
    distribution: str
    version: str
    problems: list[str] = field(default_factory=list)

    @property
    def origin(self) -> str:
        """The plugin and its distribution, as registries keep it with what it registers."""
        return f"{self.name!r} ({self.distribution})"


class PluginManager:
    """All plugins of this process. `load()` reads the entry points; registries fill when first asked for.

    Args:
        disabled: names of plugins that shall not be loaded (`-p no:NAME`).
    """

    def __init__(self, disabled: Iterable[str] = ()) -> None:
        self.disabled = frozenset(disabled)
        self.plugins: dict[str, PluginInfo] = {}
        self._manager = pluggy.PluginManager("unidist")
        self._manager.add_hookspecs(hookspecs)

    def load(self) -> PluginManager:
        """Import and register the plugin of every entry point; returns self.

        Raises:
            ConfigurationError: a disabled plugin does not exist; lists the choices.
        """
        found = list(_entry_points())
        for name in self.disabled:
            if name not in {entry.name for entry, _ in found}:
                raise unknown_choice(
                    "plugin", name, {entry.name for entry, _ in found}, hint="Asked for by `-p no:NAME`."
                )
        for entry, distribution in found:
            if entry.name not in self.disabled:
                self._load_entry_point(entry, distribution)
        return self

    def register(self, plugin: object, *, name: str, distribution: str = "(this process)", version: str = "") -> None:
        """Register a plugin object directly, as tests and scripts do."""
        info = PluginInfo(name, distribution, version)
        if name in self.plugins:
            self._report(info, f"a plugin called {name!r} is already registered by {self.plugins[name].distribution}")
            self.plugins[f"{name} ({distribution})"] = info
            return
        self.plugins[name] = info
        try:
            self._manager.register(plugin, name=name)
        except pluggy.PluginValidationError as exc:  # a hook with an argument that its specification does not have
            self._report(info, f"cannot be registered: {exc}")
            return
        known = {hook for hook in dir(hookspecs) if hook.startswith("unidist_")}
        for caller in self._manager.get_hookcallers(plugin) or ():
            if not caller.has_spec():
                near = difflib.get_close_matches(caller.name, known, n=1)
                tip = f"; did you mean {near[0]!r}?" if near else f"; hooks are: {', '.join(sorted(known))}"
                self._report(info, f"implements hook {caller.name!r}, which does not exist{tip}")

    @cached_property
    def engines(self) -> Registry[EngineSpec]:
        """Every registered engine."""
        return self._collect(Registry("engine"), "unidist_register_engines")

    @cached_property
    def frameworks(self) -> Registry[FrameworkSpec]:
        """Every registered framework adapter."""
        return self._collect(Registry("framework"), "unidist_register_frameworks")

    @cached_property
    def strategies(self) -> Registry[StrategyType]:
        """Every registered strategy."""
        return self._collect(Registry("strategy"), "unidist_register_strategies")

    @cached_property
    def compressors(self) -> Registry[CompressorSpec]:
        """Every registered gradient compressor."""
        return self._collect(Registry("compression"), "unidist_register_compressors")

    @cached_property
    def schedules(self) -> Registry[ScheduleSpec]:
        """Every registered schedule of pipeline parallelism."""
        return self._collect(Registry("schedule"), "unidist_register_schedules")

    @cached_property
    def launchers(self) -> Registry[LauncherSpec]:
        """Every registered launcher."""
        return self._collect(Registry("launcher"), "unidist_register_launchers")

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call an event hook of every plugin. A plugin that raises is reported; the others are still called."""
        self._call_each(hook, lambda _: arguments)

    def listens(self, hook: str) -> bool:
        """Say whether any plugin implements `hook`, so that a frequent event costs nothing when none does."""
        return bool(getattr(self._manager.hook, hook).get_hookimpls())

    def hooks_of(self, name: str) -> list[str]:
        """Return the hooks that the plugin called `name` implements; none if it could not be imported."""
        plugin = self._manager.get_plugin(name)
        callers = (plugin is not None and self._manager.get_hookcallers(plugin)) or ()
        return sorted(caller.name for caller in callers)

    def problems(self) -> list[str]:
        """Return every problem found so far, each with the plugin's and its distribution's name."""
        return [
            f"plugin {info.name!r} of {info.distribution} {info.version}: {text}"
            for info in self.plugins.values()
            for text in info.problems
        ]

    def _load_entry_point(self, entry: importlib.metadata.EntryPoint, distribution: tuple[str, str]) -> None:
        try:
            plugin = entry.load()
        except Exception as exc:  # whatever a foreign module raises at import
            info = PluginInfo(entry.name, *distribution)
            self.plugins.setdefault(entry.name, info)
            self._report(info, f"cannot be imported from {entry.value!r}: {type(exc).__name__}: {exc}")
            return
        self.register(plugin, name=entry.name, distribution=distribution[0], version=distribution[1])

    def _collect(self, registry: Registry[Any], hook: str) -> Registry[Any]:
        def arguments(info: PluginInfo) -> dict[str, Any]:
            registry.origin = info.origin
            return {"registry": registry}

        self._call_each(hook, arguments)
        return registry

    def _call_each(self, hook: str, arguments: Callable[[PluginInfo], dict[str, Any]]) -> None:
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            info = self.plugins[implementation.plugin_name]
            others = [plugin for plugin in self._manager.get_plugins() if plugin is not implementation.plugin]
            caller = self._manager.subset_hook_caller(hook, remove_plugins=others)
            try:
                caller(**arguments(info))
            except (PluginError, ConfigurationError) as exc:
                self._report(info, f"{hook}: {exc}")
            except Exception as exc:  # whatever a foreign plugin raises
                self._report(info, f"{hook} raised {type(exc).__name__}: {exc}")

    def _report(self, info: PluginInfo, problem: str) -> None:
        info.problems.append(problem)
        _log.warning("plugin %r of %s %s: %s", info.name, info.distribution, info.version, problem)


def _entry_points() -> list[tuple[importlib.metadata.EntryPoint, tuple[str, str]]]:
    """Return the entry points of our group with their distribution's name and version, in a stable order.

    Our own distribution comes first: where two plugins claim a name, a third party's cannot take ours away.
    """
    found = {}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        origin = (entry.dist.name, entry.dist.version) if entry.dist else ("(unknown)", "")
        found[(origin[0], entry.name, entry.value)] = (entry, origin)
    return [found[key] for key in sorted(found, key=lambda key: (key[0] != OWN_DISTRIBUTION, key))]
