"""Signals that end the launcher: handed to a function, and noticed by a selector."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ForwardedSignals:
    """While entered, SIGINT, SIGTERM and SIGHUP go to `handler`; those that were ignored stay so (nohup).

    Args:
        handler: called at once in the main thread, also while a write blocks, with the signal's number.
    """

    def __init__(self, handler: Callable[[int], None]) -> None:
        self._handler = handler
        self._previous: dict[int, Any] = {}
        self.received: list[int] = []
        """Every signal that came, in order."""
        self.wakeup_fd = -1
        """Becomes readable when a signal comes; empty it with `drain`."""

    def drain(self) -> None:
        """Read the wake-up bytes, so that the next signal wakes the selector again."""
        os.read(self.wakeup_fd, 4096)

    def __enter__(self) -> Self:
        self.wakeup_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self.wakeup_fd)
        os.close(self._write_fd)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        self._handler(number)
