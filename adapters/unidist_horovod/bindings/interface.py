"""The interface of one of Horovod's bindings: starting and stopping, process sets, operations on memory."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp

REDUCED_DTYPES = frozenset((DType.INT32, DType.INT64, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64))
"""Element types that every binding reduces."""
MOVED_DTYPES = REDUCED_DTYPES | {DType.UINT8, DType.INT8, DType.INT16}
"""Element types that every binding gathers, broadcasts and exchanges."""

WORLD_SET = 0
"""The id of the process set of all ranks."""


class OperationFailed(RuntimeError):
    """Horovod ended an operation with an error; the text is Horovod's. For this package alone."""


class Pending(ABC):
    """An operation that Horovod was given."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether Horovod has ended it, with an error or without. Never blocks."""

    def pause(self) -> None:
        """Yield to the thread that completes it, for less than a millisecond. Called between two calls of `done`."""
        os.sched_yield()

    @abstractmethod
    def finish(self) -> None:
        """Take note of the outcome; called once, after `done()` was True.

        Raises:
            OperationFailed: Horovod says what.
        """

    @property
    @abstractmethod
    def output(self) -> Buffer:
        """The result of an operation without a target. After `finish`."""

    @property
    @abstractmethod
    def received(self) -> tuple[int, ...]:
        """All-to-all: rows that came from each member of the process set. After `finish`."""


class HorovodBinding(ABC):
    """One of Horovod's bindings. There is one runtime of Horovod per binding and process.

    Every operation has a name, by which Horovod's ranks match it; buffers are in host memory, of the dtypes above,
    and stay in use until the operation is done. `members` is the id of a process set. `shape` is what Horovod
    compares between ranks. Every operation raises OperationFailed where Horovod refuses it at once.

    Attributes:
        num_names: a new name costs time: operations that have numbers take this many names in turn. None: it does not.
    """

    num_names: ClassVar[int | None] = None

    @abstractmethod
    def start(self) -> None:
        """Start Horovod from the environment; blocks until all ranks have entered. ValueError if it does not start."""

    @abstractmethod
    def stop(self) -> None:
        """Stop Horovod here, and with that on all ranks. Operations under way end with OperationFailed. Idempotent."""

    def release(self) -> None:  # noqa: B027  # most have nothing
        """Give back what the binding holds beside Horovod. After the last operation, also if Horovod has failed."""

    @abstractmethod
    def is_running(self) -> bool:
        """Return whether Horovod was started and not stopped."""

    @abstractmethod
    def place(self) -> tuple[int, int]:
        """Return rank and size, as the running Horovod has them."""

    @abstractmethod
    def process_sets(self) -> dict[tuple[int, ...], int]:
        """Return the ids of all process sets by their ranks, in ascending order."""

    @abstractmethod
    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Make a process set and return its id; collective over *all* ranks. OperationFailed if Horovod has stopped."""

    @abstractmethod
    def allreduce(
        self,
        source: Buffer,
        target: Buffer,
        *,
        shape: Sequence[int],
        op: ReduceOp,
        scale: float,
        name: str,
        members: int,
    ) -> Pending:
        """Reduce `source` into `target`, which may be the same memory; the result is multiplied by `scale`."""

    @abstractmethod
    def allgather(
        self, source: Buffer, target: Buffer | None, *, shape: Sequence[int], name: str, members: int
    ) -> Pending:
        """Gather rows, as many as each rank has, into `target`, which must fit exactly, or a new output."""

    @abstractmethod
    def broadcast(self, buffer: Buffer, *, shape: Sequence[int], root: int, name: str, members: int) -> Pending:
        """Copy `buffer` of the world's rank `root` to the others."""

    @abstractmethod
    def alltoall(
        self,
        source: Buffer,
        target: Buffer | None,
        *,
        shape: Sequence[int],
        splits: Sequence[int],
        name: str,
        members: int,
    ) -> Pending:
        """Send `splits[i]` rows to member i; those received go into `target`, which must fit, or a new output."""

    @abstractmethod
    def reducescatter(
        self, source: Buffer, target: Buffer, *, shape: Sequence[int], scale: float, name: str, members: int
    ) -> Pending:
        """Sum `source` and keep this member's rows: as evenly as possible, lower ranks one more."""

    @abstractmethod
    def join(self) -> Pending:
        """Take part in the all-reduces of the world with zeros until all have joined; the output is the last rank."""
