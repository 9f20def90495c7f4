"""Strategy lines of several strategies, all that go together, for tests that compare them with one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from unidist.errors import ConfigurationError
from unidist.registry import Registry
from unidist.strategy import StrategySpec
from unidist.strategy.plan import build, make_plan

LIMIT = 1e-12


def lines(choices: Sequence[Sequence[str]], count: int, ranks: int, registry: Registry[StrategySpec]) -> list[str]:
    """Return the lines of `count` strategies on the fewest ranks on which each of their axes has two, data included.

    Lines that some strategy refuses are left out.

    Args:
        choices: items of a line; at most one of each goes into a line.
        count: number of items.
        ranks: number of ranks; a line is returned for one number only.
        registry: of strategies.
    """
    found = []
    for chosen in itertools.combinations(choices, count):
        for items in itertools.product(*chosen):
            line = ",".join(items)
            strategies = build(line, registry)
            axes = {item.axis for item in strategies if item.axis is not None} | {"data"}
            try:
                make_plan(strategies, 2 ** len(axes), registry)
            except ConfigurationError:
                continue
            if 2 ** len(axes) == ranks:
                found.append(line)
    return found


def check(found: Sequence[dict[str, float | str]]) -> None:
    """Raise unless every line gave the numbers of one process on every rank.

    Args:
        found: of each rank, by line, the largest difference or an error's text.
    """
    wrong: dict[str, list[float | str]] = {}
    for line in found[0]:
        outcomes = [each[line] for each in found]
        if not all(isinstance(value, float) and value <= LIMIT for value in outcomes):
            wrong[line] = outcomes
    assert not wrong, "\n".join(f"{line}: {outcomes}" for line, outcomes in wrong.items())
