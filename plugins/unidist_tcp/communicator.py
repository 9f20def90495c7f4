"""One group of ranks over TCP: checks arguments, keeps memory alive, turns outcomes into errors."""

from __future__ import annotations

import itertools
import os
import struct
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from typing_extensions import override

from unidist.algorithms import check_count, check_order, check_same_type, checked_counts
from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import (
    Capabilities,
    Communicator,
    ReduceOp,
    ReportsArrivals,
    Work,
    equal_counts,
    format_ranks,
    hash_ranks,
)
from unidist.communicator_capabilities import AT_ONCE_NS, ExchangesBlocks, MakesSubgroups
from unidist.errors import MismatchError, PeerLostError, StalledError, UsageError
from unidist.rendezvous import Rendezvous
from unidist_tcp import _tcp
from unidist_tcp.works import DTYPE_CODES, OP_CODES, Opcode, Status, TcpWork, nanoseconds

if TYPE_CHECKING:
    from unidist_tcp.connecting import Lane

_LINGER_NS = 2_000_000_000
_NOTHING = Buffer(0, 0, DType.UINT8)


class Connections:
    """A rank's connections, which all its communicators share; closed with the last of them.

    Args:
        rank: of this process in the world.
        lanes: connections to each rank; belong to this object from now on.
        spin_ns: how long a wait looks before it sleeps.
        heartbeat: a host that answers nothing for so long is lost.
    """

    def __init__(self, rank: int, lanes: tuple[tuple[Lane, ...], ...], *, spin_ns: int, heartbeat: timedelta) -> None:
        self.rank = rank
        self.is_encrypted = any(lane.tls is not None for each in lanes for lane in each)
        descriptors = tuple(tuple(lane.descriptor for lane in each) for each in lanes)
        encryption = tuple(tuple(lane.tls for lane in each if lane.tls is not None) for each in lanes)
        self.transport = _tcp.Transport(
            rank, descriptors, spin_ns, nanoseconds(heartbeat), encryption if self.is_encrypted else None
        )
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._num_users = 0
        _open.add(self)

    def new_id(self) -> int:
        """Return a number for a group whose first member is this rank; no other group of the job has it."""
        return (self.rank + 1 << 40) | next(self._numbers)

    def acquire(self) -> None:
        """Count one communicator more."""
        with self._lock:
            self._num_users += 1

    def release(self) -> None:
        """Count one communicator less."""
        with self._lock:
            self._num_users -= 1
            is_last = not self._num_users
        if is_last:
            _open.discard(self)
            self.transport.close(_LINGER_NS)


_open: weakref.WeakSet[Connections] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child (a DataLoader worker) would keep the connections open, and make a dead rank look alive."""
    for connections in list(_open):
        connections.transport.forget()
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)


class TcpCommunicator(Communicator, ReportsArrivals, ExchangesBlocks, MakesSubgroups):
    """One group of ranks over TCP. Made by `TcpEngine.connect` and `split`.

    Args:
        connections: of this rank.
        number: of the group; the same on all members, and no other group's.
        rank: of this process in the group.
        members: world ranks.
        timeout: of every operation.
    """

    def __init__(
        self, connections: Connections, number: int, rank: int, members: tuple[int, ...], timeout: timedelta
    ) -> None:
        self.rank = rank
        self.size = len(members)
        self.members = members
        self.timeout = timeout
        self.timeout_ns = nanoseconds(timeout)
        self.description = f"tcp{' with TLS' if connections.is_encrypted else ''}, ranks {format_ranks(members)}"
        self.capabilities = Capabilities(bucket_bytes=25 << 20, adds_in_rank_order=True)
        self._connections = connections
        self._group = _tcp.Group(connections.transport, number, rank, members)
        self._pending: deque[tuple[_tcp.Operation, Buffer, Buffer]] = deque()  # memory that the engine still uses
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self._own_abort = ""  # why this rank aborted the group
        connections.acquire()

    # Collectives

    @override
    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        """Reduce over all ranks; what is short in rank order, 16-bit floats then in float32."""
        _check_operands("allreduce", source, target, source.count)
        check_order(source.dtype, op)
        return self._post(Opcode.ALLREDUCE, source, target, op=op, scale=scale)

    @override
    def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
        default = equal_counts(target.count, self.size) if counts is None else ()
        pieces = tuple(checked_counts("allgather", counts, default, self))
        _check_operands("allgather", source, target, sum(pieces))
        check_count("allgather", "source", source, pieces[self.rank])
        return self._post(Opcode.ALLGATHER, source, target, count=target.count, counts=pieces)

    @override
    def broadcast(self, buffer: Buffer, *, root: int) -> Work:
        self.check_rank(root, "root")
        _check_operands("broadcast", buffer, buffer, buffer.count)
        return self._post(Opcode.BROADCAST, buffer, buffer, root=root)

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
        default = equal_counts(source.count, self.size) if counts is None else ()
        pieces = tuple(checked_counts("reducescatter", counts, default, self))
        check_count("reducescatter", "source", source, sum(pieces))
        _check_operands("reducescatter", source, target, pieces[self.rank])
        check_order(source.dtype, op)
        return self._post(Opcode.REDUCESCATTER, source, target, op=op, scale=scale, counts=pieces)

    @override
    def alltoall(
        self, source: Buffer, target: Buffer, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Work:
        sent = tuple(checked_counts("alltoall", send_counts, (), self))
        received = tuple(checked_counts("alltoall", receive_counts, (), self))
        check_count("alltoall", "source", source, sum(sent))
        _check_operands("alltoall", source, target, sum(received))
        if sent[self.rank] != received[self.rank]:
            raise UsageError(
                f"alltoall: rank {self.rank} sends itself {sent[self.rank]} elements and receives {received[self.rank]}"
            )
        return self._post(Opcode.ALLTOALL, source, target, counts=sent, counts2=received)

    @override
    def barrier(self) -> Work:
        return self._post(Opcode.BARRIER, _NOTHING, _NOTHING)

    @override
    def exchange_blocks(
        self,
        own: Buffer,
        everyone: Buffer,
        block: bytes,
        source: Buffer | None = None,
        target: Buffer | None = None,
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
    ) -> bool | Work:
        self._check_open("allgather")
        if source is None or target is None:
            data = (0, 0, 0, 0, 0)
        else:
            data = (source.address, source.nbytes, target.address, target.count, DTYPE_CODES[source.dtype])
        places = (own.address, everyone.address, own.count)
        ended = self._group.cycle(*places, block, *data, OP_CODES[op], scale, min(self.timeout_ns, AT_ONCE_NS))
        if ended is True or ended is False:
            return ended
        # It is not complete: another rank takes long, or something is the matter.
        return self._under_way(ended, "allgather", own, everyone)

    # Messages

    @override
    def send(self, buffer: Buffer, *, to: int) -> Work:
        """Send a message. A long one travels when its receiver has asked for it, and is not copied."""
        self.check_rank(to, "to")
        return self._message(buffer, to, is_send=True)

    @override
    def recv(self, buffer: Buffer, *, source: int) -> Work:
        self.check_rank(source, "source")
        return self._message(buffer, source, is_send=False)

    # The group itself

    @override
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """Divide the group. The new one uses the same connections."""
        self._check_usable("split")
        chosen = self._checked_members("split", ranks)
        digest = hash_ranks(chosen)
        mine = bytearray(struct.pack("QQ", self._connections.new_id(), digest))
        everyone = bytearray(16 * self.size)
        self.allgather(Buffer.of(mine), Buffer.of(everyone)).wait()
        replies = list(struct.iter_unpack("QQ", everyone))
        apart = [rank for rank in chosen if replies[rank][1] != digest]
        made = None
        if chosen and not apart:
            made = self._part(replies[chosen[0]][0], chosen, self.timeout)
        try:
            # After it, every member has the group: what comes for one that a rank does not have belongs to the past.
            self.barrier().wait()
        except BaseException:
            if made is not None:
                made.close()
            raise
        if apart:
            raise MismatchError(
                f"split: rank {self.rank} passed ranks {chosen}, but rank(s) {format_ranks(apart)} passed another list"
            )
        return made

    @override
    def subgroup(self, ranks: Sequence[int], rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Make a group without the other ranks; it uses the same connections."""
        self._check_usable("subgroup")
        chosen = self._checked_members("subgroup", ranks)
        if not chosen:
            raise UsageError(f"subgroup: rank {self.rank} is not among its own ranks ()")
        own = struct.pack("QQ", self._connections.new_id(), hash_ranks(chosen))
        replies = [struct.unpack("QQ", item.payload) for item in rendezvous.allgather(own, timeout=timeout)]
        apart = [rank for rank, reply in zip(chosen, replies, strict=True) if reply[1] != replies[0][1]]
        if apart:
            raise MismatchError(
                f"subgroup: rank {self.rank} passed ranks {chosen}; rank(s) {format_ranks(apart)} and rank {chosen[0]} "
                "passed different lists"
            )
        made = self._part(replies[0][0], chosen, timeout)
        try:
            rendezvous.allgather(b"", timeout=timeout)  # every member has the group, see `split`
        except BaseException:
            made.close()
            raise
        return made

    def _checked_members(self, what: str, ranks: Sequence[int]) -> tuple[int, ...]:
        chosen = tuple(ranks)
        for rank in chosen:
            self.check_rank(rank, "ranks")
        if chosen and (self.rank not in chosen or len(set(chosen)) != len(chosen)):
            raise UsageError(
                f"{what}: rank {self.rank} passed ranks {chosen}; pass each rank once, this one included, or ()"
            )
        return chosen

    def _part(self, number: int, ranks: tuple[int, ...], timeout: timedelta) -> TcpCommunicator:
        members = tuple(self.members[rank] for rank in ranks)
        return TcpCommunicator(self._connections, number, ranks.index(self.rank), members, timeout)

    @override
    def waiting_for(self) -> Sequence[int]:
        return [] if self._closed else self._group.missing()

    @override
    def abort(self, reason: str) -> None:
        """Abort the group; every member gets the reason. Nothing happens if the group is closed."""
        if not self._closed:
            text = f"rank {self.rank} called abort: {reason or 'no reason given'}"
            self._own_abort = self._own_abort or text
            self._group.abort(self.rank, text)

    @override
    def close(self) -> None:
        """Close the group. Calls that other threads are in end with UsageError."""
        if os.getpid() != self._pid:
            return  # a forked child has closed its copies of the connections
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._group.close()
        self._pending.clear()
        self._connections.release()

    def __del__(self) -> None:
        """Close as `close` does: peers shall not wait for this rank."""
        if getattr(self, "_closed", True) is False:
            self.close()

    # Inside

    def _check_usable(self, what: str) -> None:
        self._check_open(what)
        if self._group.failure() is not None:
            self._raise_failure(what)

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise self._closed_error(what, f"this communicator is closed ({self.description})")

    def _closed_error(self, what: str, text: str) -> Exception:
        """Return the error for a call on a closed group; what ended it is an abort, if this rank had called one."""
        if self._own_abort:
            return PeerLostError(f"{what} on rank {self.rank} ({self.description}): aborted: {self._own_abort}")
        return UsageError(f"{what}: {text}")

    def _post(
        self,
        opcode: Opcode,
        source: Buffer,
        target: Buffer,
        *,
        op: ReduceOp = ReduceOp.SUM,
        root: int = 0,
        scale: float = 1.0,
        count: int | None = None,
        counts: tuple[int, ...] | None = None,
        counts2: tuple[int, ...] | None = None,
    ) -> Work:
        self._check_open(opcode.name.lower())
        operation = self._group.post(
            opcode,
            source.address,
            target.address,
            source.count if count is None else count,
            DTYPE_CODES[target.dtype],
            OP_CODES[op],
            root,
            scale,
            counts,
            counts2,
        )
        return self._under_way(operation, opcode.name.lower(), source, target)

    def _message(self, buffer: Buffer, peer: int, *, is_send: bool) -> Work:
        what = f"send to rank {peer}" if is_send else f"recv from rank {peer}"
        _check_operands(what, buffer, buffer, buffer.count)
        self._check_open(what)
        operation = self._group.message(is_send, peer, buffer.address, buffer.nbytes)
        return self._under_way(operation, what, buffer, buffer)

    def _under_way(self, operation: _tcp.Operation, what: str, source: Buffer, target: Buffer) -> Work:
        pending = self._pending
        while pending and pending[0][0].status() != Status.PENDING:
            pending.popleft()
        status = operation.status()
        if status == Status.PENDING:
            pending.append((operation, source, target))
        elif status not in (Status.DONE, Status.MISFIT):
            self.raise_status(status, operation, what, self.timeout, 0)
        return TcpWork(self, operation, what, target.nbytes)

    def raise_status(self, status: int, operation: _tcp.Operation, what: str, waited: timedelta, nbytes: int) -> None:
        """Raise the error for an operation that ended without success, and report a timeout to the peers."""
        where = f"{what} on rank {self.rank} ({self.description})"
        if status == Status.CLOSED:
            raise self._closed_error(what, f"this communicator was closed meanwhile ({self.description})")
        if status == Status.MISFIT:
            raise MismatchError(
                f"{where}: the message has {operation.misfit()} bytes, and the buffer {nbytes}. Make both sizes equal."
            )
        if status == Status.TIMEOUT:
            missing = operation.missing()
            who = f"rank(s) {format_ranks(missing)} did not come" if missing else "the data did not move"
            text = (
                f"{where}: {who} within {waited.total_seconds():g} s. "
                "They are alive, but do something else: look where they are."
            )
            self._group.abort(missing[0] if missing else self.rank, text)
            raise StalledError(text, ranks=missing)
        self._raise_failure(what)

    def _raise_failure(self, what: str) -> None:
        failure = self._group.failure()
        assert failure is not None, "the operation has failed with its group"
        status, culprit, text = failure
        where = f"{what} on rank {self.rank} ({self.description})"
        ranks = () if culprit == self.rank else (culprit,)
        if status == Status.MISMATCH:
            raise MismatchError(
                f"{where}: the ranks do not agree on an operation: {text}. Every rank must call it with the same "
                "shape, dtype, reduction and root. This communicator is of no more use."
            )
        if status == Status.LOST:
            raise PeerLostError(
                f"{where}: rank {culprit} (world rank {self.members[culprit]}) is lost: {text}", ranks=ranks
            )
        raise PeerLostError(f"{where}: aborted: {text}", ranks=ranks)


def _check_operands(operation: str, source: Buffer, target: Buffer, count: int) -> None:
    check_same_type(operation, source, target)
    check_count(operation, "target", target, count)
    if source.memory != HOST:
        raise UsageError(f"{operation}: the engine tcp moves host memory, not {source.memory!r}; copy it to the host")
