"""Engine memory that TensorFlow has in use for a while, as the memory of tensors."""

from __future__ import annotations

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator

_NUM_KEPT = 2


class Memories:
    """Gives out memory, and again what nobody uses any more. Little is kept: what is idle is missing elsewhere.

    Args:
        communicator: whose engine memory it is.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._idle: list[Buffer] = []  # by size

    def take(self, count: int, dtype: DType) -> Buffer:
        """Return `count` elements. They are the caller's until nobody refers to them; anything may be in them."""
        nbytes = count * dtype.itemsize
        memory = next((each for each in self._idle if each.nbytes >= nbytes), None)
        if memory is None:
            if self._idle:
                del self._idle[0]  # all are too small: one of them makes room
            memory = self._communicator.allocate(nbytes)
        else:
            self._idle.remove(memory)
        return Buffer(memory.address, count, dtype, _Loan(self._idle, memory))


class _Loan:
    """Gives a memory back when nobody refers to it any more."""

    def __init__(self, idle: list[Buffer], memory: Buffer) -> None:
        self._idle = idle
        self._memory = memory

    def __del__(self) -> None:
        self._idle.append(self._memory)
        self._idle.sort(key=lambda idle: idle.nbytes)
        if len(self._idle) > _NUM_KEPT:
            del self._idle[0]
