"""A few reusable buffers for many buckets: at stages 2 and 3 a bucket has memory only while it is in use."""

from __future__ import annotations

from collections.abc import Callable

from unidist.buffer import Buffer


class BucketBuffers:
    """A pool of buffers.

    Args:
        allocate: makes memory of a number of bytes.
        num_kept: buffers kept for the next bucket; more are made if more are in use at once.
    """

    def __init__(self, allocate: Callable[[int], Buffer], *, num_kept: int = 2) -> None:
        self._allocate = allocate
        self._num_kept = num_kept
        self._idle: list[Buffer] = []  # by size
        self._num_used = 0

    @property
    def exhausted(self) -> bool:
        """True when the next `acquire` would need more buffers than are to be kept."""
        return not self._idle and self._num_used >= self._num_kept

    @property
    def nbytes(self) -> int:
        """Size of the idle buffers."""
        return sum(memory.nbytes for memory in self._idle)

    def acquire(self, nbytes: int) -> tuple[Buffer, Buffer]:
        """Return a buffer, and its first `nbytes` bytes. They may hold old data."""
        self._num_used += 1
        for i, memory in enumerate(self._idle):
            if memory.nbytes >= nbytes:
                del self._idle[i]
                return memory, memory.slice(0, nbytes)
        if self._idle and self._num_used + len(self._idle) > self._num_kept:
            del self._idle[0]  # too small, like all of them: its place is for the new one
        memory = self._allocate(nbytes)
        return memory, memory

    def release(self, memory: Buffer) -> None:
        """Take a buffer back; keep it, unless there are enough."""
        self._num_used -= 1
        self._idle.append(memory)
        self._idle.sort(key=lambda idle: idle.nbytes)
        while len(self._idle) + self._num_used > self._num_kept and self._idle:
            del self._idle[0]

    def clear(self) -> None:
        """Drop all idle buffers."""
        self._idle.clear()
