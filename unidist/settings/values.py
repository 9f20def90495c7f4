"""Single values out of environment variables: numbers, durations, or an error that names the variable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from unidist.errors import ConfigurationError


def choice(env: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """Return the value of a variable, one of these; the first if it is not set.

    Raises:
        ConfigurationError: it is none of them.
    """
    text = env.get(name) or choices[0]
    if text not in choices:
        raise ConfigurationError(f"{name}={text!r}; choices: {', '.join(choices)}")
    return text


def first_set(env: Mapping[str, str], *names: str) -> str:
    """Return the first of `names` that is set; the first of all if none is."""
    return next((name for name in names if env.get(name)), names[0])


def required(env: Mapping[str, str], name: str, where: str) -> int:
    """Return a whole number that must be set; `where` completes "though other variables are ..."."""
    if name not in env:
        raise ConfigurationError(f"{name} is not set, though other variables are {where}. Set all of them or none.")
    return integer(env, name, 0)


def integer(env: Mapping[str, str], name: str, default: int) -> int:
    """Return a whole number; the default if the variable is not set, is empty or has no name."""
    text = env.get(name) if name else None
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is not a whole number") from None


def non_negative(env: Mapping[str, str], name: str, default: int) -> int:
    """Return a whole number of 0 or more."""
    value = integer(env, name, default)
    if value < 0:
        raise ConfigurationError(f"{name}={value} is negative; give 0 or more")
    return value


def real(env: Mapping[str, str], name: str, default: float) -> float:
    """Return a finite number of 0 or more."""
    text = env.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is not a number") from None
    if not 0 <= value < float("inf"):
        raise ConfigurationError(f"{name}={text!r}; give 0 or more")
    return value


def seconds(env: Mapping[str, str], name: str, default: timedelta, *, zero_allowed: bool = False) -> timedelta:
    """Return a duration, given in seconds; a time limit, which is above 0, unless zero is allowed."""
    value = real(env, name, default.total_seconds())
    if value == 0 and not zero_allowed:
        raise ConfigurationError(f"{name}=0: a wait needs a time limit above 0 seconds")
    try:
        return timedelta(seconds=value)
    except OverflowError:
        raise ConfigurationError(f"{name}={env.get(name)!r}: no wait is that long; give fewer seconds") from None
