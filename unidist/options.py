"""Options on the command line: `zero=2,accumulate=4`, `pipeline=2:schedule=1f1b:microbatches=8`.

Text -> `parse` -> names with values and options -> `construct` -> an object whose fields are the options.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeVar

from unidist.errors import ConfigurationError, unknown_choice

__all__ = ["LineItem", "check_numbers", "construct", "number_fault", "option_types", "parse"]

T = TypeVar("T")


@dataclass(frozen=True)
class LineItem:
    """One item of the line: `name=value:option=value`; value None means the strategy's default."""

    name: str
    value: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)


def parse(line: str) -> list[LineItem]:
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
        requests.append(LineItem(name.strip(), value.strip() if has_value else None, options))
    return requests


def construct(request: LineItem, cls: type[T], *, kind: str = "strategy", has_value: bool = True) -> T:
    """Return an object of a dataclass whose first field is the request's value and the others are its options.

    Args:
        request: what the user wrote.
        cls: a dataclass of `int`, `float`, `bool`, `str` and `Literal` fields. Numbers are finite, unless the field's
            `metadata` says `"infinite": True`.
        kind: what it is, for messages.
        has_value: False: all fields are options.

    Raises:
        ConfigurationError: an unknown option, a missing one, a value of the wrong type, or a number that is not finite.
    """
    hints = option_types(cls)
    options_type: Any = cls
    fields = [item for item in dataclasses.fields(options_type) if item.name in hints]
    infinite = {item.name: bool(item.metadata.get("infinite")) for item in fields}
    arguments: dict[str, Any] = {}
    if request.value is not None:
        if not fields:
            raise ConfigurationError(f"{kind} {request.name!r} takes no value, but was given {request.value!r}")
        name = fields[0].name
        arguments[name] = _convert(request.value, hints[name], request.name, infinite=infinite[name])
    options = {item.name: hints[item.name] for item in (fields[1:] if has_value else fields)}
    for key, text in request.options.items():
        if key not in options:
            raise unknown_choice(f"option of {kind} {request.name!r}:", key, options)
        arguments[key] = _convert(text, options[key], f"{request.name}:{key}", infinite=infinite[key])
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


def check_numbers(chosen: object, *, has_value: bool = True, signs: bool = True) -> None:
    """Check the numbers in an object whose fields are options, wherever it was made.

    Args:
        chosen: a strategy, or what else has a `name` and options. What is no dataclass is not looked at.
        has_value: False: all fields are options.
        signs: numbers are 0 or more, unless the field's `metadata` says `"negative": True`. Ask for it after the
            object's own checks: they know better what to say.

    Raises:
        ConfigurationError: one is not of its field's type, or out of range; says which.
    """
    if not dataclasses.is_dataclass(chosen):
        return
    options: Any = chosen
    name = getattr(chosen, "name", type(chosen).__name__)
    for place, item in enumerate(each for each in dataclasses.fields(options) if each.init):
        kind = _NUMBERS.get(item.type if isinstance(item.type, str) else getattr(item.type, "__name__", ""))
        value = getattr(options, item.name)
        if kind is None or (value is None and "None" in str(item.type)):
            continue
        where = name if has_value and place == 0 else f"{name}:{item.name}"
        negative = not signs or bool(item.metadata.get("negative"))
        if fault := number_fault(value, kind, negative=negative, infinite=bool(item.metadata.get("infinite"))):
            raise ConfigurationError(f"{where}={value!r} {fault}")


def number_fault(
    value: object, kind: type[int] | type[float], *, negative: bool = False, infinite: bool = False
) -> str:
    """Say why a value is no number for an option; "" if it is one.

    Args:
        value: a number, or its text.
        kind: of the number: `int` is a whole one.
        negative: a number below 0 is one, too.
        infinite: "inf" is one, too.
    """
    wanted = "an integer" if kind is int else "a number"
    if isinstance(value, str):
        try:
            value = kind(value)
        except ValueError:
            return f"is not {wanted}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral if kind is int else numbers.Real):
        return f"is not {wanted}"
    if math.isnan(value):
        return f"is not {wanted}"
    if math.isinf(value) and not infinite:
        return "is not finite"
    if value < 0 and not negative:
        return "is negative; give a positive number"
    return ""


_NUMBERS: Mapping[str, type[int] | type[float]] = {
    **dict.fromkeys(("int", "int | None", "Optional[int]"), int),
    **dict.fromkeys(("float", "float | None", "Optional[float]"), float),
}


def option_types(cls: type[Any]) -> dict[str, Any]:
    """Return the type of each option of a dataclass, in the order of its fields.

    Only what `__init__` takes is an option. The types of other fields, such as the state of a strategy, are not looked
    at: they may be imported for type checkers alone.
    """
    return dict(_option_types(cls))  # type: ignore[arg-type]  # a class is hashable


@lru_cache(maxsize=256)  # a search for plans builds thousands of strategies of a few classes
def _option_types(cls: type[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        if item.init:
            owner = next(base for base in cls.__mro__ if item.name in vars(base).get("__annotations__", {}))
            annotated = types.SimpleNamespace(__annotations__={item.name: item.type})
            found |= typing.get_type_hints(annotated, vars(sys.modules[owner.__module__]), dict(vars(owner)))
    return found


def _convert(text: str, annotation: Any, where: str, *, infinite: bool) -> Any:
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
        return _convert(text, inner[0], where, infinite=infinite)
    if annotation is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ConfigurationError(f"{where}={text!r} is not true or false")
        return text.lower() in ("true", "1", "yes")
    if annotation in (int, float):
        if fault := number_fault(text, annotation, negative=True, infinite=infinite):
            raise ConfigurationError(f"{where}={text!r} {fault}")
        return annotation(text)
    return text
