"""When each fragment of the parameters is synchronized, and which parameters are in it. Pure; the same on every rank.

The updates since all parameters were equal have the *positions* 1, 2, 3, ... Fragment k of K is sent after the
positions at which (position - offset of k) is a multiple of H, and the result is applied `delay` updates later
(Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", https://arxiv.org/abs/2501.18512,
algorithm 2). One fragment without a delay is local SGD, and DiLoCo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Due:
    """The fragments to handle after one update, by number.

    Args:
        apply: those whose earlier exchange is completed and applied; first.
        send: those whose exchange is started, and with no delay completed and applied as well.
    """

    apply: tuple[int, ...]
    send: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.apply or self.send)


@dataclass(frozen=True)
class SynchronizationSchedule:
    """See the module's text.

    Args:
        every: H, the updates between two synchronizations of a fragment, at least 1.
        fragments: K, at most H.
        delay: updates between sending and applying, below H.
    """

    every: int
    fragments: int = 1
    delay: int = 0

    @property
    def is_simultaneous(self) -> bool:
        """Whether all parameters are synchronized after the same updates, and are equal then."""
        return self.fragments == 1 and not self.delay

    def offset(self, fragment: int) -> int:
        """Return the position of the fragment's first synchronization: they are spread evenly, the last is at H."""
        return -(-(fragment + 1) * self.every // self.fragments)

    def due(self, position: int) -> Due:
        """Return the fragments to handle after the update at this position, from 1."""
        everyone = range(self.fragments)
        sent = tuple(k for k in everyone if self._is_sent(k, position))
        if not self.delay:
            return Due((), sent)
        return Due(tuple(k for k in everyone if self._is_sent(k, position - self.delay)), sent)

    def _is_sent(self, fragment: int, position: int) -> bool:
        first = self.offset(fragment)
        return position >= first and (position - first) % self.every == 0


def divide(counts: Sequence[int], fragments: int) -> list[range]:
    """Divide parameters into consecutive fragments of about equal size, each of at least one parameter.

    Args:
        counts: number of elements of each parameter, in registration order; at least as many as fragments.
        fragments: how many.

    Returns:
        The indices of each fragment's parameters.
    """
    total, filled, begin = sum(counts), 0, 0
    found: list[range] = []
    for index, count in enumerate(counts):
        filled += count
        left = fragments - len(found) - 1
        is_full = filled * fragments >= total * (len(found) + 1)
        if left and (is_full or len(counts) - index - 1 == left):
            found.append(range(begin, index + 1))
            begin = index + 1
    return [*found, range(begin, len(counts))]
