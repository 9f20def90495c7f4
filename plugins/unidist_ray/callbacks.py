"""Callbacks of `RayExecutor.run`: they get the values that ranks log, on their way through a queue of Ray's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from ray.util.queue import Queue

from unidist.errors import UsageError

Callback = Callable[[Any], Any]


class Callbacks:
    """The callbacks of one call. A context manager; leaving it ends the queue.

    Args:
        callbacks: each is called with each value, in the thread that waits for the ranks.

    Raises:
        UsageError: one of them cannot be called.
    """

    def __init__(self, callbacks: Sequence[Callback] | None) -> None:
        self._callbacks = list(callbacks or ())
        for callback in self._callbacks:
            if not callable(callback):
                raise UsageError(f"callbacks={self._callbacks!r}: {callback!r} cannot be called; give functions.")
        self.queue: Any = Queue(actor_options={"num_cpus": 0}) if self._callbacks else None
        """Where ranks put values; None if there are no callbacks."""

    def turn(self) -> None:
        """Hand over what has come since the last turn."""
        if self.queue is None:
            return
        for value in self.queue.get_nowait_batch(self.queue.qsize()):
            for callback in self._callbacks:
                callback(value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.queue is not None:
            self.queue.shutdown(force=True)
