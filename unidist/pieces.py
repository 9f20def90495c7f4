"""Sources in pieces: a power of communicators that can reduce ordinary memory where it lies.

Who asks for it (the exchange of gradients) asks by isinstance; without it, memory is copied together first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from unidist.buffer import Buffer
from unidist.communicator import ReduceOp, Work


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a source.

    Args:
        offset: of its first element in the source.
        buffer: host memory of any kind.
    """

    offset: int
    buffer: Buffer


class ReadsPieces(ABC):
    """Power of a communicator: a source may lie in pieces of ordinary memory, which nobody copies. By isinstance."""

    @abstractmethod
    def pieces_obstacle(self) -> str:
        """Return why this group cannot do it after all, or "" if it can. Alike on all ranks, not collective."""

    @abstractmethod
    def allreduce_pieces(
        self, pieces: Sequence[Piece], target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0
    ) -> Work:
        """Do what `Communicator.allreduce` does, with a source that lies in pieces. Other ranks may call either.

        Args:
            pieces: of the target's dtype, in ascending order, without overlap. What lies between them is zeros. Nobody
                changes their memory before the work is done. They may be parts of the target in their own place.
            target: engine memory, `(n,)` elements.
            op: the reduction.
            scale: the result is multiplied by this before it is stored.

        Raises:
            UsageError: pieces overlap, are not in order, of another dtype, or outside of the target; the target is no
                engine memory; or there is a `pieces_obstacle`.
        """
