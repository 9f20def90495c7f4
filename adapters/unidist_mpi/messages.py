"""The messages of one communicator between two ranks."""

from __future__ import annotations

from collections import defaultdict, deque

from mpi4py import MPI

from unidist.buffer import Buffer, DType
from unidist.errors import MismatchError
from unidist_mpi.memory import bytes_of
from unidist_mpi.works import MpiOperation


class MpiMessages:
    """Moves messages on. Callers hold the communicator's lock.

    A receive is given to MPI when its message is there, and not before: only so is the size known of a message that
    does not fit.

    Args:
        comm: with errors returned.
        tag: of these messages; nobody else's on this communicator.
    """

    def __init__(self, comm: MPI.Comm, tag: int) -> None:
        self._comm = comm
        self._tag = tag
        self._asked: dict[int, deque[tuple[MpiOperation, Buffer]]] = defaultdict(deque)
        self._moving: list[tuple[MPI.Request, MpiOperation, MismatchError | None]] = []

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing to move on."""
        return not self._moving and not self._asked

    def send(self, operation: MpiOperation, buffer: Buffer) -> None:
        """Begin to send."""
        self._moving.append((self._comm.Isend(bytes_of(buffer), operation.peer, self._tag), operation, None))

    def receive(self, operation: MpiOperation, buffer: Buffer) -> None:
        """Ask for the next message of a rank."""
        self._asked[operation.peer].append((operation, buffer))

    def advance(self) -> None:
        """Move on what can be moved without waiting."""
        for source in list(self._asked):
            asked = self._asked[source]
            while asked and self._match(source, *asked[0]):
                asked.popleft()
            if not asked:
                del self._asked[source]
        if self._moving:
            self._moving = [item for item in self._moving if not self._ended(*item)]

    def _match(self, source: int, operation: MpiOperation, buffer: Buffer) -> bool:
        """Begin to receive the next message of `source` if it is there."""
        status = MPI.Status()
        message = self._comm.Improbe(source, self._tag, status)
        if message is None:
            return False
        found, error = status.Get_count(MPI.BYTE), None
        if found != buffer.nbytes:
            error = MismatchError(
                f"{operation.what} on rank {self._comm.rank}: it receives {buffer.nbytes} bytes, but the message of "
                f"rank {source} has {found}; make both sizes the same"
            )
            buffer = Buffer.allocate(found, DType.UINT8)
            operation.keep(buffer)
        self._moving.append((message.Irecv(bytes_of(buffer)), operation, error))
        return True

    def _ended(self, request: MPI.Request, operation: MpiOperation, error: MismatchError | None) -> bool:
        if not request.Test():
            return False
        operation.end(error)
        return True
