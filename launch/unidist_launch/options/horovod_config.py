"""The sections of a `horovodrun --config-file`, turned into the flags that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unidist.errors import ConfigurationError, unknown_choice

_PREFIXES = {
    "params": "",
    "library-options": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall-check": "stall-check-",
    "logging": "log-",
}
"""What stands before a section's keys in the name of the flag."""

_CONTROLLERS = ("gloo", "mpi")


def flags(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every option in a file, those in Horovod's sections under the flag's name.

    A section is a table under one of Horovod's names: `timeline: {filename: t.json}` is `timeline-filename`, while
    `timeline: t.json` is our own option. Names are passed on as written, but with dashes.

    Raises:
        ConfigurationError: `controller` or a section's `enabled` has a value that Horovod does not know.
    """
    for key, value in content.items():
        name = dashed(key)
        if name == "controller":
            controller = str(value).lower()
            if controller not in _CONTROLLERS:
                raise ConfigurationError(unknown_choice("controller", str(value), _CONTROLLERS))
            yield controller, True
        elif name in _PREFIXES and isinstance(value, dict):
            yield from _section(name, value)
        else:
            yield str(key), value


def dashed(key: Any) -> str:
    """Return a name as flags write it; Horovod's files write underscores."""
    return str(key).replace("_", "-")


def _section(section: str, table: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    # Without a value, Horovod takes a key as not given.
    items = {dashed(key): value for key, value in table.items() if value is not None}
    enabled = items.pop("enabled", None)
    if enabled is not None:
        if section not in ("autotune", "stall-check") or not isinstance(enabled, bool):
            raise ConfigurationError(f"section {section!r}: found enabled={enabled!r}, which Horovod does not know.")
        if section == "stall-check" and not enabled:
            yield "no-stall-check", True
            return  # its times mean nothing then, to Horovod too
        if section == "autotune":
            yield "autotune", enabled
            if not enabled:
                return
    for name, value in items.items():
        yield f"{_PREFIXES[section]}{name}", value
