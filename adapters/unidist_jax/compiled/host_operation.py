"""The contract of what a compiled program calls on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from unidist.errors import UsageError
from unidist_arrays.memory import Array, empty_array


class ShapeDtype(NamedTuple):
    """The type of an array of a program.

    Args:
        shape: of the array.
        dtype: numpy's.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class HostOperation(ABC):
    """An operation that compiled programs call, made while a program is traced.

    The operations of a program run one at a time, in the order in which they were traced, also if nobody uses their
    results. One object may be in several programs, and run again and again; never twice at a time if one thread calls
    the programs. It is kept as long as the process lives, so anything large that it refers to must be released in
    another way.

    Attributes:
        matched_by_order: the ranks match it by its order: a message, which has no name. Called at once, it comes after
            those of the programs that were called before.
        batched_at: where `jax.vmap` may put its dimension; None: anywhere, each element is treated alike.
        can_be_batched: it makes sense on an array with one dimension more.
    """

    matched_by_order: ClassVar[bool] = False
    batched_at: ClassVar[int | None] = None
    can_be_batched: ClassVar[bool] = True

    @property
    @abstractmethod
    def title(self) -> str:
        """The operation in a few words, for errors: "allreduce 'loss'"."""

    @abstractmethod
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        """Return the types of the results for operands of these types; called while a program is traced.

        Raises:
            OperationError: it cannot run on such operands.
        """

    @abstractmethod
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        """Read the operands and write the results. May wait for other ranks. Called on a thread of XLA.

        Args:
            operands: must not be written to. The memory is the program's, and is reused when this returns.
            results: memory to fill; one may be that of an operand of the same place.
        """

    def run_at_once(self, operands: Sequence[Array]) -> list[Array]:
        """Run outside of programs; returns the results, in memory that is not written to any more.

        Overridden where the shapes of results depend on other ranks.
        """
        types = self.results([ShapeDtype(each.shape, each.dtype) for each in operands])
        results = [empty_array(each.shape, each.dtype) for each in types]
        self.run(operands, results)
        return results

    def lowered(self, operands: Sequence[Any], axis: str) -> list[Any]:
        """Return the results as operations of XLA over a named axis, on which each rank is a device.

        Called in place of all others while a program over all ranks is traced. It must be the same program on every
        rank: what a rank does alone follows from `jax.lax.axis_index(axis)`.

        Args:
            operands: tracers or arrays.
            axis: its name.

        Raises:
            UsageError: there is no such operation of XLA.
        """
        raise UsageError(
            f"{self.title} is in a program of ud.spmd, where XLA exchanges arrays itself, and has no such operation: "
            "call it outside of the program"
        )

    def prepared(self, operands: Sequence[Array], results: Sequence[Array]) -> Callable[[], None]:
        """Return a function that does what `run` does with this memory. It is called each time the program uses it.

        For operations that have something to prepare; see `run` for the arguments.
        """
        return lambda: self.run(operands, results)
