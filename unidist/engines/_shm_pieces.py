"""Tables of the pieces of a source, in engine memory, where peers find them; see `shm_native/pieces.c`."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unidist.buffer import Buffer, copy
from unidist.communicator_capabilities import Piece
from unidist.engines import _shm
from unidist.engines._arena import Allocation
from unidist.errors import UsageError

_PIECE = struct.Struct("QQQ")  # first element, elements, address: `ud_piece`
_MARK = struct.Struct("QQ")  # address, number
_NUMBER = struct.Struct("Q")
_FEWEST = 64

MARK_BYTES = _MARK.size


@dataclass(frozen=True)
class Table:
    """The pieces of one source.

    Args:
        memory: of the table, until the operation is done.
        count: number of pieces.
    """

    memory: Buffer
    count: int


class Tables:
    """Memory for the tables of one group, used again when an operation is done.

    Args:
        allocate: gives engine memory.
    """

    def __init__(self, allocate: Callable[[int], Allocation]) -> None:
        self._allocate = allocate
        self._free: list[Buffer] = []

    def write(self, pieces: Sequence[Piece], target: Buffer) -> Table:
        """Return a table of these pieces.

        Raises:
            UsageError: they are no pieces of a source for this target.
        """
        end = 0
        for piece in pieces:
            start, before, end = piece.offset, end, piece.offset + piece.buffer.count
            if start < before or end > target.count:
                raise UsageError(
                    f"allreduce_pieces: the piece of elements {start} to {end} begins before {before}, where the one "
                    f"before it ends, or ends after {target.count}, as the target does"
                )
            if piece.buffer.dtype != target.dtype:
                raise UsageError(f"allreduce_pieces: a piece is {piece.buffer.dtype}, but the target {target.dtype}")
        memory = self._take(len(pieces) * _PIECE.size)
        view = memory.bytes()
        for number, piece in enumerate(pieces):
            _PIECE.pack_into(view, number * _PIECE.size, piece.offset, piece.buffer.count, piece.buffer.address)
        return Table(memory, len(pieces))

    def give_back(self, table: Table) -> None:
        """Let another operation have the memory."""
        self._free.append(table.memory)

    def clear(self) -> None:
        """Let go of all memory."""
        self._free.clear()

    def _take(self, nbytes: int) -> Buffer:
        for index, memory in enumerate(self._free):
            if memory.nbytes >= nbytes:
                return self._free.pop(index)
        size = max(_FEWEST * _PIECE.size, nbytes)
        return self._allocate(size).buffer(size)


def gather_pieces(pieces: Sequence[Piece], target: Buffer) -> None:
    """Copy pieces to where they belong in `target`, and zeros between them. They may be there already."""
    end = 0
    for piece in (*pieces, Piece(target.count, target.slice(target.count, 0))):
        gap = target.slice(end, piece.offset - end)
        if gap.count:
            gap.bytes()[:] = bytes(gap.nbytes)
        copy(piece.buffer, target.slice(piece.offset, piece.buffer.count))
        end = piece.offset + piece.buffer.count


class Mark:
    """A random number in ordinary memory, by which peers find out whether they can read this process.

    The system may refuse it (another user, a container, a security module), or show another process under a number.
    """

    def __init__(self) -> None:
        self._number = secrets.randbits(64)
        self._memory = Buffer.of(bytearray(_NUMBER.pack(self._number)))

    def told(self) -> bytes:
        """Return what peers have to know."""
        return _MARK.pack(self._memory.address, self._number)


def can_read(pid: int, told: bytes) -> bool:
    """Return whether this process can read that one's memory, by its `Mark`."""
    address, number = _MARK.unpack(told)
    return _shm.peek(pid, address) == int(number)
