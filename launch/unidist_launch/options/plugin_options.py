"""Options that plugins add to commands of this package."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import click

from unidist.errors import UnidistError
from unidist.registry import Spec
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.environment import Settings
from unidist_launch.command_options import CommandOptionsSpec

_SPECS = "unidist.command_options"
_log = logging.getLogger("unidist.plugins")


class SpecWithOptions(Spec, Protocol):
    """A spec that brings options."""

    @property
    def options(self) -> tuple[click.Option, ...]:
        """The options."""


S = TypeVar("S", bound=SpecWithOptions)


class ExtendedCommand(click.Command):
    """A command to which plugins may add options, with a function that is called instead when one is given.

    Problems of plugins are not reported here: the commands of this class show them.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters of this command, then those of plugins."""
        own = super().get_params(ctx)
        if _SPECS not in ctx.meta:
            level = _log.level
            _log.setLevel(logging.ERROR)
            try:
                ctx.meta[_SPECS] = list(without_clashes(load_plugins(), CommandOptionsSpec, own, command=self.name))
            finally:
                _log.setLevel(level)
        return [*own, *(option for spec in ctx.meta[_SPECS] for option in spec.options)]

    def invoke(self, ctx: click.Context) -> Any:
        """Call the function of the plugin whose option was given, else that of the command."""
        theirs: dict[str, Any] = {}
        for spec in ctx.meta[_SPECS]:
            theirs |= {option.name: ctx.params[option.name] for option in spec.options if option.name is not None}
            if any(value is not None for value in theirs.values()):
                return spec.load()(ctx.params)
        ctx.params = {name: value for name, value in ctx.params.items() if name not in theirs}
        return super().invoke(ctx)


def load_plugins(switched_off: frozenset[str] = frozenset()) -> PluginManager:
    """Return the plugins for a first look. What is wrong with the environment, the command itself will say."""
    try:
        return PluginManager([*Settings.read().disabled_plugins, *switched_off]).load()
    except UnidistError:
        return PluginManager().load()


def without_clashes(
    manager: PluginManager, kind: type[S], own: Sequence[click.Parameter], *, command: str | None = None
) -> Iterator[S]:
    """Yield the specs whose options are not taken by those before them; report the others.

    Args:
        manager: the plugins.
        kind: of spec.
        own: parameters of the command.
        command: leave out what is for other commands.
    """
    if kind not in manager.kinds:  # the plugin of this package is switched off
        return
    taken = {name for parameter in own for name in (parameter.name, *parameter.opts, *parameter.secondary_opts)}
    registry = manager.registry(kind)
    for spec in registry:
        if getattr(spec, "command", command) != command:
            continue
        names = {name for each in spec.options for name in (each.name, *each.opts, *each.secondary_opts)}
        if names & taken:
            clash = min(name for name in names & taken if name)
            origin = registry.origin_of(spec.name)
            _log.warning("%s %r of plugin %s: there is an option %s already", registry.kind, spec.name, origin, clash)
        else:
            taken |= names
            yield spec
