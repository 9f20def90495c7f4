"""The command line of horovodrun 0.28.1 as that of `unidist launch`. Pure.

Most flags have the same names there. This translates the others: four that mean something else, abbreviations, and
flags of elastic jobs that horovodrun does not look at in a job that is not elastic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from unidist.errors import ConfigurationError

_OTHER_NAMES = {"-v": "--version", "-p": "--ssh-port"}
"""Flags that have another meaning in `unidist launch`, and their names there."""

_ALREADY_SO = ("--stall-check",)
"""Switches whose effect is the default; with a value, `unidist launch` has another option of the name."""

_ELASTIC = ("--min-np", "--min-num-proc", "--max-np", "--max-num-proc", "--host-discovery-script")
_ONLY_ELASTIC = ("--slots-per-host", "--elastic-timeout", "--reset-limit", "--blacklist-cooldown-range")


class Translated(NamedTuple):
    """Arguments of `unidist launch`, and what to warn of."""

    arguments: list[str]
    warnings: list[str]


def translated(arguments: Sequence[str], num_values: Mapping[str, int]) -> Translated:
    """Return the arguments of `unidist launch` that do what horovodrun does with `arguments`.

    Args:
        arguments: of horovodrun; those of `unidist launch` may be among them.
        num_values: for each flag of `unidist launch`, the number of its values.

    Raises:
        ConfigurationError: an abbreviation stands for several flags.
    """
    flags: list[list[str]] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = _whole(name, num_values) if name.startswith("--") else name
        if name in _ALREADY_SO and not equals:
            continue
        name = _OTHER_NAMES.get(name, name)
        number = 0 if equals else num_values.get(name, 0)
        flags.append([f"{name}{equals}{value}", *rest[:number]])
        del rest[:number]
    names = [flag[0].partition("=")[0] for flag in flags]
    warnings = []
    if not set(names) & set(_ELASTIC):
        for name in sorted(set(names) & set(_ONLY_ELASTIC)):
            warnings.append(f"{name} is for elastic jobs, and this is none: give --min-np or --host-discovery-script.")
        flags = [flag for flag, name in zip(flags, names, strict=True) if name not in _ONLY_ELASTIC]
    return Translated([*(word for flag in flags for word in flag), *rest], warnings)


def _whole(name: str, num_values: Mapping[str, int]) -> str:
    """Return the flag that a long name, or the beginning of one, stands for; the name itself if it stands for none."""
    if name in num_values:
        return name
    found = [flag for flag in num_values if flag.startswith(name)]
    if len(found) > 1:
        raise ConfigurationError(f"{name} can be any of {', '.join(sorted(found))}; write the whole name.")
    return found[0] if found else name
