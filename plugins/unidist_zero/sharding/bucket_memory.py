"""A few memories for many buckets: at stages 2 and 3 a bucket has memory only while it is filled and reduced."""

from __future__ import annotations

from collections.abc import Callable

from unidist.buffer import Buffer


class BucketMemories:
    """Memories that are handed out and taken back.

    Args:
        allocate: makes memory of a number of bytes.
        num_kept: memories that stay for the next bucket; more are made where more are in use at once.
    """

    def __init__(self, allocate: Callable[[int], Buffer], *, num_kept: int = 2) -> None:
        self._allocate = allocate
        self._num_kept = num_kept
        self._idle: list[Buffer] = []  # by size
        self._num_used = 0

    @property
    def exhausted(self) -> bool:
        """True when the next `take` would need more memories than are to be kept."""
        return not self._idle and self._num_used >= self._num_kept

    @property
    def nbytes(self) -> int:
        """Size of what is idle."""
        return sum(memory.nbytes for memory in self._idle)

    def take(self, nbytes: int) -> tuple[Buffer, Buffer]:
        """Return a memory, and its first `nbytes` bytes. What was written to it before may still be there."""
        self._num_used += 1
        for i, memory in enumerate(self._idle):
            if memory.nbytes >= nbytes:
                del self._idle[i]
                return memory, memory.slice(0, nbytes)
        if self._idle and self._num_used + len(self._idle) > self._num_kept:
            del self._idle[0]  # too small, like all of them: its place is for the new one
        memory = self._allocate(nbytes)
        return memory, memory

    def give_back(self, memory: Buffer) -> None:
        """Take a memory back; keep it, unless there are enough."""
        self._num_used -= 1
        self._idle.append(memory)
        self._idle.sort(key=lambda idle: idle.nbytes)
        while len(self._idle) + self._num_used > self._num_kept and self._idle:
            del self._idle[0]

    def clear(self) -> None:
        """Let go of everything that is idle."""
        self._idle.clear()
