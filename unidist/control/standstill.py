"""Notices that this process itself stood still, so that what it has not heard meanwhile proves nothing."""

from __future__ import annotations

__all__ = ["LONGEST_TURN_SEC", "Standstill"]

LONGEST_TURN_SEC = 1.0
"""A loop that turns several times a second, and did not for so long, stood still: its process was stopped, its machine
was frozen or asleep, or it got no processor."""


class Standstill:
    """The turns of one loop. Those who watch others move what they know of them by what `turn` returns."""

    def __init__(self) -> None:
        self._turned: float | None = None

    def turn(self, now: float) -> float:
        """Return for how many seconds the loop stood still before this turn; 0.0 for an ordinary turn.

        Args:
            now: seconds of `time.monotonic`.
        """
        last, self._turned = self._turned, now
        return now - last if last is not None and now - last > LONGEST_TURN_SEC else 0.0
