"""A check that the ranks gather the same part of a model at the same time.

Gathers have no names: those of a group meet in the order in which each rank makes them. Ranks that leave out different
layers (LayerDrop, branches) would get each other's parameters, without an error where the parts are of equal size. So
the number of the part travels beside each gather, in an operation of four bytes a rank that is posted just before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, Work
from unidist.errors import MismatchError


class GatherCheck:
    """The check of one part, of which one gather is under way at a time.

    Args:
        communicator: over the shard group, for host memory. All checks of a model use the same, in the order of its
            gathers.
        number: of the part.
        names: of all parts, by number; equal on every rank.
    """

    def __init__(self, communicator: Communicator, number: int, names: Sequence[str] | Mapping[int, str]) -> None:
        self._communicator = communicator
        self._names = names
        self._own = Buffer.allocate(1, DType.INT32)
        self._own.bytes().cast("i")[0] = number
        self._all = Buffer.allocate(communicator.size, DType.INT32)
        self._number = number
        self._work: Work | None = None

    def post(self) -> None:
        """Start, just before the gather is posted. An earlier check ends first."""
        self.verify()
        if self._communicator.size > 1:
            self._work = self._communicator.allgather(self._own, self._all)

    def verify(self, *, wait: bool = True) -> None:
        """Compare, before the gather is waited for.

        Args:
            wait: for the other ranks; else compare if they are there, and leave it for later if not.

        Raises:
            MismatchError: a rank gathers something else. Raised on every rank.
        """
        if self._work is None or not (wait or self._work.done()):
            return
        work, self._work = self._work, None
        work.wait()
        found = self._all.bytes().cast("i").tolist()
        if any(number != self._number for number in found):
            each = ", ".join(
                f"rank {member} {self._names[number]!r}"
                for member, number in zip(self._communicator.members, found, strict=True)
            )
            raise MismatchError(
                f"zero=3: the ranks need different parts of the model at the same time: {each}. Every rank must call "
                "the same modules in the same order: let layers that are left out (LayerDrop) and branches be chosen "
                "the same way on every rank, or keep parameters whole with zero=2"
            )
