"""The order that the command gives to the ranks: everything that the command line says, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from unidist.buffer import DType
from unidist.communicator import ReduceOp
from unidist_bench.collectives import TRAITS, Collective
from unidist_bench.sizes import Sizes

Memory = Literal["engine", "ordinary"]
PEERS = ("gloo", "mpi")


@dataclass(frozen=True)
class MeasurementOrder:
    """Measure these collectives over these sizes.

    Args:
        collectives: one after another.
        sizes: of each.
        dtype: of the elements.
        op: of reductions.
        root: rank that a broadcast begins at.
        in_place: None: as training calls it, so all-reduce and broadcast alone.
        memory: that our sides use; None: engine memory if the engine has any.
        named: named operations take turns, too.
        beside: names of `PEERS` that take turns, too.
        warmup: repetitions that are not counted.
        iterations: counted repetitions; None: by size, see `repetitions`.
        inner: calls of a repetition, which gives their mean; None: by size.
        check: compare the results of one call with what they must be.
    """

    collectives: tuple[Collective, ...]
    sizes: Sizes
    dtype: DType = DType.FLOAT32
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    in_place: bool | None = None
    memory: Memory | None = None
    named: bool = False
    beside: tuple[str, ...] = ()
    warmup: int = 5
    iterations: int | None = None
    inner: int | None = None
    check: bool = True

    def plain(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return asdict(self)

    @classmethod
    def from_plain(cls, found: Mapping[str, Any]) -> MeasurementOrder:
        """Return the order again."""
        return cls(
            **{
                **found,
                "collectives": tuple(map(Collective, found["collectives"])),
                "sizes": Sizes(**found["sizes"]),
                "dtype": DType(found["dtype"]),
                "op": ReduceOp(found["op"]),
                "beside": tuple(found["beside"]),
            }
        )

    def works_in_place(self, collective: Collective) -> bool:
        """Return whether a collective is measured in place."""
        traits = TRAITS[collective]
        if traits.only_in_place:
            return True
        return collective is Collective.ALLREDUCE if self.in_place is None else self.in_place and traits.in_place

    def counts(self, collective: Collective, num_ranks: int) -> list[int]:
        """Return the numbers of elements of the rows."""
        traits = TRAITS[collective]
        if not traits.has_data:
            return [0]
        return self.sizes.counts(self.dtype.itemsize, num_ranks if traits.divided else 1)

    def areas(self, num_ranks: int) -> tuple[int, int]:
        """Return how many areas of memory a rank needs for the buffers of all calls, and the bytes of each."""
        moving = [each for each in self.collectives if TRAITS[each].has_data]
        if not moving:
            return 0, 0
        most = max(self.counts(each, num_ranks)[-1] for each in moving)
        return 1 if all(map(self.works_in_place, moving)) else 2, most * self.dtype.itemsize

    def repetitions(self, num_bytes: int) -> tuple[int, int]:
        """Return how often a size is measured: counted repetitions, and calls in each.

        By default fewer for large sizes, and several calls for small ones, whose time the clock and the barrier before
        it would disturb.
        """
        iterations = self.iterations or max(10, min(100, (1 << 30) // max(1, num_bytes)))
        inner = self.inner or max(1, min(20, (1 << 19) // max(1, num_bytes)))
        return iterations, inner
