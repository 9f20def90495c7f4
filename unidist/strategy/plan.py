"""The strategy line: `zero=2,accumulate=4`, `pipeline=2:schedule=1f1b:microbatches=8`, and what becomes of it.

Text -> `parse` -> names with values -> `build` -> strategy objects -> `make_plan` -> a checked plan.
All of it runs in the launcher as well as on the ranks, and imports no framework.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from unidist.errors import ConfigurationError, unknown_choice
from unidist.mesh import DATA_AXIS, Mesh
from unidist.registry import Registry, StrategyType
from unidist.strategy.interface import ChoosesPrecision, GradientOwner, Plan, RunsSteps, Strategy, UpdateGate

T = TypeVar("T")

StrategyLike = str | Strategy | Sequence["str | Strategy"] | None
"""What users may pass as `strategy=`: a line, one object, or a list of both; None takes the command line's."""


@dataclass(frozen=True)
class StrategyRequest:
    """One item of the line: `name=value:option=value`; value None means the strategy's default."""

    name: str
    value: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)


def parse(line: str) -> list[StrategyRequest]:
    """Return the items of a strategy line; an empty line has none.

    Raises:
        ConfigurationError: the line cannot be read; shows the item and the syntax.
    """
    requests = []
    for item in filter(None, (part.strip() for part in line.split(","))):
        head, *rest = item.split(":")
        name, has_value, value = head.partition("=")
        options: dict[str, str] = {}
        for option in rest:
            key, equals, text = option.partition("=")
            if not (key.strip() and equals and text.strip()):
                raise ConfigurationError(
                    f"option {option!r} in {item!r} cannot be read. Syntax: NAME=VALUE:OPTION=VALUE,NAME=VALUE"
                )
            options[key.strip().replace("-", "_")] = text.strip()
        if not name.strip() or (has_value and not value.strip()):
            raise ConfigurationError(f"strategy {item!r} cannot be read. Syntax: NAME=VALUE:OPTION=VALUE,NAME=VALUE")
        requests.append(StrategyRequest(name.strip(), value.strip() if has_value else None, options))
    return requests


def build(strategy: StrategyLike, registry: Registry[StrategyType]) -> tuple[Strategy, ...]:
    """Return strategy objects for what the user passed; unknown names list the choices.

    Raises:
        ConfigurationError: an unknown strategy or option, a value of the wrong type, one strategy twice.
    """
    parts: Sequence[str | Strategy]
    parts = [] if strategy is None else [strategy] if isinstance(strategy, str | Strategy) else list(strategy)
    built: list[Strategy] = []
    for part in parts:
        if isinstance(part, Strategy):
            built.append(part)
        elif isinstance(part, str):
            built += [construct(request, registry.get(request.name).load()) for request in parse(part)]
        else:
            raise ConfigurationError(f"a strategy is a line of text or a Strategy object, not {type(part).__name__}")
    names = [item.name for item in built]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"strategy {name!r} is given {names.count(name)} times; give it once")
    return tuple(built)


def make_plan(strategies: Sequence[Strategy], world_size: int, registry: Registry[StrategyType]) -> Plan:
    """Add the defaults, lay out the mesh, and let every strategy check the whole.

    Raises:
        ConfigurationError: sizes that do not fit the world, or strategies that do not go together.
    """
    chosen = list(strategies)
    if not any(isinstance(item, GradientOwner) for item in chosen):
        chosen.append(registry.get("data").load()())
    for power, does in (
        (GradientOwner, "own the gradient exchange"),
        (UpdateGate, "decide when an update happens"),
        (ChoosesPrecision, "choose the precision"),
        (RunsSteps, "run the passes of a step"),
    ):
        having = [item.name for item in chosen if isinstance(item, power)]
        if len(having) > 1:
            raise ConfigurationError(f"strategies {' and '.join(map(repr, having))} both {does}; give one of them.")
    plan = Plan(tuple(chosen), _mesh(chosen, world_size))
    for item in chosen:
        item.validate(plan)
    return plan


def _mesh(strategies: Sequence[Strategy], world_size: int) -> Mesh:
    axes: dict[str, int | None] = {}
    owners: dict[str, str] = {}
    for item in sorted(strategies, key=lambda strategy: strategy.axis_order):
        if item.axis is None:
            continue
        if item.axis in owners:
            raise ConfigurationError(
                f"strategies {owners[item.axis]!r} and {item.name!r} both claim mesh axis {item.axis!r}; "
                "give one of them."
            )
        owners[item.axis] = item.name
        axes[item.axis] = item.axis_size
    if DATA_AXIS not in axes:
        axes[DATA_AXIS] = None
    return Mesh(axes, world_size=world_size)


def construct(request: StrategyRequest, cls: type[T], *, kind: str = "strategy", has_value: bool = True) -> T:
    """Return an object of a dataclass whose first field is the request's value and the others are its options.

    Args:
        request: what the user wrote.
        cls: a dataclass of `int`, `float`, `bool`, `str` and `Literal` fields.
        kind: what it is, for messages.
        has_value: False: all fields are options.

    Raises:
        ConfigurationError: an unknown option, a missing one, or a value of the wrong type.
    """
    options_type: Any = cls
    fields = [item for item in dataclasses.fields(options_type) if item.init]
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    if request.value is not None:
        if not fields:
            raise ConfigurationError(f"{kind} {request.name!r} takes no value, but was given {request.value!r}")
        arguments[fields[0].name] = _convert(request.value, hints[fields[0].name], request.name)
    options = {item.name: hints[item.name] for item in (fields[1:] if has_value else fields)}
    for key, text in request.options.items():
        if key not in options:
            raise unknown_choice(f"option of {kind} {request.name!r}:", key, options)
        arguments[key] = _convert(text, options[key], f"{request.name}:{key}")
    missing = [
        item.name
        for item in fields
        if item.name not in arguments
        and item.default is dataclasses.MISSING
        and item.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigurationError(f"{kind} {request.name!r} needs a value: {request.name}=VALUE ({', '.join(missing)})")
    return cls(**arguments)


def _convert(text: str, annotation: Any, where: str) -> Any:
    """Turn the text of an option into the type of its dataclass field."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        choices = typing.get_args(annotation)
        for choice in choices:
            if str(choice) == text:
                return choice
        raise unknown_choice(f"value for {where}:", text, map(str, choices))
    if origin in (typing.Union, types.UnionType):
        inner = [item for item in typing.get_args(annotation) if item is not type(None)]
        return _convert(text, inner[0], where)
    if annotation is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ConfigurationError(f"{where}={text!r} is not true or false")
        return text.lower() in ("true", "1", "yes")
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            raise ConfigurationError(
                f"{where}={text!r} is not a{'n integer' if annotation is int else ' number'}"
            ) from None
    return text
