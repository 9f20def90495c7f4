"""A communicator that writes down what passes through it: tests count collectives and bytes with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReduceOp, ReportsArrivals, Work


class Record(NamedTuple):
    """One call: which operation, the bytes of the buffer that this rank gives, its dtype, the group's size.

    An all-gather gives its source; a recv counts its target; a barrier has 0 bytes and dtype None.
    """

    operation: str
    nbytes: int
    dtype: DType | None
    group_size: int


class RecordingCommunicator(Communicator, ReportsArrivals):
    """Passes every call to `inner` and appends a `Record` of it to `records`, before the call is made.

    Communicators split from it record into the same list.

    Args:
        inner: does the work.
        records: the list to write to; default: a new one.
    """

    def __init__(self, inner: Communicator, records: list[Record] | None = None) -> None:
        self.inner = inner
        self.records: list[Record] = [] if records is None else records
        self.rank, self.size, self.members, self.timeout = inner.rank, inner.size, inner.members, inner.timeout
        self.capabilities = inner.capabilities
        self.description = inner.description

    def count(self, operation: str) -> int:
        """Return how often `operation` was called."""
        return sum(record.operation == operation for record in self.records)

    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        """Record and pass on."""
        self._record("allreduce", source)
        return self.inner.allreduce(source, target, op=op, scale=scale)

    def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
        """Record and pass on."""
        self._record("allgather", source)
        return self.inner.allgather(source, target, counts=counts)

    def broadcast(self, buffer: Buffer, *, root: int) -> Work:
        """Record and pass on."""
        self._record("broadcast", buffer)
        return self.inner.broadcast(buffer, root=root)

    def reducescatter(
        self,
        source: Buffer,
        target: Buffer,
        *,
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
        counts: Sequence[int] | None = None,
    ) -> Work:
        """Record and pass on."""
        self._record("reducescatter", source)
        return self.inner.reducescatter(source, target, op=op, scale=scale, counts=counts)

    def alltoall(
        self, source: Buffer, target: Buffer, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Work:
        """Record and pass on."""
        self._record("alltoall", source)
        return self.inner.alltoall(source, target, send_counts=send_counts, receive_counts=receive_counts)

    def send(self, buffer: Buffer, *, to: int) -> Work:
        """Record and pass on."""
        self._record("send", buffer)
        return self.inner.send(buffer, to=to)

    def recv(self, buffer: Buffer, *, source: int) -> Work:
        """Record and pass on."""
        self._record("recv", buffer)
        return self.inner.recv(buffer, source=source)

    def barrier(self) -> Work:
        """Record and pass on."""
        self.records.append(Record("barrier", 0, None, self.size))
        return self.inner.barrier()

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """Pass on; the part records into the same list."""
        part = self.inner.split(ranks)
        return None if part is None else RecordingCommunicator(part, self.records)

    def allocate(self, nbytes: int) -> Buffer:
        """Pass on."""
        return self.inner.allocate(nbytes)

    def waiting_for(self) -> Sequence[int]:
        """What the inner communicator says, where it can."""
        return self.inner.waiting_for() if isinstance(self.inner, ReportsArrivals) else ()

    def abort(self, reason: str) -> None:
        """Pass on."""
        self.inner.abort(reason)

    def close(self) -> None:
        """Pass on."""
        self.inner.close()

    def _record(self, operation: str, buffer: Buffer) -> None:
        self.records.append(Record(operation, buffer.nbytes, buffer.dtype, self.size))
