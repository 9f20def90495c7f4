"""The plugin manager: finds plugins by entry points, calls their hooks, and keeps failures apart.

A plugin that cannot be imported, implements a hook that does not exist, or registers a name twice is
reported with the name of its distribution; everything else keeps working.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import logging
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pluggy

from unidist.engine import EngineSpec
from unidist.errors import ConfigurationError, PluginError, UsageError, unknown_choice
from unidist.facade import FacadeNameSpec
from unidist.framework import Framework, FrameworkSpec
from unidist.gradients import CompressorSpec
from unidist.installation import DISTRIBUTION
from unidist.launcher import LauncherSpec
from unidist.registry import Registry, Spec
from unidist.runtime import hookspecs
from unidist.strategy import BindingSpec, StrategySpec, find_binding

S = TypeVar("S", bound=Spec)

ENTRY_POINT_GROUP = "unidist"

hookimpl = pluggy.HookimplMarker("unidist")
"""Marks a function of a plugin as the implementation of the hook of the same name."""

_log = logging.getLogger("unidist.plugins")


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
        self.kinds: list[type[Any]] = [
            EngineSpec,
            FrameworkSpec,
            StrategySpec,
            BindingSpec,
            CompressorSpec,
            LauncherSpec,
            FacadeNameSpec,
        ]
        """The spec classes of all kinds of plugins: those of the core, and what plugins add."""
        self._registries: dict[type[Any], Registry[Any]] = {}

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
        for name, info in list(self.plugins.items()):  # when all are loaded: one may have added a hook of another
            if name == info.name:  # else another plugin has the name
                self._check_hooks(info)
        return self

    def register(self, plugin: object, *, name: str, distribution: str = "(this process)", version: str = "") -> None:
        """Register a plugin object directly, as tests and scripts do."""
        info = PluginInfo(name, distribution, version)
        self._register(plugin, info)
        self._check_hooks(info)

    def registry(self, kind: type[S]) -> Registry[S]:
        """Return all specs of one kind: `manager.registry(EngineSpec)`. Filled when first asked for."""
        if kind not in self._registries:
            if kind not in self.kinds:
                raise PluginError(
                    f"no plugin that is loaded has added the kind {kind.kind!r}; is its plugin switched off?"
                )
            self._registries[kind] = self._collect(Registry(kind.kind), kind.hook)
        found: Registry[S] = self._registries[kind]
        return found

    def add_kind(self, kind: type[Any], hookspecs: types.ModuleType | type) -> None:
        """Add a kind of plugins; see the hook `unidist_add_kinds`.

        Args:
            kind: the spec class, see `unidist.registry.Spec`.
            hookspecs: a module or class with the specification of its hook, marked with `pluggy.HookspecMarker`.
        """
        self.kinds.append(kind)
        while True:
            try:
                self._manager.add_hookspecs(hookspecs)
                return
            except pluggy.PluginValidationError as exc:  # an earlier plugin's hook has another argument
                self._refuse(exc.plugin, exc)

    @property
    def engines(self) -> Registry[EngineSpec]:
        """Every registered engine."""
        return self.registry(EngineSpec)

    @property
    def frameworks(self) -> Registry[FrameworkSpec]:
        """Every registered framework adapter."""
        return self.registry(FrameworkSpec)

    @property
    def strategies(self) -> Registry[StrategySpec]:
        """Every registered strategy."""
        return self.registry(StrategySpec)

    @property
    def compressors(self) -> Registry[CompressorSpec]:
        """Every registered gradient compressor."""
        return self.registry(CompressorSpec)

    @property
    def launchers(self) -> Registry[LauncherSpec]:
        """Every registered launcher."""
        return self.registry(LauncherSpec)

    def framework_of(self, model: Any) -> Framework:
        """Return the adapter of the framework that `model` belongs to.

        Raises:
            UsageError: no adapter knows it; lists the frameworks.
        """
        for spec in self.frameworks:
            # What is not imported has no models; so a framework whose adapter is broken is no concern of others.
            if spec.requires.partition(".")[0] in sys.modules:
                framework = spec.load()
                if framework.is_model(model):
                    return framework
                if framework.is_tensor(model):
                    raise UsageError(
                        f"a strategy divides the model, and here it is a single tensor of {spec.name}, which has no "
                        "names of parameters. Give a model; with JAX a tree, such as {'w': array}"
                    )
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        known = ", ".join(sorted(spec.name for spec in self.frameworks)) or "none"
        raise UsageError(f"{kind} is no model of a framework that unidist knows; it knows: {known}")

    def binding(self, strategy: str, framework: Framework) -> Any:
        """Return a new instance of a strategy's binding to a framework.

        Raises:
            ConfigurationError: no plugin has registered one; lists the frameworks for which there is one.
        """
        return find_binding(self.registry(BindingSpec), strategy, framework.name).load()

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call an event hook of every plugin. A plugin that raises is reported; the others are still called."""
        self._call_each(hook, lambda _: arguments)

    def listens(self, hook: str) -> bool:
        """Return whether any plugin implements `hook`, so that a frequent event costs nothing when none does."""
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
        info = PluginInfo(entry.name, *distribution)
        try:
            plugin = entry.load()
        except KeyboardInterrupt:
            raise
        except BaseException as exc:  # whatever a foreign module raises at import, SystemExit included
            self.plugins.setdefault(entry.name, info)
            self._report(info, f"cannot be imported from {entry.value!r}: {type(exc).__name__}: {exc}")
            return
        self._register(plugin, info)

    def _register(self, plugin: object, info: PluginInfo) -> None:
        if info.name in self.plugins:
            first = self.plugins[info.name].distribution
            self._report(info, f"a plugin called {info.name!r} is already registered by {first}")
            self.plugins[f"{info.name} ({info.distribution})"] = info
            return
        self.plugins[info.name] = info
        try:
            self._manager.register(plugin, name=info.name)
        except pluggy.PluginValidationError as exc:  # a hook with an argument that its specification does not have
            self._report(info, f"cannot be registered: {exc}")
            return
        adds_kinds = [each for each in self._manager.hook.unidist_add_kinds.get_hookimpls() if each.plugin is plugin]
        if adds_kinds:
            self._call(adds_kinds[0], "unidist_add_kinds", lambda _: {"manager": self})

    def _refuse(self, plugin: object, error: pluggy.PluginValidationError) -> None:
        name = self._manager.get_name(plugin)
        assert name is not None
        self._manager.unregister(plugin)
        self._report(self.plugins[name], f"cannot be registered: {error}")

    def _check_hooks(self, info: PluginInfo) -> None:
        """Report the hooks of a plugin that no plugin specifies."""
        plugin = self._manager.get_plugin(info.name)
        for caller in (plugin is not None and self._manager.get_hookcallers(plugin)) or ():
            if not caller.has_spec():
                known = {name for name in vars(self._manager.hook) if getattr(self._manager.hook, name).has_spec()}
                near = difflib.get_close_matches(caller.name, known, n=1)
                tip = f"; did you mean {near[0]!r}?" if near else f"; hooks are: {', '.join(sorted(known))}"
                self._report(info, f"implements hook {caller.name!r}, which does not exist{tip}")

    def _collect(self, registry: Registry[Any], hook: str) -> Registry[Any]:
        def arguments(info: PluginInfo) -> dict[str, Any]:
            registry.origin = info.origin
            return {"registry": registry}

        self._call_each(hook, arguments)
        return registry

    def _call_each(self, hook: str, arguments: Callable[[PluginInfo], dict[str, Any]]) -> None:
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            self._call(implementation, hook, arguments)

    def _call(self, implementation: Any, hook: str, arguments: Callable[[PluginInfo], dict[str, Any]]) -> None:
        """Call one plugin's implementation of a hook; report what it raises."""
        info = self.plugins[implementation.plugin_name]
        others = [plugin for plugin in self._manager.get_plugins() if plugin is not implementation.plugin]
        caller = self._manager.subset_hook_caller(hook, remove_plugins=others)
        try:
            caller(**arguments(info))
        except (PluginError, ConfigurationError) as exc:
            self._report(info, f"{hook}: {exc}")
        except KeyboardInterrupt:
            raise
        except BaseException as exc:  # whatever a foreign plugin raises, SystemExit included
            self._report(info, f"{hook} raised {type(exc).__name__}: {exc}")

    def _report(self, info: PluginInfo, problem: str) -> None:
        info.problems.append(problem)
        _log.warning("plugin %r of %s %s: %s", info.name, info.distribution, info.version, problem)


def _entry_points() -> list[tuple[importlib.metadata.EntryPoint, tuple[str, str]]]:
    """Return the entry points of our group with their distribution's name and version, in a stable order.

    Our own distribution comes first: where two plugins claim a name, a third party's cannot take ours away.
    """
    found = {}
    origins: dict[importlib.metadata.Distribution | None, tuple[str, str]] = {None: ("(unknown)", "")}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.dist not in origins:
            assert entry.dist is not None
            metadata = entry.dist.metadata  # a file that is read and parsed each time: once for all its entry points
            origins[entry.dist] = (metadata["Name"], metadata["Version"])
        origin = origins[entry.dist]
        found[(origin[0], entry.name, entry.value)] = (entry, origin)
    return [found[key] for key in sorted(found, key=lambda key: (key[0] != DISTRIBUTION, key))]
