"""MPI as a communicator."""

from __future__ import annotations

import hashlib
import itertools
import struct
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

from mpi4py import MPI
from typing_extensions import override

from unidist.algorithms import check_count, check_reduction, check_same_type, checked_counts
from unidist.buffer import Buffer
from unidist.communicator import (
    Capabilities,
    Communicator,
    ReduceOp,
    ReportsArrivals,
    Work,
    equal_counts,
    format_ranks,
)
from unidist.errors import MismatchError, PeerLostError, StalledError, UsageError
from unidist_mpi import collectives
from unidist_mpi.collectives import MpiLink, Steps
from unidist_mpi.messages import MpiMessages
from unidist_mpi.process import NAME_BYTES, DrivenGroup, MpiProcess, NoticeKind
from unidist_mpi.works import MpiOperation, MpiWork

_CAPABILITIES = Capabilities()
_NUM_TAGS = 10_000
"""MPI promises tags up to 32767; each communicator uses two."""


class MpiCommunicator(Communicator, ReportsArrivals, DrivenGroup):
    """One group of ranks: an MPI communicator, and a name by which its notices are known.

    Collectives are given to MPI one after another, each when the one before is complete: so they begin in the same
    order on every rank, whatever is waited for first.

    Args:
        process: the MPI of this process.
        comm: of these members, in their order, with errors returned; given back by `close`.
        name: `NAME_BYTES` bytes, equal on all ranks of the group, and used by no other.
        members: world ranks.
        rank: of this process in the group.
        timeout: of every operation.
    """

    def __init__(
        self,
        process: MpiProcess,
        comm: MPI.Comm,
        name: bytes,
        members: tuple[int, ...],
        rank: int,
        timeout: timedelta,
    ) -> None:
        self.rank, self.size, self.members = rank, len(members), members
        self.timeout = timeout
        self.capabilities = _CAPABILITIES
        self.description = f"mpi, ranks {format_ranks(members)}"
        self.process = process
        self._comm = comm
        self._name = name
        # MPI reuses the number of a communicator that was freed; a tag of its own tells what was sent over the old one.
        tag = 2 * (int.from_bytes(name, "big") % _NUM_TAGS)
        self._link = MpiLink(comm, tag)
        self._messages = MpiMessages(comm, tag + 1)
        self._queue: deque[MpiOperation] = deque()
        self._turn = threading.RLock()
        self._num_issued = 0
        self._splits = itertools.count()
        self._waiting_in = -1
        self._arrivals: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._aborted = ""
        self._aborted_by = -1
        self._closed = False
        process.add(name, self)

    # Collectives

    @override
    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        check_same_type("allreduce", source, target)
        check_count("allreduce", "target", target, source.count)
        check_reduction(target, op)
        steps = collectives.allreduce(self._link, source, target, op, scale)
        return self._issue(f"allreduce of {source.dtype}[{source.count}]", steps, source, target)

    @override
    def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
        check_same_type("allgather", source, target)
        counts = checked_counts("allgather", counts, [source.count] * self.size, self)
        check_count("allgather", "source", source, counts[self.rank])
        check_count("allgather", "target", target, sum(counts))
        steps = collectives.allgather(self._link, source, target, counts)
        return self._issue(f"allgather of {source.dtype}[{target.count}]", steps, source, target)

    @override
    def broadcast(self, buffer: Buffer, *, root: int) -> Work:
        self.check_rank(root, "root")
        steps = collectives.broadcast(self._link, buffer, root)
        return self._issue(f"broadcast of {buffer.dtype}[{buffer.count}] from rank {root}", steps, buffer)

    @override
    def reducescatter(
        self,
        source: Buffer,
        target: Buffer,
        *,
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
        counts: Sequence[int] | None = None,
    ) -> Work:
        check_same_type("reducescatter", source, target)
        default = equal_counts(source.count, self.size) if counts is None else ()
        counts = checked_counts("reducescatter", counts, default, self)
        check_count("reducescatter", "source", source, sum(counts))
        check_count("reducescatter", "target", target, counts[self.rank])
        check_reduction(target, op)
        steps = collectives.reducescatter(self._link, source, target, op, scale, counts)
        return self._issue(f"reducescatter of {source.dtype}[{source.count}]", steps, source, target)

    @override
    def alltoall(
        self, source: Buffer, target: Buffer, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Work:
        check_same_type("alltoall", source, target)
        sent = checked_counts("alltoall", send_counts, (), self)
        received = checked_counts("alltoall", receive_counts, (), self)
        check_count("alltoall", "source", source, sum(sent))
        check_count("alltoall", "target", target, sum(received))
        steps = collectives.alltoall(self._link, source, target, sent, received)
        return self._issue(f"alltoall of {source.dtype}[{source.count}]", steps, source, target)

    @override
    def barrier(self) -> Work:
        return self._issue("barrier", collectives.barrier(self._link))

    # Messages

    @override
    def send(self, buffer: Buffer, *, to: int) -> Work:
        operation = self._message(f"send of {buffer.nbytes} bytes to rank {to}", buffer, to, "to")
        with self._turn:
            self._messages.send(operation, buffer)
        return self._begun(operation)

    @override
    def recv(self, buffer: Buffer, *, source: int) -> Work:
        operation = self._message(f"recv of {buffer.nbytes} bytes from rank {source}", buffer, source, "source")
        with self._turn:
            self._messages.receive(operation, buffer)
        return self._begun(operation)

    def _message(self, what: str, buffer: Buffer, peer: int, role: str) -> MpiOperation:
        self.check_rank(peer, role)
        self._check_usable(what)
        if buffer.nbytes > collectives.MAX_BYTES:
            raise UsageError(f"{what} on rank {self.rank}: MPI counts in 31 bits. Send it in parts of less than 2 GiB.")
        return MpiOperation(what, (buffer,), peer=peer)

    # Groups

    @override
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """Return a communicator over the ranks of this rank's group.

        Raises:
            MismatchError: a member of this rank's group passed another list. Not raised on ranks of other groups.
        """
        chosen = tuple(ranks)
        for rank in chosen:
            self.check_rank(rank, "ranks")
        if chosen and (self.rank not in chosen or len(set(chosen)) != len(chosen)):
            raise UsageError(
                f"split: rank {self.rank} passed ranks {chosen}; pass each rank once, this one included, or ()"
            )
        # After this all have come, so MPI's split, which knows no time limit, has nobody to wait for.
        digest = _digest(repr(chosen).encode())
        digests = self._gather(digest)
        first, place = (min(chosen), chosen.index(self.rank)) if chosen else (MPI.UNDEFINED, 0)
        comm = self._comm.Split(first, place)
        number = next(self._splits)
        if comm == MPI.COMM_NULL:
            return None
        apart = [rank for rank in chosen if digests[rank] != digest]
        if apart:
            comm.Free()
            raise MismatchError(
                f"split: rank {self.rank} passed ranks {chosen}, but rank(s) {format_ranks(apart)} passed another list"
            )
        name = _digest(self._name + struct.pack("!QQ", number, first))
        members = tuple(self.members[rank] for rank in chosen)
        return MpiCommunicator(self.process, comm, name, members, place, self.timeout)

    def _gather(self, own: bytes) -> list[bytes]:
        given, taken = bytearray(own), bytearray(len(own) * self.size)
        self.allgather(Buffer.of(given), Buffer.of(taken)).wait()
        return [bytes(taken[start : start + len(own)]) for start in range(0, len(taken), len(own))]

    @override
    def waiting_for(self) -> Sequence[int]:
        return self._absent(self._waiting_in) if self._waiting_in >= 0 else ()

    # The end

    @override
    def abort(self, reason: str) -> None:
        """Abort, and tell the peers why."""
        self._abort(reason, self.rank)

    def _abort(self, reason: str, culprit: int) -> None:
        """Do `abort` because of rank `culprit`; -1 if it is not known."""
        if self._aborted or self._closed:
            return
        self._aborted_by = culprit
        self._aborted = f"rank {self.rank} aborted: {reason or 'no reason given'}"
        self.process.notify(self.members, self._name, NoticeKind.ABORT, culprit, self._aborted)

    @override
    def close(self) -> None:
        """Close. Operations that have not completed stay with MPI, which cannot take them back."""
        if self._closed:
            return
        self._closed = True
        self.process.remove(self._name)
        if not self.process.can_communicate:
            return
        self.process.notify(self.members, self._name, NoticeKind.LEFT, self._num_issued)
        with self._turn:
            if self._aborted or self._queue or not self._messages.is_idle:
                self.process.abandon(self._comm, self._link, self._queue, self._messages)
            else:
                self._comm.Free()  # no rank waits here for another, in Open MPI and MPICH

    # For the process

    @override
    def advance(self) -> None:
        if not self._turn.acquire(blocking=False):  # another thread is at it
            return
        try:
            if self.is_broken:
                self.process.mark_busy(self._name, False)
                return
            self._messages.advance()
            while self._queue and self._queue[0].advance():
                self._queue.popleft()
            if not self._queue and self._messages.is_idle:
                self.process.mark_busy(self._name, False)
        except BaseException as exc:  # of MPI above all; whatever it is, the other ranks must not wait for this one
            self._fail(exc)
            if not isinstance(exc, Exception):  # the user's interrupt
                raise
        finally:
            self._turn.release()

    @override
    def notice(self, member: int, kind: NoticeKind, value: int, text: str) -> None:
        rank = self.members.index(member)
        if kind is NoticeKind.ARRIVED:
            self._arrivals[rank] = value
        elif kind is NoticeKind.LEFT:
            self._left[rank] = value
        elif not self._aborted:
            self._aborted_by, self._aborted = value, text

    # For works

    @property
    def is_broken(self) -> bool:
        """Return whether every wait would raise."""
        return bool(self._aborted or self._closed)

    def check_alive(self, what: str) -> None:
        """Raise if operations can no longer complete."""
        if self._closed:
            raise UsageError(f"{what}: this communicator is closed ({self.description})")
        if self._aborted:
            raise PeerLostError(
                f"{what} on rank {self.rank}: this communicator was aborted ({self.description}): {self._aborted}",
                ranks=() if self._aborted_by in (-1, self.rank) else (self._aborted_by,),
            )

    def tell_arrival(self, number: int) -> None:
        """Tell the others that this rank waits in collective `number`."""
        self._waiting_in = number
        self.process.notify(self.members, self._name, NoticeKind.ARRIVED, number)

    def end_waiting(self) -> None:
        """Take note that the wait which `tell_arrival` announced has ended."""
        self._waiting_in = -1

    def left(self, operation: MpiOperation) -> tuple[int, ...]:
        """Return the ranks that have closed this communicator without coming to an operation."""
        if operation.number < 0:
            return (operation.peer,) if operation.peer in self._left else ()
        return tuple(rank for rank, num_issued in self._left.items() if num_issued <= operation.number)

    def left_error(self, what: str, ranks: Sequence[int]) -> PeerLostError:
        """Return the error for a wait for ranks that have left, and abort."""
        text = f"{what}: rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)} left"
        self._abort(text, ranks[0])
        return PeerLostError(f"{text} (seen on rank {self.rank}, {self.description})", ranks=ranks)

    def stalled_error(self, operation: MpiOperation, limit: timedelta) -> StalledError:
        """Return the error for a wait that took too long, and abort."""
        missing = self._absent(operation.number) if operation.number >= 0 else (operation.peer,)
        ranks = f"rank{'s' if len(missing) > 1 else ''} {format_ranks(missing)}" if missing else "some of the ranks"
        text = f"{operation.what}: {ranks} did not come within {limit.total_seconds():g} s"
        self._abort(text, missing[0] if missing else -1)
        return StalledError(
            f"{text} (on rank {self.rank}, {self.description}). They are alive, but do something else: look where "
            "they are.",
            ranks=missing,
        )

    def _absent(self, number: int) -> tuple[int, ...]:
        others = (rank for rank in range(self.size) if rank != self.rank)
        return tuple(rank for rank in others if self._arrivals.get(rank, -1) < number)

    # Inside

    def _check_usable(self, what: str) -> None:
        self.check_alive(what)
        self.process.drive()  # it may bring the news of an abort
        self.check_alive(what)

    def _issue(self, what: str, steps: Steps, *buffers: Buffer) -> Work:
        self._check_usable(what)
        with self._turn:
            operation = MpiOperation(what, buffers, steps, number=self._num_issued)
            self._num_issued += 1
            self._queue.append(operation)
        return self._begun(operation)

    def _begun(self, operation: MpiOperation) -> Work:
        self.process.mark_busy(self._name, True)
        self.advance()
        return MpiWork(self, operation)

    def _fail(self, error: BaseException) -> None:
        """End all operations under way with an error."""
        text = f"on rank {self.rank} ({self.description}): {type(error).__name__}: {error}"
        if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_TRUNCATE:
            failure: Exception = MismatchError(f"the ranks do not agree on the sizes of an operation, {text}")
        elif isinstance(error, MPI.Exception):
            failure = PeerLostError(f"MPI failed {text}")
        elif isinstance(error, Exception):
            failure = error
        else:
            failure = PeerLostError(f"an operation was interrupted {text}")
        if self._queue:
            self._queue[0].end(failure)
        self.abort(f"an operation failed {text}")


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=NAME_BYTES).digest()
