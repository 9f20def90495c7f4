"""Small all-reduces whose data travels with the message of a cycle: agreement and sum in one exchange.

Where every rank announces the same known all-reduce and nothing else, as loops do that wait for each operation, each
rank has everybody's data when the cycle ends, and adds it up by itself. The bits are those of the engine's own
all-reduce, as `Capabilities.adds_in_rank_order` promises.
"""

from __future__ import annotations

import ctypes

from unidist.algorithms import compiled_kernel
from unidist.communicator import Communicator, Work
from unidist.communicator_capabilities import ExchangesBlocks
from unidist.negotiation._wire import BLOCK_BYTES
from unidist.negotiation.request import Request

CARRIED_BYTES = 4096
"""Of one rank. Every cycle exchanges so much more, with data or without."""
MOST_RANKS = 8
"""With more of them a second exchange is cheaper than this room in each cycle."""


class CycleBlocks:
    """The memory of a cycle's exchange: of each rank a block, and room for data behind it.

    Args:
        communicator: exchanges them.

    Attributes:
        room: bytes of data that a block carries; 0: none. The same on every rank.
    """

    def __init__(self, communicator: Communicator) -> None:
        size = communicator.size
        self._kernel = compiled_kernel() if communicator.capabilities.adds_in_rank_order else None
        self.room = CARRIED_BYTES if 1 < size <= MOST_RANKS and self._kernel is not None else 0
        self._communicator = communicator
        self._at_once = communicator if isinstance(communicator, ExchangesBlocks) else None
        stride = BLOCK_BYTES + self.room
        memory = communicator.allocate(stride * (1 + size))
        self._own, self._all = memory.slice(0, stride), memory.slice(stride, stride * size)
        self._own_block, self._view = self._own.bytes()[:BLOCK_BYTES], self._all.bytes()
        self._starts = range(0, stride * size, stride)
        self._own_data = self._own.address + BLOCK_BYTES
        self._data = tuple(self._all.address + start + BLOCK_BYTES for start in self._starts)

    def exchange(self, block: bytes, request: Request | None) -> list[bytes] | None:
        """Send a block to all ranks, and return theirs, or None if all are this very one. Collective.

        Args:
            block: this rank's.
            request: a known all-reduce, whose data goes with it; it is reduced if all blocks are equal. None: the room
                is sent as it is.
        """
        started = self.start(block, request)
        return None if started is True else self.finish(started, block, request)

    def start(self, block: bytes, request: Request | None) -> bool | Work:
        """Send a block as `exchange` does; return True if that is complete, and all blocks are equal."""
        own, everyone = self._own, self._all
        if self._at_once is not None:
            if request is None:
                return self._at_once.exchange_blocks(own, everyone, block)
            operands = request.source, request.target, request.op, request.scale
            return self._at_once.exchange_blocks(own, everyone, block, *operands)
        self._own_block[:] = block
        if request is not None:
            assert request.source.nbytes <= self.room, "the agreement has looked"
            ctypes.memmove(self._own_data, request.source.address, request.source.nbytes)
        return self._communicator.allgather(own, everyone)

    def finish(self, started: bool | Work, block: bytes, request: Request | None) -> list[bytes] | None:
        """Wait for what `start` has returned, which is not True, and return what `exchange` does."""
        if isinstance(started, Work):
            started.wait()
        view = self._view
        blocks = [view[start : start + BLOCK_BYTES].tobytes() for start in self._starts]
        if blocks.count(block) < len(blocks):
            return blocks
        if request is not None:
            self._reduce(request)
        return None

    def _reduce(self, request: Request) -> None:
        kernel, target = self._kernel, request.target
        assert kernel is not None, "there is room"
        kernel.reduce(
            *(target.address, self._data, target.count),
            *(kernel.dtypes[target.dtype], kernel.ops[request.op], request.scale),
        )


__all__ = ["CARRIED_BYTES", "CycleBlocks"]
