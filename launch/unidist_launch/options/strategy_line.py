"""`--servers N`: an option of the strategy, wherever it is in the line."""

from __future__ import annotations

from unidist.errors import ConfigurationError
from unidist.options import option_types, parse
from unidist.registry import Registry
from unidist.strategy import StrategySpec

_OPTION = "servers"


def with_servers(line: str, number: int, strategies: Registry[StrategySpec]) -> str:
    """Return a strategy line in which the strategy that has server processes has so many.

    Args:
        line: as after `--strategy`.
        number: of servers.
        strategies: all registered strategies.

    Raises:
        ConfigurationError: no strategy of the line has servers, or it has another number of them; says what to do.
    """
    items = [item.strip() for item in line.split(",") if item.strip()]
    for place, request in enumerate(parse(line)):
        if request.name not in strategies or _OPTION not in option_types(strategies.get(request.name).load()):
            continue
        given = request.options.get(_OPTION, str(number))
        if given != str(number):
            raise ConfigurationError(
                f"--servers {number} and --strategy {items[place]}: these are different numbers; give one of them."
            )
        if _OPTION not in request.options:
            items[place] += f":{_OPTION}={number}"
        return ",".join(items)
    having = [spec.name for spec in strategies if _OPTION in option_types(spec.load())]
    raise ConfigurationError(
        f"--servers {number}: no strategy of {line or 'data'!r} has server processes; use --strategy with one that "
        f"has: {', '.join(having) or 'none is installed'}."
    )
