"""The registered strategies, their values and options, and valid combinations, derived from the strategies themselves.

Nothing is written down here. A strategy's values and options are the fields of its dataclass, what they mean is in its
docstring, and what goes together is what `make_plan` accepts in some small world.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from unidist.errors import ConfigurationError, PluginError
from unidist.options import option_types
from unidist.registry import Registry
from unidist.runtime_api import Plugins
from unidist.strategy import StrategySpec
from unidist.strategy.interface import NamesPlugins, Strategy
from unidist.strategy.plan import build, make_plan

WORLDS = (8, 4, 6, 2, 1)
"""Numbers of ranks that are tried, in this order; the first one's error is told where all say no."""
_EXAMPLES: dict[type, str] = {int: "2", float: "1.0", bool: "true"}
"""Values for a strategy that needs one and does not list its choices."""


@dataclass(frozen=True)
class Option:
    """One field of a strategy: its value (`name=VALUE`) or an option (`name=...:option=VALUE`).

    Args:
        name: of the option, "" for the value.
        type: as users write it: "int", "a|b|c".
        default: None where it has to be given.
        help: from the docstring, the first sentence.
    """

    name: str
    type: str
    default: str | None
    help: str


@dataclass(frozen=True)
class DescribedStrategy:
    """One strategy.

    Args:
        name: the word in `--strategy`.
        plugin: that registers it.
        summary: one line.
        axis: the mesh axis that it claims.
        options: its value first, then its options.
        examples: items of a strategy line that stand for it when combinations are tried, one for each choice of its
            value.
    """

    name: str
    plugin: str
    summary: str
    axis: str | None
    options: tuple[Option, ...]
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Pair:
    """Two items of a strategy line.

    Args:
        first: one.
        second: the other.
        worlds: numbers of ranks, of those in `WORLDS`, with which they go together.
        error: why they do not, if there is none.
    """

    first: str
    second: str
    worlds: tuple[int, ...]
    error: str = ""


def described(plugins: Plugins) -> list[DescribedStrategy]:
    """Return all strategies that can be loaded, in the order of registration."""
    registry = plugins.registry(StrategySpec)
    found = []
    for spec in registry:
        try:
            cls = spec.load()
        except PluginError:
            continue  # `unidist plugins` tells
        found.append(
            DescribedStrategy(
                spec.name, registry.origin_of(spec.name), spec.summary, cls.axis, _options(cls), _examples(spec, cls)
            )
        )
    return found


def pairs(strategies: typing.Sequence[DescribedStrategy], plugins: Plugins) -> list[Pair]:
    """Return for each two examples of different strategies whether they go together."""
    found = []
    for one, other in itertools.combinations(strategies, 2):
        for first, second in itertools.product(one.examples, other.examples):
            found.append(_tried(first, second, plugins))
    return found


def _tried(first: str, second: str, plugins: Plugins) -> Pair:
    registry: Registry[StrategySpec] = plugins.registry(StrategySpec)
    worlds, errors = [], []
    for world in WORLDS:
        try:
            strategies = build(f"{first},{second}", registry)
            make_plan(strategies, world, registry)
            for strategy in strategies:
                if isinstance(strategy, NamesPlugins):
                    strategy.check_plugins(plugins)
            worlds.append(world)
        except ConfigurationError as exc:
            errors.append(str(exc))
    return Pair(first, second, tuple(worlds), "" if worlds else errors[0])


def _options(cls: type[Strategy]) -> tuple[Option, ...]:
    hints: dict[str, Any] = option_types(cls) if dataclasses.is_dataclass(cls) else {}
    texts = _argument_texts(inspect.getdoc(cls) or "")
    found = []
    fields: Any = cls if dataclasses.is_dataclass(cls) else None
    for position, item in enumerate(field for field in (dataclasses.fields(fields) if fields else ()) if field.init):
        has_default = item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING
        default = None if not has_default else _written(item.default)
        found.append(
            Option(item.name if position else "", _type_text(hints[item.name]), default, texts.get(item.name, ""))
        )
    return tuple(found)


def _examples(spec: StrategySpec, cls: type[Strategy]) -> tuple[str, ...]:
    """Return items that stand for the strategy: every choice of a value that has choices, else one."""
    fields: Any = cls if dataclasses.is_dataclass(cls) else None
    first = next((item for item in (dataclasses.fields(fields) if fields else ()) if item.init), None)
    if first is None:
        return (spec.name,)
    hint = option_types(cls)[first.name]
    if typing.get_origin(hint) is Literal:
        return tuple(f"{spec.name}={choice}" for choice in typing.get_args(hint))
    if first.default is not dataclasses.MISSING:
        return (spec.name,)
    return (f"{spec.name}={_EXAMPLES.get(_plain(hint), '2')}",)


def _plain(hint: Any) -> Any:
    """Return the type without None: `int` of `int | None`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(item for item in typing.get_args(hint) if item is not type(None))
    return hint


def _type_text(hint: Any) -> str:
    plain = _plain(hint)
    if typing.get_origin(plain) is Literal:
        return "|".join(str(choice) for choice in typing.get_args(plain))
    return plain.__name__ if isinstance(plain, type) else str(plain)


def _written(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return "" if default is None or default is dataclasses.MISSING else str(default)


_ARGUMENT = re.compile(r"^ {4}(\w+): (.*)$")


def _argument_texts(docstring: str) -> dict[str, str]:
    """Return the first sentence about each argument in the section "Args" of a Google docstring."""
    texts: dict[str, list[str]] = {}
    current: list[str] | None = None
    inside = False
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            inside = line.strip() == "Args:"
            continue
        found = _ARGUMENT.match(line) if inside else None
        if found:
            current = texts.setdefault(found[1], [found[2]])
        elif inside and current is not None and line.strip():
            current.append(line.strip())
    return {name: _sentence(" ".join(lines)) for name, lines in texts.items()}


def _sentence(text: str) -> str:
    return re.split(r"(?<=[.;])\s", text, maxsplit=1)[0].rstrip(";.")
