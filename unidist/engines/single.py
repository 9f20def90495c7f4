"""The engine of a job with one process: every collective is a copy at most. The trivial implementation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta

from typing_extensions import override

from unidist.algorithms._checks import check_count, check_same_type, checked_counts
from unidist.algorithms._reduce import check_reduction, scale_in_place
from unidist.buffer import Buffer, copy
from unidist.communicator import COMPLETED, Capabilities, Communicator, ReduceOp, Work
from unidist.communicator_capabilities import OneRanksMemory, SharedMemory, SharesMemory
from unidist.engine import Availability, Engine
from unidist.errors import PeerLostError, StalledError, UsageError
from unidist.rendezvous import Rendezvous
from unidist.topology import Topology


class SingleEngine(Engine):
    """Always usable, for one process."""

    def availability(self) -> Availability:
        """Usable everywhere."""
        return Availability(True, "built in")

    def supports(self, topology: Topology) -> Availability:
        """One process only."""
        if topology.world_size == 1:
            return Availability(True)
        return Availability(False, f"connects one process, not {topology.world_size}")

    def connect(self, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Return the communicator of this process alone."""
        return SingleCommunicator(member=topology.rank, timeout=timeout)


class SingleCommunicator(Communicator, SharesMemory):
    """A group of one.

    Args:
        member: this process's rank in the world.
        timeout: kept for the interface; nothing here ever waits.
    """

    def __init__(self, *, member: int = 0, timeout: timedelta = timedelta(minutes=30)) -> None:
        self.rank = 0
        self.size = 1
        self.members = (member,)
        self.timeout = timeout
        self.capabilities = Capabilities(detects_mismatch=True)
        self.description = "single"
        self._aborted = ""
        self._closed = False
        self._messages: deque[Buffer] = deque()

    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        """Copy and scale."""
        self._check()
        check_same_type("allreduce", source, target)
        check_count("allreduce", "target", target, source.count)
        check_reduction(target, op)
        copy(source, target)
        if scale != 1.0:
            scale_in_place(target, scale)
        return COMPLETED

    def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
        """Copy."""
        self._check()
        check_same_type("allgather", source, target)
        check_count("allgather", "target", target, checked_counts("allgather", counts, [source.count], self)[0])
        check_count("allgather", "source", source, target.count)
        copy(source, target)
        return COMPLETED

    def broadcast(self, buffer: Buffer, *, root: int) -> Work:
        """Nothing to do."""
        self._check()
        self.check_rank(root, "root")
        return COMPLETED

    def reducescatter(
        self,
        source: Buffer,
        target: Buffer,
        *,
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
        counts: Sequence[int] | None = None,
    ) -> Work:
        """Copy and scale."""
        self._check()
        check_count("reducescatter", "source", source, checked_counts("reducescatter", counts, [source.count], self)[0])
        return self.allreduce(source, target, op=op, scale=scale)

    def alltoall(
        self, source: Buffer, target: Buffer, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Work:
        """Copy."""
        self._check()
        check_count("alltoall", "source", source, checked_counts("alltoall", send_counts, (), self)[0])
        return self.allgather(source, target, counts=receive_counts)

    def send(self, buffer: Buffer, *, to: int) -> Work:
        """Keep a copy for `recv`."""
        self._check()
        self.check_rank(to, "to")
        kept = Buffer.allocate(buffer.count, buffer.dtype)
        copy(buffer, kept)
        self._messages.append(kept)
        return COMPLETED

    def recv(self, buffer: Buffer, *, source: int) -> Work:
        """Take the oldest message of `send`; without one this process would wait for itself."""
        self._check()
        self.check_rank(source, "source")
        if not self._messages:
            raise StalledError("recv from rank 0 on rank 0: this process is alone and has sent nothing")
        message = self._messages.popleft()
        if message.nbytes != buffer.nbytes:
            raise UsageError(f"recv of {buffer.nbytes} bytes on rank 0, but the message has {message.nbytes}")
        copy(message, buffer)
        return COMPLETED

    def barrier(self) -> Work:
        """Nothing to do."""
        self._check()
        return COMPLETED

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """Return another group of one, or None for `()`."""
        self._check()
        for rank in ranks:
            self.check_rank(rank, "ranks")
        if len(ranks) > 1:
            raise UsageError(f"split: ranks {tuple(ranks)} name rank 0 {len(ranks)} times; pass it once, or ()")
        return SingleCommunicator(member=self.members[0], timeout=self.timeout) if ranks else None

    @override
    def sharing_obstacle(self) -> str:
        return ""

    @override
    def allocate_shared(self, nbytes: int) -> SharedMemory:
        self._check()
        return OneRanksMemory(nbytes)

    def abort(self, reason: str) -> None:
        """Let every later call raise."""
        self._aborted = self._aborted or reason or "no reason given"

    def close(self) -> None:
        """Nothing to give back; later operations are refused."""
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise UsageError(f"this communicator is closed ({self.description})")
        if self._aborted:
            raise PeerLostError(f"this communicator was aborted: {self._aborted}")
