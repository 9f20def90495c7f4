"""Rules and errors as the values of messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unidist.control.messages import Failed
from unidist.errors import ConfigurationError, PeerLostError, StalledError, UnidistError, UsageError
from unidist_parameter_server.optimizers import Adagrad, Adam, AddDifference, Momentum, Rule, Velocity
from unidist_parameter_server.wire.messages import Rules

_RULES: dict[str, type[Rule]] = {kind.__name__: kind for kind in (AddDifference, Adagrad, Adam, Momentum, Velocity)}
_ERRORS: dict[str, type[UnidistError]] = {
    kind.__name__: kind for kind in (ConfigurationError, PeerLostError, StalledError, UsageError)
}


def told_rules(rules: Sequence[Rule]) -> Rules:
    """Return the rules of all parameters; each is written once.

    Raises:
        ConfigurationError: servers do not know one.
    """
    numbers: dict[int, int] = {}
    different: list[tuple[str, dict[str, Any]]] = []
    which = []
    for rule in rules:
        number = numbers.get(id(rule))
        if number is None:
            name = type(rule).__name__
            if _RULES.get(name) is not type(rule):
                raise ConfigurationError(
                    f"servers step by {', '.join(_RULES)}, and not by {name}; leave servers= out, or use push=delta"
                )
            number = numbers[id(rule)] = len(different)
            different.append((name, dict(vars(rule))))
        which.append(number)
    return Rules(tuple(different), tuple(which))


def rules_of(told: Rules) -> list[Rule]:
    """Return the rules of all parameters; equal ones are one object."""
    different = [_RULES[name](**options) for name, options in told.different]
    return [different[number] for number in told.which]


def failure(error: UnidistError) -> Failed:
    """Return the message that an error is for the other end."""
    kind = next((name for name, known in _ERRORS.items() if type(error) is known), "PeerLostError")
    return Failed(kind, str(error), tuple(getattr(error, "ranks", ())))


def told_error(message: Failed) -> UnidistError:
    """Return the error of a message."""
    kind = _ERRORS[message.kind]
    if issubclass(kind, PeerLostError):
        return kind(message.text, ranks=message.ranks)
    return kind(message.text)
