"""The contract of what a compiled program calls on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from unidist_arrays.memory import Array


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

    One object may be in several programs, and run again and again; never twice at a time. It is kept as long as the
    process lives, so anything large that it refers to must be released in another way.

    Attributes:
        ordered: it runs in the order of the program, among all ordered ones, also if nobody uses its results: messages,
            which have no names. Each call of a program with one costs JAX some 0.1 ms. Others run in any order, the
            same on every rank, as soon as their operands are there; they too run if nobody uses their results.
        batched_at: where `jax.vmap` may put its dimension; None: anywhere, each element is treated alike.
        can_be_batched: it makes sense on an array with one dimension more.
    """

    ordered: ClassVar[bool] = False
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
