"""One group of ranks over shared memory: checks arguments, keeps memory alive, turns outcomes into errors."""

from __future__ import annotations

import functools
import os
import struct
import threading
from collections.abc import Sequence
from datetime import timedelta

from typing_extensions import override

from unidist.algorithms import check_order
from unidist.buffer import Buffer, DType
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
from unidist.communicator_capabilities import AT_ONCE_NS, ExchangesBlocks, MakesSubgroups, SharedMemory, SharesMemory
from unidist.engines import _shm
from unidist.engines._arena import Allocation
from unidist.engines._host import SMALL_BYTES, SharedHost
from unidist.engines._shm_messages import Mailbox
from unidist.engines._shm_pages import SharedPages, obstacle
from unidist.engines._shm_work import (
    DTYPE_CODES,
    OP_CODES,
    SLICE_NS,
    CollectiveWork,
    Opcode,
    Status,
    nanoseconds,
    patiently,
    unpack,
)
from unidist.errors import ConfigurationError, MismatchError, PeerLostError, StalledError, UsageError
from unidist.rendezvous import Rendezvous

_SPIN_NS = 100_000  # about what waking a sleeper costs, twice
_OVERSUBSCRIBED_SPIN_NS = 2_000


class ShmCommunicator(Communicator, ReportsArrivals, SharesMemory, MakesSubgroups, ExchangesBlocks):
    """One group of ranks over shared memory. Made by `ShmEngine.connect` and `split`."""

    def __init__(
        self,
        shared: SharedHost,
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
        self.capabilities = Capabilities(
            detects_mismatch=True,
            adds_in_rank_order=True,
            engine_memory=True,
            bucket_bytes=32 << 20,
            num_pending=48,  # of 64 slots (UD_RING): a few are for what comes between gradients
        )
        self._shared = shared
        self._slot = slot
        crowded = len(host.bases) > len(os.sched_getaffinity(0))
        self.group = _shm.Group(
            rank,
            self.size,
            tuple(host.bases[member] + offset for member, offset in zip(members, slot_offsets, strict=True)),
            tuple(host.bases[member] for member in members),
            tuple(host.capacities[member] for member in members),
            tuple(host.liveness[member] for member in members),
            SMALL_BYTES,
            shared.window_bytes(self.size),
            _OVERSUBSCRIBED_SPIN_NS if crowded else _SPIN_NS,
        )
        self.timeout_ns = nanoseconds(timeout)
        self._pending: dict[int, tuple[Buffer, ...]] = {}  # memory that the engine still uses
        self.errors: dict[int, MismatchError] = {}
        self._mailbox = Mailbox(rank, self.group, host.arena)
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self._own_abort = ""  # why this rank aborted the group
        shared.acquire(slot)

    # Collectives

    @override
    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        """Reduce the sources of all ranks; 16-bit floats are added up in float32, in rank order."""
        _check_operands(source, target, source.count, "allreduce")
        if op in _ORDERING:
            check_order(source.dtype, op)
        return self._post(Opcode.ALLREDUCE, source, target, op=op, scale=scale)

    @override
    def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
        pieces = self._counts(counts, target.count)
        _check_operands(source, target, target.count if counts is None else sum(pieces), "allgather")
        if source.count != pieces[self.rank]:
            raise UsageError(f"allgather: counts[{self.rank}]={pieces[self.rank]}, but the source has {source.count}")
        return self._post(Opcode.ALLGATHER, source, target, counts=pieces)

    @override
    def broadcast(self, buffer: Buffer, *, root: int) -> Work:
        self.check_rank(root, "root")
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
        pieces = self._counts(counts, source.count)
        if sum(pieces) != source.count:
            raise UsageError(
                f"reducescatter: counts add up to {sum(pieces)}, but the source has {source.count} elements"
            )
        _check_operands(source, target, pieces[self.rank], "reducescatter")
        if op in _ORDERING:
            check_order(source.dtype, op)
        return self._post(Opcode.REDUCESCATTER, source, target, op=op, scale=scale, counts=pieces)

    @override
    def alltoall(
        self, source: Buffer, target: Buffer, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Work:
        sent, received = self._counts(send_counts, 0), self._counts(receive_counts, 0)
        if sum(sent) != source.count:
            raise UsageError(f"alltoall: send_counts add up to {sum(sent)}, but the source has {source.count} elements")
        _check_operands(source, target, sum(received), "alltoall")
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
        if self._closed:
            self.check_open()
        if source is None or target is None:
            data = (0, 0, 0, 0, 0)
        else:
            data = (source.address, source.nbytes, target.address, target.count, DTYPE_CODES[source.dtype])
        places = (own.address, everyone.address, own.count)
        number = self.group.cycle(*places, block, *data, OP_CODES[op], scale, min(self.timeout_ns, AT_ONCE_NS))
        if number is True or number is False:
            return number
        # It is not complete: another rank takes long, or something is the matter.
        if number:
            return CollectiveWork(self, number, Opcode.ALLGATHER)
        return self._post(Opcode.ALLGATHER, own, everyone, counts=self._counts(None, everyone.count))

    # Messages

    @override
    def send(self, buffer: Buffer, *, to: int) -> Work:
        """Send a message. The receiver reads engine memory in place; other memory is copied at once."""
        self.check_rank(to, "to")
        self._check_usable()
        return self._mailbox.send(self, buffer, to)

    @override
    def recv(self, buffer: Buffer, *, source: int) -> Work:
        self.check_rank(source, "source")
        self._check_usable()
        return self._mailbox.receive(self, buffer, source)

    # The group itself

    @override
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        self._check_usable()
        chosen = tuple(ranks)
        self._check_members(chosen, "split")
        slot = self._shared.allocate_slot(len(chosen)) if chosen else None
        digest = hash_ranks(chosen)
        mine, everyone = bytearray(_JOINING.pack(slot.offset if slot else 0, digest)), bytearray(16 * self.size)
        self.allgather(Buffer.of(mine), Buffer.of(everyone)).wait()
        if slot is None:
            return None
        replies = list(_JOINING.iter_unpack(everyone))
        return self._join(chosen, slot, [replies[rank] for rank in chosen], "split", self.timeout)

    @override
    def subgroup(self, ranks: Sequence[int], rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        self._check_usable()
        chosen = tuple(ranks)
        if not chosen:
            raise UsageError(f"subgroup: rank {self.rank} passed no ranks; pass those of the members")
        self._check_members(chosen, "subgroup")
        slot = self._shared.allocate_slot(len(chosen))
        contributions = rendezvous.allgather(_JOINING.pack(slot.offset, hash_ranks(chosen)), timeout=timeout)
        replies = [_JOINING.unpack(item.payload) for item in contributions]
        return self._join(chosen, slot, replies, "subgroup", timeout)

    @override
    def allocate(self, nbytes: int) -> Buffer:
        self._check_usable()
        return self._shared.allocate(nbytes).buffer(nbytes)

    @override
    def sharing_obstacle(self) -> str:
        """Return why the kernel cannot share memory, or ""; all ranks are on this host."""
        return obstacle()

    @override
    def allocate_shared(self, nbytes: int) -> SharedMemory:
        """Allocate memory that all ranks map, in the arena of the group's first rank."""
        self._check_usable()
        allocation, refusal = (
            None,
            ConfigurationError(
                f"shm: rank 0 of {self.description} could not allocate {nbytes} bytes of shared memory; it says why"
            ),
        )
        if self.rank == 0:
            try:
                allocation = self._shared.allocate_shared(nbytes, self.size)
            except ConfigurationError as exc:
                refusal = exc  # the others shall know before this rank raises
        offset = allocation.offset if allocation else 0
        mine, everyone = bytearray(struct.pack("QQ", offset, nbytes)), bytearray(16 * self.size)
        self.allgather(Buffer.of(mine), Buffer.of(everyone)).wait()
        replies = list(struct.iter_unpack("QQ", everyone))
        sizes = [size for _, size in replies]
        if len(set(sizes)) > 1:
            if allocation:
                self._shared.free_shared(allocation)
            raise MismatchError(f"allocate_shared: the ranks asked for different sizes ({self.description}): {sizes}")
        if not replies[0][0]:
            raise refusal
        return SharedPages(self._shared.host.memories[self.members[0]], replies[0][0], nbytes, self.rank)

    @override
    def waiting_for(self) -> Sequence[int]:
        return [] if self._closed else self.group.missing()

    @override
    def abort(self, reason: str) -> None:
        """Abort the group; every member gets the reason. Nothing happens if the group is closed, or being closed."""
        if not self._closed:
            text = f"rank {self.rank} called abort: {reason or 'no reason given'}"
            self._own_abort = self._own_abort or text
            self.group.abort(self.rank, text)

    @override
    def close(self) -> None:
        """Close the group. Calls that other threads are in end with UsageError before this returns."""
        if os.getpid() != self._pid:
            return  # a forked child drops its references, but the slot, which peers look at, is its parent's
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self.group.close()
        self._mailbox.close()
        self._pending.clear()
        self._shared.release(self.group, self._slot)
        del self._slot  # it would keep the engine memory for as long as something refers to this object

    def __del__(self) -> None:
        """Close as `close` does: peers may still look at this rank's slot and messages."""
        if getattr(self, "_closed", True) is False:
            self.close()

    # Inside

    def _check_members(self, chosen: tuple[int, ...], what: str) -> None:
        for rank in chosen:
            self.check_rank(rank, "ranks")
        if chosen and (self.rank not in chosen or len(set(chosen)) != len(chosen)):
            raise UsageError(
                f"{what}: rank {self.rank} passed ranks {chosen}; pass each rank once, this one included, or ()"
            )

    def _join(
        self,
        chosen: tuple[int, ...],
        slot: Allocation,
        replies: Sequence[tuple[int, int]],
        what: str,
        timeout: timedelta,
    ) -> Communicator:
        """Return the communicator over `chosen`, each of which has told its slot and the ranks that it passed."""
        digest = hash_ranks(chosen)
        apart = [rank for rank, (_, theirs) in zip(chosen, replies, strict=True) if theirs != digest]
        if apart:
            raise MismatchError(
                f"{what}: rank {self.rank} passed ranks {chosen}, but rank(s) {format_ranks(apart)} passed another list"
            )
        return ShmCommunicator(
            self._shared,
            chosen.index(self.rank),
            tuple(self.members[rank] for rank in chosen),
            slot,
            [offset for offset, _ in replies],
            timeout,
        )

    def _counts(self, counts: Sequence[int] | None, total: int) -> tuple[int, ...]:
        if counts is None:
            return _even_counts(total, self.size)
        pieces = tuple(counts)
        if len(pieces) != self.size or min(pieces) < 0:
            raise UsageError(
                f"counts={list(pieces)}: give one number of elements, 0 or more, for each of {self.size} ranks"
            )
        return pieces

    def check_open(self) -> None:
        if self._closed:
            raise self._closed_error(f"this communicator is closed ({self.description})")

    def _check_usable(self) -> None:
        if self._closed:
            self.check_open()
        aborted = self.group.aborted()
        if aborted is not None:
            raise self._abort_error(*aborted)

    def _post(
        self,
        opcode: Opcode,
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
        arguments = (
            opcode,
            source.address,
            target.address,
            source.count,
            DTYPE_CODES[source.dtype],
            OP_CODES[op],
            root,
            scale,
            counts,
            counts2,
        )
        number: int = self.group.post(*arguments, min(self.timeout_ns, SLICE_NS))
        if number < 0:
            number = patiently(number, lambda limit: self.group.post(*arguments, limit), self.timeout_ns)
        if number < 0:
            self.raise_outcome(number, opcode.name.lower(), self.timeout)
        self._pending[number] = (source, target)
        return CollectiveWork(self, number, opcode)

    def drive(self, number: int, timeout_ns: int) -> int:
        """Move all collectives up to `number` on; returns the outcome of the C side."""
        if self._closed:
            self.check_open()
        outcome = self.group.drive(number, timeout_ns)
        for failed, text in self.group.failures():
            self.errors[failed] = MismatchError(
                f"the ranks do not agree on an operation (seen on rank {self.rank}; {self.description}): {text}. "
                "Every rank must call it with the same shape, dtype, reduction and root."
            )
        if outcome == 0 and (self._pending.pop(number, None) is None or self._pending):  # mostly there is one
            for done in [pending for pending in list(self._pending) if pending <= number]:
                self._pending.pop(done, None)  # another thread that drives may have come first
        return outcome

    def raise_outcome(self, outcome: int, what: str, waited: timedelta, *, waits_for_one: bool = False) -> None:
        """Raise the error for a negative outcome of the C code, and report it to the peers.

        Args:
            outcome: see `unpack`.
            what: the operation.
            waited: how long.
            waits_for_one: for that rank alone, even if others are missing in a pending collective.
        """
        status, peer = unpack(outcome)
        where = f"{what} on rank {self.rank} ({self.description})"
        if status is Status.CLOSED:
            raise self._closed_error(f"{where}: another thread closed this communicator")
        if status is Status.TIMEOUT:
            missing = ([] if waits_for_one else self.group.missing()) or [peer]
            text = (
                f"{where}: rank(s) {format_ranks(missing)} did not come within {waited.total_seconds():g} s. "
                "They are alive, but do something else: look where they are."
            )
            self.group.abort(missing[0], text)
            raise StalledError(text, ranks=missing)
        if status is Status.LOST:
            text = f"{where}: rank {peer} (world rank {self.members[peer]}) died or left."
            self.group.abort(peer, text)
            raise PeerLostError(text, ranks=(peer,))
        aborted = self.group.aborted()
        if aborted is None:  # closed meanwhile
            raise self._closed_error(f"{where}: another thread closed this communicator")
        raise self._abort_error(*aborted)

    def _closed_error(self, text: str) -> Exception:
        """Return the error for a call on a closed group; what ended it is an abort, if this rank had called one."""
        return self._abort_error(self.rank, self._own_abort) if self._own_abort else UsageError(text)

    def _abort_error(self, rank: int, reason: str) -> PeerLostError:
        """Return the error for an abort because of `rank`, which called it, died, or did not come."""
        return PeerLostError(
            f"aborted (seen on rank {self.rank}; {self.description}): {reason}",
            ranks=() if rank == self.rank else (rank,),
        )


_NOTHING = Buffer(0, 0, DType.UINT8)
_ORDERING = frozenset((ReduceOp.MIN, ReduceOp.MAX))
_JOINING = struct.Struct("QQ")  # offset of a rank's slot in a new group, and a digest of the ranks that it passed


@functools.lru_cache(maxsize=256)
def _even_counts(total: int, size: int) -> tuple[int, ...]:
    """Return `equal_counts`, which a loop asks for again and again."""
    return tuple(equal_counts(total, size))


def _check_operands(source: Buffer, target: Buffer, count: int, what: str) -> None:
    if source.dtype != target.dtype or target.count != count:
        raise UsageError(f"{what}: the target must be {source.dtype}[{count}], not {target.dtype}[{target.count}]")
