"""Options of `unidist launch` that plugins bring, and the observers that they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from unidist.launcher import JobObserver
from unidist.runtime.plugin_manager import PluginManager
from unidist_launch.display.grouped_help import GroupedCommand
from unidist_launch.observers import ObserverSpec
from unidist_launch.options.plugin_options import load_plugins, without_clashes
from unidist_launch.options.strategy_options import strategy_options

_MANAGER = "unidist.plugin_manager"
_SPECS = "unidist.observers"
_OF_STRATEGIES = "unidist.strategy_options"


class ObservedCommand(GroupedCommand):
    """A command that also has the options of the strategies and observers that plugins register."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options; plugins that `-p no:NAME` switches off are not even imported for it."""
        ctx.meta[_MANAGER] = load_plugins(_switched_off(self, args))
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters of this command, then those of strategies and of observers."""
        own = super().get_params(ctx)
        if _SPECS not in ctx.meta:
            manager = ctx.meta.get(_MANAGER) or load_plugins()
            ctx.meta[_OF_STRATEGIES] = strategy_options(manager)
            ctx.meta[_SPECS] = list(without_clashes(manager, ObserverSpec, [*own, *ctx.meta[_OF_STRATEGIES]]))
        return [*own, *ctx.meta[_OF_STRATEGIES], *(option for spec in ctx.meta[_SPECS] for option in spec.options)]


def loaded(ctx: click.Context, disabled: Iterable[str]) -> PluginManager:
    """Return the plugins but for those that are switched off, which now are known; loaded once if it can be."""
    manager: PluginManager = ctx.meta[_MANAGER]
    return manager if manager.disabled == frozenset(disabled) else PluginManager(disabled).load()


def observers(
    ctx: click.Context, manager: PluginManager, options: Mapping[str, Any], *, is_elastic: bool
) -> tuple[JobObserver, ...]:
    """Return the observers of a job.

    Args:
        ctx: of the command.
        manager: the plugins that are not switched off.
        options: values of all options.
        is_elastic: the job is an elastic one.

    Raises:
        ConfigurationError: an observer cannot do what its options ask for.
        click.NoSuchOption: an option was given whose plugin is switched off.
    """
    found = []
    for spec in ctx.meta[_SPECS]:
        names = [option.name for option in spec.options if option.name is not None]
        if ObserverSpec not in manager.kinds or spec.name not in manager.registry(ObserverSpec):
            given = next((option for option in spec.options if options[option.name or ""] is not None), None)
            if given is not None:
                raise click.NoSuchOption(given.opts[0], ctx=ctx)
            continue
        observer = spec.load()({name: options[name] for name in names}, is_elastic, manager)
        if observer is not None:
            found.append(observer)
    return tuple(found)


def _switched_off(command: click.Command, arguments: Sequence[str]) -> frozenset[str]:
    """Return the names that stand after `-p no:`, before the options can be read."""
    own = {name: option for option in command.params if isinstance(option, click.Option) for name in option.opts}
    names: list[str] = []
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "--":
        name, equals, value = arguments[at].partition("=")
        option = own.get(name)
        if option is None and name.startswith("-p"):
            name, value, num_values = "-p", arguments[at].removeprefix("-p"), 0
        else:
            num_values = 0 if equals else option.nargs * (not option.is_flag) if option is not None else 1
        if name in own["-p"].opts:
            names += [value] if not num_values else arguments[at + 1 : at + 2]
        at += 1 + num_values
    return frozenset(name.removeprefix("no:") for name in names if name.startswith("no:"))
