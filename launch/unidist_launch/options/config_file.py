"""`--config FILE`: options of the command line, kept in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from unidist.errors import ConfigurationError, unknown_choice
from unidist_launch.options import horovod_config

UNKNOWN_IS_WARNED = "warn of unknown options in files"
"""The `obj` of a context of click in whose files unknown options are no errors: horovodrun overlooks them."""


class ValueKind(StrEnum):
    """Kind of value that an option takes, and that a file must have for it."""

    TEXT = "a text or a number"
    FLAG = "true or false"
    LIST = "a list of texts"
    ENVIRONMENT = "a table of names and values, or a list of KEY=VALUE"


def read(
    file: Path, options: Mapping[str, ValueKind], *, warn: Callable[[str], object] | None = None
) -> dict[str, Any]:
    """Return the options in a YAML or TOML file by option name, as the command line would give them.

    Names may be written with dashes or underscores. Texts and numbers become str, flags bool, lists tuples.
    The sections of Horovod's files (`params`, `timeline`, ...) are understood too.

    Args:
        file: ends in .yaml, .yml or .toml.
        options: what is allowed: kind by name, with dashes.
        warn: is given a sentence for each unknown option; None: they are errors.

    Raises:
        ConfigurationError: the file cannot be read; an option is unknown, repeated or of the wrong kind.
    """
    found: dict[str, Any] = {}
    for key, value in _flags(file):
        name = horovod_config.dashed(key)
        if name not in options:
            problem = f"{file}: {unknown_choice('option', key, options)}"
            if warn is None:
                raise ConfigurationError(problem)
            warn(problem)
            continue
        if name in found:
            raise ConfigurationError(f"{file}: option {name!r} is given twice, with dashes and with underscores.")
        converted = _convert(value, options[name])
        if converted is None:
            raise ConfigurationError(f"{file}: option {name!r} is {options[name]}; found {value!r}.")
        found[name] = converted
    return found


def by_parameter(file: Path, found: Mapping[str, Any], parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return what `read` found by name of the parameter.

    Args:
        file: for the error.
        found: values by name of the option.
        parameters: the parameter of each option; several options may be names of one.

    Raises:
        ConfigurationError: two names of one parameter are given.
    """
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    for name, value in found.items():
        parameter = parameters[name]
        if parameter in given:
            raise ConfigurationError(
                f"{file}: options {given[parameter]!r} and {name!r} are the same; give one of them."
            )
        given[parameter], values[parameter] = name, value
    return values


def _flags(file: Path) -> Iterator[tuple[str, Any]]:
    content = _load(file)
    try:
        yield from horovod_config.flags(content)
    except ConfigurationError as exc:
        raise ConfigurationError(f"{file}: {exc}") from exc


def _convert(value: Any, kind: ValueKind) -> Any:
    """Return the value as the command line would give it; None if it is not of this kind."""
    if kind is ValueKind.FLAG:
        return value if isinstance(value, bool) else None
    if kind is ValueKind.ENVIRONMENT and isinstance(value, dict):
        return tuple(f"{key}={text}" for key, item in value.items() if (text := _text(item)) is not None)
    if kind in (ValueKind.LIST, ValueKind.ENVIRONMENT):
        items = value if isinstance(value, list) else [value]
        return tuple(items) if all(isinstance(item, str) for item in items) else None
    return _text(value)


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int | float) else None


def _load(file: Path) -> dict[Any, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"--config {str(file)!r} cannot be read: {exc}") from exc
    suffix = file.suffix.lower()
    if suffix == ".toml":
        import tomllib

        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as exc:
            raise ConfigurationError(f"{file} is not valid TOML: {exc}") from exc
    if suffix in (".yaml", ".yml"):
        import yaml

        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as exc:
            raise ConfigurationError(f"{file} is not valid YAML: {exc}") from exc
        if content is None:
            return {}
        if not isinstance(content, dict):
            raise ConfigurationError(
                f"{file} holds {type(content).__name__}; expected a table of option names and values."
            )
        return content
    raise ConfigurationError(f"--config {str(file)!r}: the name must end in .yaml, .yml or .toml.")
