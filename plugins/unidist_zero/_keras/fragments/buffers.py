"""Engine memory as the memory of tensors, for as long as TensorFlow uses it."""

from __future__ import annotations

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator

_NUM_KEPT = 2


class TensorBuffers:
    """A pool of engine memory, reused once nobody refers to it. Few idle buffers are kept: memory is scarce.

    Args:
        communicator: allocates.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._idle: list[Buffer] = []  # by size

    def acquire(self, count: int, dtype: DType) -> Buffer:
        """Return `count` elements, with any values. They belong to the caller until nobody refers to them."""
        nbytes = count * dtype.itemsize
        memory = next((each for each in self._idle if each.nbytes >= nbytes), None)
        if memory is None:
            if self._idle:
                del self._idle[0]  # all are too small: one of them makes room
            memory = self._communicator.allocate(nbytes)
        else:
            self._idle.remove(memory)
        return Buffer(memory.address, count, dtype, _Lease(self._idle, memory))


class _Lease:
    """Returns a buffer to the pool when nobody refers to it any more."""

    def __init__(self, idle: list[Buffer], memory: Buffer) -> None:
        self._idle = idle
        self._memory = memory

    def __del__(self) -> None:
        self._idle.append(self._memory)
        self._idle.sort(key=lambda idle: idle.nbytes)
        if len(self._idle) > _NUM_KEPT:
            del self._idle[0]
