"""The engine `sample-sockets`: Unix socket pairs between the processes of one host.

All that it does itself is to send and receive (`_mailbox.py`) and to make groups; every collective comes from
`PointToPointCommunicator`.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from unidist.algorithms import PointToPointCommunicator
from unidist.buffer import Buffer
from unidist.communicator import COMPLETED, Capabilities, Communicator, Work, format_ranks
from unidist.engine import Availability, Engine
from unidist.errors import MismatchError, UsageError
from unidist.rendezvous import Rendezvous
from unidist.topology import Topology
from unidist_sample._mailbox import Mailbox

_MAX_RANKS = 64  # so many descriptors fit into one contribution to the rendezvous
_DIGEST = struct.Struct("q")


class SocketEngine(Engine):
    """Connects the processes of one host, each two of them by a socket pair."""

    def availability(self) -> Availability:
        """Needs Linux, for anonymous files."""
        if not hasattr(os, "memfd_create"):
            return Availability(False, "needs Linux's memfd_create")
        return Availability(True, "a sample, not made for speed")

    def supports(self, topology: Topology) -> Availability:
        """One host, and not too many ranks."""
        if not topology.single_host:
            return Availability(False, f"connects one host; this job has {topology.num_nodes}")
        if topology.world_size > _MAX_RANKS:
            return Availability(False, f"connects at most {_MAX_RANKS} ranks; this job has {topology.world_size}")
        return Availability(True)

    def connect(self, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Make a pair for every higher rank, and hand the far ends to all: each takes its own and closes the rest."""
        rank, size = topology.rank, topology.world_size
        near, far = _make_pairs(range(rank + 1, size))
        try:
            everyone = rendezvous.allgather(b"", fds=[end.fileno() for end in far.values()], timeout=timeout)
        finally:
            _close(far.values())
        for source, contribution in enumerate(everyone):
            for number, descriptor in enumerate(contribution.fds, start=source + 1):
                if number == rank:
                    near[source] = socket.socket(fileno=descriptor)
                else:
                    os.close(descriptor)
        return SocketCommunicator(near, rank, tuple(range(size)), timeout)


class SocketCommunicator(PointToPointCommunicator):
    """One group of ranks.

    Args:
        peers: a SOCK_SEQPACKET socket to each other rank of the group; closed with this communicator.
        rank: this process's index in the group.
        members: world ranks.
        timeout: of every operation.
    """

    def __init__(
        self, peers: Mapping[int, socket.socket], rank: int, members: tuple[int, ...], timeout: timedelta
    ) -> None:
        self.rank, self.size, self.members, self.timeout = rank, len(members), members, timeout
        self.capabilities = Capabilities()
        self.description = f"sample-sockets, ranks {format_ranks(members)}"
        self._mailbox = Mailbox(peers, rank, timeout)

    def send(self, buffer: Buffer, *, to: int) -> Work:
        """See `Communicator.send`; the data are copied at once."""
        self.check_rank(to, "to")
        self._mailbox.send(to, buffer.bytes())
        return COMPLETED

    def recv(self, buffer: Buffer, *, source: int) -> Work:
        """See `Communicator.recv`."""
        self.check_rank(source, "source")
        return self._mailbox.receive(source, buffer)

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """See `Communicator.split`; of each two members the lower one makes the new socket pair."""
        self._mailbox.check()
        group = list(ranks)
        for rank in group:
            self.check_rank(rank, "ranks")
        if not group:
            return None
        if self.rank not in group or len(set(group)) != len(group):
            raise UsageError(f"split({group}) on rank {self.rank}: give each member once, this rank included, or ()")
        digest = _DIGEST.pack(hash(tuple(group)))  # the hash of integers is the same in every process
        ends, far = _make_pairs(rank for rank in group if rank > self.rank)
        try:
            for rank, end in far.items():
                self._mailbox.send_socket(rank, digest, end)
            for rank in (rank for rank in group if rank < self.rank):
                theirs, ends[rank] = self._mailbox.receive_socket(rank)
                if theirs != digest:
                    raise MismatchError(f"split: rank {self.rank} passed {group}, but rank {rank} another list")
        except BaseException:
            _close(ends.values())
            raise
        finally:
            _close(far.values())
        peers = {group.index(rank): end for rank, end in ends.items()}
        return SocketCommunicator(
            peers, group.index(self.rank), tuple(self.members[rank] for rank in group), self.timeout
        )

    def abort(self, reason: str) -> None:
        """See `Communicator.abort`."""
        super().abort(reason)
        # A peer that died during a collective was missed on the channel of the collectives.
        channel = self.channel
        self._mailbox.abort(reason, lost=channel._mailbox.lost if isinstance(channel, SocketCommunicator) else ())

    def close(self) -> None:
        """See `Communicator.close`; what was sent before can still be received by the others."""
        super().close()
        self._mailbox.close()


def _make_pairs(ranks: Iterable[int]) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """Return a socket pair for each rank: the ends to keep and the ends to give away. Packets keep their borders."""
    near, far = {}, {}
    for rank in ranks:
        near[rank], far[rank] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return near, far


def _close(ends: Iterable[socket.socket]) -> None:
    for end in ends:
        end.close()
