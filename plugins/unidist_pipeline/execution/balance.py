"""Cuts a row of units into consecutive stages of about equal cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from unidist.errors import ConfigurationError

_Division = tuple[float, float, float, tuple[int, ...]]
"""Largest cost, sum of squares, traffic, cuts."""


def cut_evenly(costs: Sequence[float], num_stages: int, passing: Sequence[float] | None = None) -> list[int]:
    """Return the indices of the units at which the stages begin, except the first stage.

    The most expensive stage is as cheap as possible; among equals the stages are as equal as possible, and then as
    little as possible passes between them.

    Args:
        costs: of each unit, in order.
        num_stages: each gets at least one unit.
        passing: for each unit, the amount passed if a stage begins there; default: nothing.

    Raises:
        ConfigurationError: fewer units than stages.
    """
    count = len(costs)
    if count < num_stages:
        raise ConfigurationError(f"{count} units do not make {num_stages} stages")
    sums = [0.0, *accumulate(costs)]
    traffic = passing or [0.0] * count
    # best[i]: the best division of the first i units into the stages so far.
    infinite: _Division = (float("inf"), 0.0, 0.0, ())
    best: list[_Division] = [(sums[end], sums[end] ** 2, 0.0, ()) if end else infinite for end in range(count + 1)]
    for stage in range(1, num_stages):
        later: list[_Division] = [infinite] * (count + 1)
        for end in range(stage + 1, count + 1 - (num_stages - 1 - stage)):
            found = infinite
            for start in range(end - 1, stage - 1, -1):
                own = sums[end] - sums[start]
                if own > found[0]:
                    break  # costs are not negative: longer stages are not cheaper
                most, squares, passes, cuts = best[start]
                candidate = (max(most, own), squares + own**2, passes + traffic[start], (*cuts, start))
                if candidate[:3] < found[:3]:
                    found = candidate
            later[end] = found
        best = later
    return list(best[count][3])
