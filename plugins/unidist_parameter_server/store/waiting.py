"""Bounded waits for a condition in memory that processes share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

_YIELDS = 20
_SHORTEST_SEC, _LONGEST_SEC = 20e-6, 1e-3
_LOOK_SEC = 0.05
"""Time between two looks at the processes that are waited for."""


def wait_until(condition: Callable[[], bool], timeout: timedelta, look: Callable[[float], None]) -> None:
    """Return when the condition holds.

    Args:
        condition: looked at again and again, up to 50 000 times a second at first.
        timeout: longest wait.
        look: called now and then with the seconds that were waited; raises if the wait is in vain.

    Raises:
        TimeoutError: the condition does not hold in time.
    """
    for _ in range(_YIELDS):
        if condition():
            return
        os.sched_yield()
    begun = time.monotonic()
    next_look = begun + _LOOK_SEC
    pause = _SHORTEST_SEC
    while not condition():
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_SEC)
        now = time.monotonic()
        if now >= next_look:
            look(now - begun)
            next_look = now + _LOOK_SEC
            if now - begun > timeout.total_seconds() and not condition():
                raise TimeoutError
