"""Memory for outgoing messages of the shm engine."""

from __future__ import annotations

from unidist.engines._arena import Allocation, Arena

_KEPT_BYTES = 1 << 20  # messages up to this leave their memory behind for the next one,
_KEPT_PIECES = 8  # this many of a size


class Outbox:
    """Engine memory for copies of outgoing messages; small pieces are kept for the next message.

    Args:
        arena: gives the memory.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena: Arena | None = arena
        self._spare: dict[int, list[Allocation]] = {}

    def take(self, nbytes: int) -> Allocation:
        """Return memory for a message."""
        size = max(4096, 1 << max(0, nbytes - 1).bit_length()) if nbytes <= _KEPT_BYTES else nbytes
        spare = self._spare.get(size)
        assert self._arena is not None, "closed"
        return spare.pop() if spare else self._arena.allocate(size)

    def give_back(self, allocation: Allocation) -> None:
        """Take memory back once the receiver has read it."""
        if allocation.nbytes <= _KEPT_BYTES:
            spare = self._spare.setdefault(allocation.nbytes, [])
            if len(spare) < _KEPT_PIECES:
                spare.append(allocation)

    def close(self) -> None:
        """Let go of the arena: works may outlive their communicator, and would keep its memory."""
        self._spare.clear()
        self._arena = None
