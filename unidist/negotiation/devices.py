"""Operations on device memory: the communicators that run them, and how these connect.

An operation on device memory is negotiated like any other, over host memory. It is run by a communicator of its own
for that kind of memory, which is connected where the ranks have agreed on the first such operation: there each of them
is at the same place, whatever its script does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator
from unidist.errors import UsageError
from unidist.rendezvous import Contribution, Rendezvous

__all__ = ["CommunicatorRendezvous", "DeviceConnector", "DeviceOrder", "RunsOnDevice"]

_LENGTH_BYTES = 8


class DeviceOrder(ABC):
    """The order of one operation among what its submitter queues on a device. A request carries it."""

    @abstractmethod
    def begin(self) -> None:
        """Let what this thread queues from now on come behind what the submitter had queued before it submitted."""

    @abstractmethod
    def end(self) -> None:
        """Take note of what this thread has queued: the submitter, when it has waited, queues behind that."""


class RunsOnDevice(ABC):
    """Capability of a communicator: named operations leave their tensors on the device. Found by isinstance.

    Work on the device is queued, and that of the named operations of a group on a queue of their own: two groups may
    run theirs in another order on each rank. `DeviceOrder` orders each operation with what its submitter queues.
    """

    @abstractmethod
    def queueing(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread's calls here, and its allocations, go to the queue."""

    @abstractmethod
    def allocate_on_device(self, count: int, dtype: DType) -> Buffer:
        """Return `count` zeroed elements in this rank's device. Within `queueing`."""

    @abstractmethod
    def copy_on_device(self, sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
        """Copy each source to its target, of the same type and size. Within `queueing`."""

    @abstractmethod
    def adasum_on_device(self, source: Buffer, target: Buffer, *, scale: float) -> None:
        """Do what `unidist.algorithms.adasum_allreduce` does, with its numbers. Collective; within `queueing`."""


class DeviceConnector(ABC):
    """Connects the ranks of named operations for kinds of memory other than the host's."""

    @abstractmethod
    def moves(self, kind: str) -> bool:
        """Return whether operations on this kind of memory ("cuda") can be run. The same on every rank; does not wait.

        Called from any thread.
        """

    @abstractmethod
    def connect(self, kind: str, host: Communicator) -> Communicator:
        """Return a communicator with `RunsOnDevice` over the ranks of `host`, and in their order.

        Collective over them; called by the thread that runs named operations, which may be a background one.

        Raises:
            ConfigurationError: there is no device for each rank.
        """


class CommunicatorRendezvous(Rendezvous):
    """A rendezvous of ranks that have a communicator for host memory already.

    Args:
        communicator: over them, used by the caller's thread alone.
        address: at which the other ranks reach this one.
        secret: that the ranks share.
    """

    def __init__(self, communicator: Communicator, *, address: str, secret: bytes) -> None:
        self._communicator = communicator
        self.address = address
        self.secret = secret

    @override
    def allgather(self, payload: bytes, *, fds: Sequence[int] = (), timeout: timedelta) -> list[Contribution]:
        if fds:
            raise UsageError("descriptors do not travel over a communicator")
        length = Buffer.of(bytearray(len(payload).to_bytes(_LENGTH_BYTES, "little")))
        told = Buffer.allocate(_LENGTH_BYTES * self._communicator.size, DType.UINT8)
        self._communicator.allgather(length, told).wait(timeout)
        data = told.bytes()
        starts = range(0, told.count, _LENGTH_BYTES)
        counts = [int.from_bytes(data[start : start + _LENGTH_BYTES], "little") for start in starts]
        gathered = bytearray(sum(counts))
        self._communicator.allgather(Buffer.of(bytearray(payload)), Buffer.of(gathered), counts=counts).wait(timeout)
        found, start = [], 0
        for count in counts:
            found.append(Contribution(bytes(gathered[start : start + count])))
            start += count
        return found

    @override
    def close(self) -> None:
        """Nothing to release: the communicator is its owner's."""
