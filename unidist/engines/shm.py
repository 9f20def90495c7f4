"""The shm engine: collectives over memory that all ranks of a host share.

The data path is C (`shm_native/`); this module makes groups, gives out engine memory, and turns outcomes
into the errors of unidist. How ranks meet: each posts an operation, then any later call that waits or polls
moves every pending operation on; no thread is needed.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum

from unidist.buffer import Buffer, DType, copy
from unidist.communicator import (
    COMPLETED,
    Capabilities,
    Communicator,
    ReduceOp,
    ReportsArrivals,
    Work,
    equal_counts,
    format_ranks,
)
from unidist.engine import Availability, Engine
from unidist.engines._arena import Allocation, Arena
from unidist.environment import Settings
from unidist.errors import MismatchError, PeerLostError, StalledError, UsageError
from unidist.rendezvous import Rendezvous
from unidist.topology import Topology

try:
    from unidist.engines import _shm
    from unidist.engines._host import HostMemory
except ImportError as exc:  # built without a C compiler
    _build_problem: str | None = f"the C kernels are not built ({exc}); reinstall unidist-train with a C compiler"
else:
    _build_problem = None
    _DTYPE_CODES = {DType(name): code for code, name in enumerate(_shm.DTYPES)}
    _OP_CODES = {ReduceOp(name): code for code, name in enumerate(_shm.REDUCE_OPS)}

_SMALL_BYTES = 8192  # payloads up to this travel with the descriptor of their operation
_MIN_WINDOW_BYTES = 1 << 16
_OUTBOX_BYTES = 1 << 20  # messages up to this leave memory behind for the next one,
_OUTBOX_SPARE = 8  # this many of a size
_SPIN_NS = 100_000  # about what waking a sleeper costs, twice
_OVERSUBSCRIBED_SPIN_NS = 2_000


class _Opcode(IntEnum):
    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    REDUCESCATTER = 3
    ALLTOALL = 4
    BARRIER = 5


class _Status(IntEnum):
    OK = 0
    PENDING = 1
    TIMEOUT = 2
    LOST = 3
    ABORTED = 4


class ShmEngine(Engine):
    """Connects the processes of one host."""

    def availability(self) -> Availability:
        """Usable on Linux where the C kernels were built."""
        if _build_problem:
            return Availability(False, _build_problem)
        if not hasattr(os, "memfd_create"):
            return Availability(False, "needs Linux's memfd_create")
        return Availability(True, "built in")

    def supports(self, topology: Topology) -> Availability:
        """All ranks on one host."""
        if not topology.single_host:
            return Availability(False, f"connects one host; this job has {topology.num_nodes}")
        if _build_problem is None and topology.world_size > _shm.MAX_SIZE:
            return Availability(False, f"connects at most {_shm.MAX_SIZE} ranks")
        return Availability(True)

    def connect(self, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Map everyone's engine memory and return the world communicator."""
        settings = Settings.read()
        host = HostMemory(
            topology.rank,
            topology.world_size,
            rendezvous,
            capacity=settings.shm_capacity_bytes,
            timeout=timeout,
        )
        shared = _Shared(host, settings.shm_staging_bytes)
        slot = shared.allocate_slot(topology.world_size)
        try:
            offsets = rendezvous.allgather(struct.pack("!Q", slot.offset), timeout=timeout)
        except BaseException:
            host.close()
            raise
        return ShmCommunicator(
            shared,
            topology.rank,
            tuple(range(topology.world_size)),
            slot,
            [struct.unpack("!Q", item.payload)[0] for item in offsets],
            timeout,
        )


class _Shared:
    """The host's memory, closed when the last communicator on it is.

    A slot is given back only after every member has closed the group: until then they look at it.
    """

    def __init__(self, host: HostMemory, staging_bytes: int) -> None:
        self.host = host
        self._staging_bytes = staging_bytes
        self._users = 0
        self._retired: list[tuple[_shm.Group, Allocation]] = []

    def window_bytes(self, size: int) -> int:
        """Return the size of one of the two staging windows of a slot."""
        return max(self._staging_bytes // 2, _MIN_WINDOW_BYTES, 64 * 16 * size) // 4096 * 4096

    def allocate_slot(self, size: int) -> Allocation:
        """Return memory for this rank's slot in a group of `size`."""
        self._retired = [(group, slot) for group, slot in self._retired if not group.all_closed()]
        return self.host.arena.allocate(_shm.slot_bytes(size, _SMALL_BYTES, self.window_bytes(size)))

    def acquire(self) -> None:
        """Count one communicator more."""
        self._users += 1

    def release(self, group: _shm.Group, slot: Allocation) -> None:
        """Count one communicator less."""
        self._users -= 1
        self._retired.append((group, slot))
        if self._users == 0:
            for _, retired in self._retired:
                retired.abandon()
            self._retired.clear()
            self.host.close()


class _Outbox:
    """Engine memory for copies of outgoing messages; small pieces are kept for the next message.

    Args:
        arena: gives the memory.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._spare: dict[int, list[Allocation]] = {}

    def take(self, nbytes: int) -> Allocation:
        """Return memory for a message."""
        size = max(4096, 1 << max(0, nbytes - 1).bit_length()) if nbytes <= _OUTBOX_BYTES else nbytes
        spare = self._spare.get(size)
        return spare.pop() if spare else self._arena.allocate(size)

    def give_back(self, allocation: Allocation) -> None:
        """Take memory back once the receiver has read it."""
        if allocation.nbytes <= _OUTBOX_BYTES:
            spare = self._spare.setdefault(allocation.nbytes, [])
            if len(spare) < _OUTBOX_SPARE:
                spare.append(allocation)


class ShmCommunicator(Communicator, ReportsArrivals):
    """One group of ranks over shared memory. Made by `ShmEngine.connect` and `split`."""

    def __init__(
        self,
        shared: _Shared,
        rank: int,
        members: tuple[int, ...],
        slot: Allocation,
        slot_offsets: Sequence[int],
        timeout: timedelta,
    ) -> None:
        host = shared.host
        self.rank = rank
        self.size = len(members)
        self.members = members
        self.timeout = timeout
        self.description = f"shm, ranks {format_ranks(members)}"
        self.capabilities = Capabilities(detects_mismatch=True, engine_memory=True, bucket_bytes=4 << 20)
        self._shared = shared
        self._slot = slot
        crowded = len(host.bases) > (os.cpu_count() or 1)
        self._group = _shm.Group(
            rank,
            self.size,
            tuple(host.bases[member] + offset for member, offset in zip(members, slot_offsets, strict=True)),
            tuple(host.bases[member] for member in members),
            tuple(host.capacities[member] for member in members),
            tuple(host.liveness[member] for member in members),
            _SMALL_BYTES,
            shared.window_bytes(self.size),
            _OVERSUBSCRIBED_SPIN_NS if crowded else _SPIN_NS,
        )
        self._timeout_ns = _nanoseconds(timeout)
        self._pending: dict[int, tuple[Buffer, ...]] = {}  # memory that the engine still uses
        self._errors: dict[int, MismatchError] = {}
        self._outgoing: dict[int, deque[tuple[int, Buffer, Allocation | None]]] = {}  # the last: of the outbox
        self._incoming: dict[int, deque[_Receive]] = {}
        self._outbox = _Outbox(host.arena)
        self._message_lock = threading.RLock()
        self._closed = False
        shared.acquire()

    # Collectives

    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        """See `Communicator.allreduce`; 16-bit floats are added up in float32, in rank order."""
        _check_alike(source, target, source.count, "allreduce")
        _check_reduction(source.dtype, op)
        return self._post(_Opcode.ALLREDUCE, source, target, op=op, scale=scale)

    def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
        """See `Communicator.allgather`."""
        pieces = self._counts(counts, target.count)
        _check_alike(source, target, sum(pieces), "allgather")
        if source.count != pieces[self.rank]:
            raise UsageError(f"allgather: counts[{self.rank}]={pieces[self.rank]}, but the source has {source.count}")
        return self._post(_Opcode.ALLGATHER, source, target, counts=pieces)

    def broadcast(self, buffer: Buffer, *, root: int) -> Work:
        """See `Communicator.broadcast`."""
        self.check_rank(root, "root")
        return self._post(_Opcode.BROADCAST, buffer, buffer, root=root)

    def reducescatter(
        self,
        source: Buffer,
        target: Buffer,
        *,
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
        counts: Sequence[int] | None = None,
    ) -> Work:
        """See `Communicator.reducescatter`."""
        pieces = self._counts(counts, source.count)
        if sum(pieces) != source.count:
            raise UsageError(
                f"reducescatter: counts add up to {sum(pieces)}, but the source has {source.count} elements"
            )
        _check_alike(source, target, pieces[self.rank], "reducescatter")
        _check_reduction(source.dtype, op)
        return self._post(_Opcode.REDUCESCATTER, source, target, op=op, scale=scale, counts=pieces)

    def alltoall(
        self, source: Buffer, target: Buffer, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Work:
        """See `Communicator.alltoall`."""
        sent, received = self._counts(send_counts, 0), self._counts(receive_counts, 0)
        if sum(sent) != source.count:
            raise UsageError(f"alltoall: send_counts add up to {sum(sent)}, but the source has {source.count} elements")
        _check_alike(source, target, sum(received), "alltoall")
        return self._post(_Opcode.ALLTOALL, source, target, counts=sent, counts2=received)

    def barrier(self) -> Work:
        """See `Communicator.barrier`."""
        return self._post(_Opcode.BARRIER, _NOTHING, _NOTHING)

    # Messages

    def send(self, buffer: Buffer, *, to: int) -> Work:
        """See `Communicator.send`. Engine memory is read by the receiver in place; other memory is copied at once."""
        self.check_rank(to, "to")
        self._check_usable()
        with self._message_lock:
            self._reap(to)
            offset = self._group.offset(buffer.address, buffer.nbytes)
            own: Allocation | None = None
            if offset < 0:
                own = self._outbox.take(buffer.nbytes)
                copy(buffer, own.buffer(buffer.nbytes).cast(buffer.dtype))
                offset = own.offset
            number = self._group.send(to, offset, buffer.nbytes, _DTYPE_CODES[buffer.dtype], self._timeout_ns)
            if number < 0:
                self._raise(number, f"send to rank {to}", self.timeout)
            self._outgoing.setdefault(to, deque()).append((number, buffer, own))
            return COMPLETED if own is not None else _Send(self, to, number)

    def recv(self, buffer: Buffer, *, source: int) -> Work:
        """See `Communicator.recv`."""
        self.check_rank(source, "source")
        self._check_usable()
        with self._message_lock:
            receive = _Receive(self, source, buffer)
            self._incoming.setdefault(source, deque()).append(receive)
            return receive

    # The group itself

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """See `Communicator.split`."""
        chosen = tuple(ranks)
        for rank in chosen:
            self.check_rank(rank, "ranks")
        if chosen and (self.rank not in chosen or len(set(chosen)) != len(chosen)):
            raise UsageError(
                f"split: rank {self.rank} passed ranks {chosen}; pass each rank once, this one included, or ()"
            )
        slot = self._shared.allocate_slot(len(chosen)) if chosen else None
        digest = hash_ranks(chosen)
        mine, everyone = bytearray(struct.pack("QQ", slot.offset if slot else 0, digest)), bytearray(16 * self.size)
        self.allgather(Buffer.of(mine), Buffer.of(everyone)).wait()
        replies = list(struct.iter_unpack("QQ", everyone))
        if slot is None:
            return None
        apart = [rank for rank in chosen if replies[rank][1] != digest]
        if apart:
            raise MismatchError(
                f"split: rank {self.rank} passed ranks {chosen}, but rank(s) {format_ranks(apart)} passed another list"
            )
        return ShmCommunicator(
            self._shared,
            chosen.index(self.rank),
            tuple(self.members[rank] for rank in chosen),
            slot,
            [replies[rank][0] for rank in chosen],
            self.timeout,
        )

    def allocate(self, nbytes: int) -> Buffer:
        """See `Communicator.allocate`."""
        self._check_usable()
        return self._shared.host.arena.allocate(nbytes).buffer(nbytes)

    def waiting_for(self) -> Sequence[int]:
        """See `ReportsArrivals.waiting_for`."""
        return [] if self._closed else self._group.missing()

    def abort(self, reason: str) -> None:
        """See `Communicator.abort`; the reason reaches every member."""
        if not self._closed:
            self._group.abort(self.rank, reason or "no reason given")

    def close(self) -> None:
        """See `Communicator.close`."""
        if self._closed:
            return
        self._closed = True
        self._group.close()
        for queue in self._outgoing.values():
            for _, _, own in queue:  # not taken yet; the receiver may come after this rank has gone
                if own is not None:
                    own.abandon()
        self._pending.clear()
        self._outgoing.clear()
        self._incoming.clear()
        self._shared.release(self._group, self._slot)

    # Inside

    def _counts(self, counts: Sequence[int] | None, total: int) -> tuple[int, ...]:
        pieces = tuple(equal_counts(total, self.size) if counts is None else counts)
        if len(pieces) != self.size or min(pieces) < 0:
            raise UsageError(
                f"counts={list(pieces)}: give one number of elements, 0 or more, for each of {self.size} ranks"
            )
        return pieces

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"this communicator is closed ({self.description})")

    def _check_usable(self) -> None:
        self._check_open()
        aborted = self._group.aborted()
        if aborted is not None:
            raise self._abort_error(*aborted)

    def _post(
        self,
        opcode: _Opcode,
        source: Buffer,
        target: Buffer,
        *,
        op: ReduceOp = ReduceOp.SUM,
        root: int = 0,
        scale: float = 1.0,
        counts: tuple[int, ...] | None = None,
        counts2: tuple[int, ...] | None = None,
    ) -> Work:
        self._check_usable()
        number = self._group.post(
            opcode,
            source.address,
            target.address,
            source.count,
            _DTYPE_CODES[source.dtype],
            _OP_CODES[op],
            root,
            scale,
            counts,
            counts2,
            self._timeout_ns,
        )
        if number < 0:
            self._raise(number, opcode.name.lower(), self.timeout)
        self._pending[number] = (source, target)
        return _Collective(self, number, opcode)

    def _drive(self, number: int, timeout_ns: int) -> int:
        """Move all collectives up to `number` on; returns the outcome of the C side."""
        self._check_open()
        outcome = self._group.drive(number, timeout_ns)
        for failed, text in self._group.failures():
            self._errors[failed] = MismatchError(
                f"the ranks do not agree on an operation (seen on rank {self.rank}; {self.description}): {text}. "
                "Every rank must call it with the same shape, dtype, reduction and root."
            )
        if outcome == 0:
            for done in [pending for pending in self._pending if pending <= number]:
                del self._pending[done]
        return outcome

    def _reap(self, to: int) -> None:
        """Forget the memory of messages that rank `to` has taken."""
        outgoing = self._outgoing.get(to)
        while outgoing and self._group.wait_sent(to, outgoing[0][0], 0) == 0:
            _, _, own = outgoing.popleft()
            if own is not None:
                self._outbox.give_back(own)

    def _raise(self, outcome: int, what: str, waited: timedelta) -> None:
        status, peer = _Status(-outcome % 8), -outcome // 8 - 1
        where = f"{what} on rank {self.rank} ({self.description})"
        if status is _Status.TIMEOUT:
            missing = self._group.missing() or [peer]
            text = (
                f"{where}: rank(s) {format_ranks(missing)} did not come within {waited.total_seconds():g} s. "
                "They are alive, but do something else: look where they are."
            )
            self.abort(text)
            raise StalledError(text, ranks=missing)
        if status is _Status.LOST:
            text = f"{where}: rank {peer} (world rank {self.members[peer]}) died or left."
            self.abort(text)
            raise PeerLostError(text, ranks=(peer,))
        aborted = self._group.aborted()
        assert aborted is not None
        raise self._abort_error(*aborted)

    def _abort_error(self, rank: int, reason: str) -> PeerLostError:
        lost = () if rank == self.rank else (rank,)
        return PeerLostError(
            f"aborted by rank {rank} (seen on rank {self.rank}; {self.description}): {reason}", ranks=lost
        )


class _Collective(Work):
    def __init__(self, communicator: ShmCommunicator, number: int, opcode: _Opcode) -> None:
        self._communicator = communicator
        self._number = number
        self._opcode = opcode
        self._finished = False

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._finished:
            communicator = self._communicator
            limit = communicator._timeout_ns if timeout is None else _nanoseconds(timeout)
            outcome = communicator._drive(self._number, limit)
            if outcome:
                communicator._raise(outcome, self._opcode.name.lower(), timeout or communicator.timeout)
            self._finished = True
        self._check()

    def done(self) -> bool:
        if not self._finished:
            outcome = self._communicator._drive(self._number, 0)
            if outcome and -outcome % 8 == _Status.PENDING:
                return False
            self._finished = outcome == 0  # else wait() raises what is the matter
        return True

    def _check(self) -> None:
        error = self._communicator._errors.pop(self._number, None)
        if error is not None:
            raise error


class _Send(Work):
    """A message in engine memory, which the receiver reads in place."""

    def __init__(self, communicator: ShmCommunicator, to: int, number: int) -> None:
        self._communicator = communicator
        self._to = to
        self._number = number

    def wait(self, timeout: timedelta | None = None) -> None:
        communicator = self._communicator
        communicator._check_open()
        limit = timeout or communicator.timeout
        outcome = communicator._group.wait_sent(self._to, self._number, _nanoseconds(limit))
        if outcome:
            communicator._raise(outcome, f"send to rank {self._to}", limit)

    def done(self) -> bool:
        self._communicator._check_open()
        outcome = self._communicator._group.wait_sent(self._to, self._number, 0)
        return outcome == 0 or -outcome % 8 != _Status.PENDING


class _Receive(Work):
    """A message to come; messages of one sender are taken in the order in which they were asked for."""

    def __init__(self, communicator: ShmCommunicator, source: int, buffer: Buffer) -> None:
        self._communicator = communicator
        self._source = source
        self._buffer = buffer
        self._finished = False
        self._error: UsageError | None = None

    def wait(self, timeout: timedelta | None = None) -> None:
        limit = timeout or self._communicator.timeout
        outcome = self._advance(_nanoseconds(limit))
        if outcome:
            self._communicator._raise(outcome, f"recv from rank {self._source}", limit)
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        outcome = self._advance(0)
        return outcome == 0 or -outcome % 8 != _Status.PENDING

    def _advance(self, timeout_ns: int) -> int:
        self._communicator._check_open()
        with self._communicator._message_lock:
            queue = self._communicator._incoming.get(self._source, deque())
            while not self._finished:
                outcome = queue[0]._take(timeout_ns)
                if outcome:
                    return outcome
                queue.popleft()
        return 0

    def _take(self, timeout_ns: int) -> int:
        buffer = self._buffer
        code = _DTYPE_CODES[buffer.dtype]
        outcome = self._communicator._group.receive(self._source, buffer.address, buffer.nbytes, code, timeout_ns)
        if isinstance(outcome, tuple):
            nbytes, dtype = outcome
            self._error = MismatchError(
                f"recv on rank {self._communicator.rank} asked rank {self._source} for {buffer.nbytes} bytes of "
                f"{buffer.dtype}, but the message has {nbytes} bytes of {dtype}. The message is lost."
            )
            outcome = 0
        self._finished = outcome == 0
        return outcome


_NOTHING = Buffer(0, 0, DType.UINT8)


def hash_ranks(ranks: Sequence[int]) -> int:
    """Return a number that tells lists of ranks apart, the same on every rank."""
    import hashlib

    return int.from_bytes(hashlib.blake2b(repr(tuple(ranks)).encode(), digest_size=8).digest(), "little")


def _nanoseconds(duration: timedelta) -> int:
    return max(1, int(duration.total_seconds() * 1e9))


def _check_alike(source: Buffer, target: Buffer, count: int, what: str) -> None:
    if source.dtype != target.dtype or target.count != count:
        raise UsageError(f"{what}: the target must be {source.dtype}[{count}], not {target.dtype}[{target.count}]")


def _check_reduction(dtype: DType, op: ReduceOp) -> None:
    if dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise UsageError(f"{op} of {dtype}: complex numbers have no order; choices: sum, product")
