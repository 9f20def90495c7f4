"""A thread that watches waiting operations: reports stalled ones, and ends them at their time limit.

It sleeps until the next moment at which something could be due, so a loop whose operations complete costs
nothing. It is a separate thread because the driver of the negotiation may be blocked in an engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Watchdog:
    """Calls `look` at the moments that it asks for.

    Args:
        look: is given the time (`time.monotonic`), and returns when it wants to be called next.
    """

    def __init__(self, look: Callable[[float], float]) -> None:
        self._look = look
        self._condition = threading.Condition()
        self._next = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="unidist-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread, which calls `look` at once."""
        self._thread.start()

    def wake_by(self, moment: float) -> None:
        """Make sure that `look` is called not long after `moment`."""
        # Under the condition: the thread is asleep until `_next`, or inside `look` and will take the minimum.
        with self._condition:
            if moment < self._next:
                self._next = moment
                self._condition.notify()

    def close(self) -> None:
        """End the thread and wait for it. From the thread itself, it ends after the current look."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _main(self) -> None:
        while True:
            with self._condition:
                while not self._closed and (remaining := self._next - time.monotonic()) > 0:
                    self._condition.wait(min(remaining, threading.TIMEOUT_MAX))
                if self._closed:
                    return
                # A `wake_by` that comes during `look` lowers this; what `look` returns cannot know of it.
                self._next = float("inf")
            wanted = self._look(time.monotonic())
            with self._condition:
                self._next = min(self._next, wanted)
