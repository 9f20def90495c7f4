"""`--config FILE`: options of the command line, kept in a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unidist.errors import ConfigurationError, unknown_choice


def read(file: Path, options: Iterable[str]) -> dict[str, Any]:
    """Return the options in a YAML or TOML file, by option name with dashes.

    Values are left as the file gives them. Names may be written with dashes or underscores.

    Args:
        file: ends in .yaml, .yml or .toml.
        options: every name that is allowed.

    Raises:
        ConfigurationError: the file cannot be read, or holds an unknown or repeated option.
    """
    known = set(options)
    found: dict[str, Any] = {}
    for key, value in _load(file).items():
        name = str(key).replace("_", "-")
        if name not in known:
            error = unknown_choice("option", str(key), known)
            raise ConfigurationError(f"{file}: {error}")
        if name in found:
            raise ConfigurationError(f"{file}: option {name!r} is given twice, with dashes and with underscores.")
        if isinstance(value, dict) and name != "env":
            raise ConfigurationError(f"{file}: option {name!r} takes a value, not a table.")
        found[name] = value
    return found


def environment_items(value: object, file: Path) -> tuple[str, ...]:
    """Return option `env` of a file as KEY=VALUE items: it may be a table or a list of such items."""
    if isinstance(value, dict):
        return tuple(f"{key}={_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return tuple(map(str, value))
    raise ConfigurationError(f"{file}: option 'env' is a table of names and values, or a list of KEY=VALUE; found {value!r}.")


def _text(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


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
            raise ConfigurationError(f"{file} holds {type(content).__name__}; expected a table of option names and values.")
        return content
    raise ConfigurationError(f"--config {str(file)!r}: the name must end in .yaml, .yml or .toml.")
