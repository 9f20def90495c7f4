"""Memory for what is between two stages, kept for the operations that follow."""

from __future__ import annotations

import threading
from collections.abc import Callable

from unidist.buffer import Buffer

_KEPT = 4


class Scratch:
    """Lends memory to operations. Thread-safe.

    Fresh memory costs more than what a stage does with it: the kernel clears every page, and each rank of the host
    that looks at one maps it first.

    Args:
        allocate: makes memory of so many bytes.
    """

    def __init__(self, allocate: Callable[[int], Buffer]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._free: list[Buffer] = []

    def borrow(self, nbytes: int) -> Buffer:
        """Return at least `nbytes` bytes; `give_back` takes them when the operation is over, or nobody does."""
        with self._lock:
            fitting = [buffer for buffer in self._free if nbytes <= buffer.nbytes <= 2 * nbytes]
            if fitting:
                chosen = min(fitting, key=lambda buffer: buffer.nbytes)
                self._free = [buffer for buffer in self._free if buffer is not chosen]
                return chosen
        return self._allocate(nbytes)

    def give_back(self, buffer: Buffer) -> None:
        """Keep memory that no rank reads any more for later; the oldest goes if there is too much."""
        with self._lock:
            self._free = [*self._free, buffer][-_KEPT:]

    def clear(self) -> None:
        """Free what is kept."""
        with self._lock:
            self._free = []
