"""Options of strategies that `unidist launch` has as well: `--servers N`, wherever the strategy is in the line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from unidist.errors import ConfigurationError
from unidist.options import parse
from unidist.registry import Registry
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy import StrategySpec
from unidist_launch.display.grouped_help import GroupedOption
from unidist_launch.options.numbers import Whole

SPREAD = "How training is spread"
"""The heading of options about strategies."""


def strategy_options(manager: PluginManager) -> list[click.Option]:
    """Return the options that strategies bring, each once."""
    found = {name: text for spec in manager.registry(StrategySpec) for name, text in spec.launch_options}
    return [
        GroupedOption([f"--{name}"], group=SPREAD, type=Whole(min=0), metavar="N", help=text)
        for name, text in found.items()
    ]


def with_strategy_options(line: str, options: Mapping[str, Any], strategies: Registry[StrategySpec]) -> str:
    """Return a strategy line that has what these options of `unidist launch` ask for.

    Args:
        line: as after `--strategy`.
        options: values of all options.
        strategies: all registered strategies.

    Raises:
        ConfigurationError: no strategy of the line has such an option, or it has another value; says what to do.
    """
    for name in dict.fromkeys(name for spec in strategies for name, _ in spec.launch_options):
        if options.get(name) is not None:
            line = _with_option(line, name, options[name], strategies)
    return line


def _with_option(line: str, option: str, number: int, strategies: Registry[StrategySpec]) -> str:
    having = [spec.name for spec in strategies if option in dict(spec.launch_options)]
    items = [item.strip() for item in line.split(",") if item.strip()]
    for place, request in enumerate(parse(line)):
        if request.name not in having:
            continue
        given = request.options.get(option, str(number))
        if given != str(number):
            raise ConfigurationError(
                f"--{option} {number} and --strategy {items[place]}: these are different numbers; give one of them."
            )
        if option not in request.options:
            items[place] += f":{option}={number}"
        return ",".join(items)
    raise ConfigurationError(
        f"--{option} {number}: no strategy of {line or 'data'!r} has {option}; use --strategy with one that has: "
        f"{', '.join(having)}."
    )


__all__ = ["SPREAD", "strategy_options", "with_strategy_options"]
