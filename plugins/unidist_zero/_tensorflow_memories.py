"""Engine memory that TensorFlow has in use for a while, as the memory of tensors."""

from __future__ import annotations

from collections.abc import Callable

from unidist.buffer import Buffer


class Memories:
    """Memories of one size: those that nobody uses any more are given out again.

    Args:
        allocate: makes another one.
    """

    def __init__(self, allocate: Callable[[], Buffer]) -> None:
        self._allocate = allocate
        self._idle: list[Buffer] = []

    def take(self) -> Buffer:
        """Return a memory. It is this one's until nobody refers to it; what was written to it before may be there."""
        memory = self._idle.pop() if self._idle else self._allocate()
        return Buffer(memory.address, memory.count, memory.dtype, _Loan(self._idle, memory))


class _Loan:
    """Gives a memory back when nobody refers to it any more."""

    def __init__(self, idle: list[Buffer], memory: Buffer) -> None:
        self._idle = idle
        self._memory = memory

    def __del__(self) -> None:
        self._idle.append(self._memory)
