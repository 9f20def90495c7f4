"""The ranks that divide the samples of a batch among them, for operations on the batch as one process would have it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unidist.buffer import Buffer
from unidist.mesh import SAMPLE_AXES

if TYPE_CHECKING:
    from unidist.communicator import Communicator
    from unidist.runtime_api import RuntimeAPI

__all__ = ["SampleAxis"]


class SampleAxis:
    """The ranks along the axes that divide samples, as seen by one of them. A runtime has one, see `owned`.

    Ranks that train on the same samples (of a divided model) are in different groups, so that each group has every
    sample once. All ranks of a group do the same operations in the same order.

    Args:
        runtime: the runtime.

    Attributes:
        rank: of this rank in its group.
        size: of the group.
    """

    def __init__(self, runtime: RuntimeAPI) -> None:
        self.rank, self.size = runtime.axis_rank(SAMPLE_AXES), runtime.axis_size(SAMPLE_AXES)
        self._runtime = runtime
        self._communicators: dict[str, Communicator] = {}

    def numbers_of_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank, of which every rank gives as many. Collective."""
        source, target = array("q", numbers), array("q", [0] * (len(numbers) * self.size))
        self._on(Buffer.of(source)).allgather(Buffer.of(source), Buffer.of(target)).wait()
        return [target[start : start + len(numbers)].tolist() for start in range(0, len(target), len(numbers))]

    def rows_of_all(self, rows: int) -> list[int]:
        """Return the number of rows of each rank. Collective."""
        return [each for (each,) in self.numbers_of_all([rows])]

    def gather(self, source: Buffer, target: Buffer, rows: Sequence[int]) -> None:
        """Gather the rows of all ranks. Collective.

        Args:
            source: this rank's rows.
            target: filled with those of all ranks, in rank order.
            rows: of each rank.
        """
        self._on(source).allgather(source, target, counts=_elements(rows, target)).wait()

    def scatter_sum(self, source: Buffer, target: Buffer, rows: Sequence[int]) -> None:
        """Add up rows over the ranks, and get this rank's. The transpose of `gather`. Collective.

        Args:
            source: the rows of all ranks, in rank order.
            target: filled with this rank's rows of the sum.
            rows: of each rank.
        """
        self._on(source).reducescatter(source, target, counts=_elements(rows, source)).wait()

    def close(self) -> None:
        """See `unidist.runtime_api.Owned`: the runtime closes the communicators."""

    def _on(self, buffer: Buffer) -> Communicator:
        kind = buffer.memory.partition(":")[0]
        if kind not in self._communicators:
            self._communicators[kind] = self._runtime.new_communicator(SAMPLE_AXES, memory=kind)
        return self._communicators[kind]


def _elements(rows: Sequence[int], whole: Buffer) -> list[int]:
    width = whole.count // max(1, sum(rows))
    return [count * width for count in rows]
