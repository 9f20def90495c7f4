"""The part of a link's bandwidth that collectives reach, by their size."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from unidist.errors import ConfigurationError

PUBLISHED = 0.8
"""Between hosts, if nothing was measured: see docs/published.md, which says what papers report."""


@dataclass(frozen=True)
class Efficiency:
    """The part of a bandwidth that is reached, as a line through points over the logarithm of the size.

    Args:
        points: `(bytes, part)` by ascending bytes; below the first and above the last one its part holds.
    """

    points: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

    def __post_init__(self) -> None:
        """Check the numbers."""
        sizes = [size for size, _ in self.points]
        if not sizes or sizes[0] <= 0 or any(a >= b for a, b in pairwise(sizes)):
            raise ConfigurationError(f"an efficiency by sizes {sizes}: give one or more, above 0 and ascending")
        for size, part in self.points:
            if not 0 < part < math.inf:
                raise ConfigurationError(f"an efficiency of {part:g} at {size:g} bytes: give a number above 0")

    @classmethod
    def constant(cls, part: float) -> Efficiency:
        """Return the same part for all sizes."""
        return cls(((1.0, part),))

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> Efficiency:
        """Return that of measured points, in any order; of several for one size the best counts."""
        best: dict[float, float] = {}
        for size, part in points:
            best[size] = max(part, best.get(size, 0.0))
        return cls(tuple(sorted(best.items())))

    def at(self, num_bytes: float) -> float:
        """Return the part for a collective of `num_bytes`."""
        points = self.points
        if num_bytes <= points[0][0]:
            return points[0][1]
        if num_bytes >= points[-1][0]:
            return points[-1][1]
        index = bisect_right(points, (num_bytes, math.inf))
        (low, first), (high, second) = points[index - 1], points[index]
        return first + (second - first) * math.log(num_bytes / low) / math.log(high / low)


WHOLE = Efficiency()
"""All of the bandwidth: the default inside of a host, where a link is what its ranks reach."""
BETWEEN_HOSTS = Efficiency.constant(PUBLISHED)
"""The default between hosts."""
