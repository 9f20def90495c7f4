"""Copies of the pieces that this rank writes, so that training can continue while they are written."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from unidist.buffer import Buffer, copy
from unidist.checkpoint.format.pieces import Piece


class SnapshotMemory:
    """Memory for one snapshot at a time. It is kept for the next one: new pages cost ten times the copy."""

    def __init__(self) -> None:
        self._memory: Buffer | None = None

    def take(self, pieces: Sequence[tuple[str, Piece]]) -> list[tuple[str, Piece]]:
        """Return copies of the pieces. They overwrite those of the previous call.

        Args:
            pieces: each with its section.

        Raises:
            MemoryError: there is not enough.
        """
        total = sum(piece.nbytes for _, piece in pieces if not piece.is_copied)
        memory = self._of_size(total)
        taken, start = [], 0
        # The largest items first: every piece then begins at a multiple of its item size.
        for section, piece in sorted(pieces, key=lambda item: -item[1].tensor.dtype.itemsize):
            place = piece.memory
            if not piece.is_copied and place.nbytes:
                place = memory.slice(start, place.nbytes).cast(place.dtype)
                copy(piece.memory, place)
                start += place.nbytes
            taken.append((section, Piece(piece.tensor, piece.part, place)))
        return taken

    def close(self) -> None:
        """Release the memory as soon as it is no longer in use. Idempotent."""
        self._memory = None

    def _of_size(self, nbytes: int) -> Buffer:
        if self._memory is None or self._memory.count < nbytes:
            self._memory = None  # first: not two of them at a time
            try:
                pages = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as exc:  # which would be taken for the disk's
                raise MemoryError(f"{nbytes} bytes for the copy of an asynchronous save: {exc.strerror}") from exc
            self._memory = Buffer.of(pages)
        return self._memory
