"""A side: an implementation of collectives that takes turns with others on the same ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from unidist.buffer import Buffer
from unidist.communicator import ReduceOp
from unidist_bench.collectives import Collective


@dataclass(frozen=True)
class MeasuredCall:
    """A call to measure. Buffers are host memory, and stay where they are.

    Args:
        collective: which.
        source: what this rank gives. Of a broadcast, and in place, (a part of) the target.
        target: what this rank gets.
        op: of a reduction.
        root: rank that a broadcast begins at.
        rank: this rank.
        size: number of ranks.
    """

    collective: Collective
    source: Buffer
    target: Buffer
    op: ReduceOp
    root: int
    rank: int
    size: int

    @property
    def in_place(self) -> bool:
        """Whether source and target overlap."""
        start, stop = self.target.address, self.target.address + self.target.nbytes
        return self.source.address < stop and start < self.source.address + self.source.nbytes

    @property
    def partner(self) -> int | None:
        """The rank with which this one exchanges messages in `Collective.SENDRECV`; None: it has none."""
        last = self.size - 1
        return {0: last, last: 0}.get(self.rank)


class Side(ABC):
    """Runs calls. Made on every rank at the same point; all methods are called by all ranks in the same order."""

    @abstractmethod
    def operation(self, call: MeasuredCall) -> Callable[[], object]:
        """Return what runs the call, and returns when it is complete on this rank.

        Raises:
            Exception: it cannot: the same on every rank. So may the first run of what is returned.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back connections. Called once."""
