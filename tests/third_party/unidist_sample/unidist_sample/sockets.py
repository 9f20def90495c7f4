"""The engine `sample-sockets`: Unix socket pairs between the processes of one host.

All that it does itself is to send and receive; every collective comes from `PointToPointCommunicator`.
A short message travels in the socket, a long one as an anonymous file whose descriptor does, so a send
never waits for its receiver unless hundreds are under way.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta

from unidist.algorithms import PointToPointCommunicator
from unidist.buffer import Buffer
from unidist.communicator import COMPLETED, Capabilities, Communicator, Work, format_ranks
from unidist.engine import Availability, Engine
from unidist.errors import MismatchError, PeerLostError, StalledError, UnidistError, UsageError
from unidist.rendezvous import Rendezvous
from unidist.topology import Topology

_DATA, _FILE, _SPLIT, _ABORT, _LEAVE = b"D", b"F", b"S", b"A", b"L"
_INLINE_BYTES = 16 << 10
_HASH = struct.Struct("q")


class SocketEngine(Engine):
    """Connects the processes of one host by a socket pair between each two."""

    def availability(self) -> Availability:
        """Needs Linux, for anonymous files."""
        if not hasattr(os, "memfd_create"):
            return Availability(False, "needs Linux's memfd_create")
        return Availability(True, "a sample, not made for speed")

    def supports(self, topology: Topology) -> Availability:
        """One host, and no more ranks than the rendezvous carries descriptors."""
        if not topology.single_host:
            return Availability(False, f"connects one host; this job has {topology.num_nodes}")
        return Availability(topology.world_size <= 64, f"connects at most 64 ranks; this job has {topology.world_size}")

    def connect(self, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Make a pair for every higher rank, and hand all far ends to all: each takes its own, and closes the rest."""
        rank, size = topology.rank, topology.world_size
        near, far = _pairs(range(rank + 1, size))
        try:
            everyone = rendezvous.allgather(b"", fds=[end.fileno() for end in far], timeout=timeout)
        finally:
            _close(far)
        peers = dict(zip(range(rank + 1, size), near, strict=True))
        for source, contribution in enumerate(everyone):
            for number, descriptor in enumerate(contribution.fds, start=source + 1):
                if number == rank:
                    peers[source] = socket.socket(fileno=descriptor)
                else:
                    os.close(descriptor)
        return SocketCommunicator(peers, rank, tuple(range(size)), timeout)


class SocketCommunicator(PointToPointCommunicator):
    """One group of ranks.

    Args:
        peers: a SOCK_SEQPACKET socket to every other rank of the group; closed with this communicator.
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
        self._peers = dict(peers)
        self._open = set(peers)  # those from which more may come
        self._left: set[int] = set()
        self._messages: dict[int, deque[bytes]] = {source: deque() for source in range(self.size)}
        self._splits: dict[int, deque[tuple[int, socket.socket]]] = {source: deque() for source in range(self.size)}
        self._receipts: dict[int, deque[_Receipt]] = {source: deque() for source in range(self.size)}
        self._failure: UnidistError | None = None
        self._closed = False
        for peer in self._peers.values():
            peer.setblocking(False)

    def send(self, buffer: Buffer, *, to: int) -> Work:
        """See `Communicator.send`; the data are copied at once."""
        self.check_rank(to, "to")
        self._check()
        data = bytes(buffer.bytes())
        if to == self.rank:
            self._messages[to].append(data)
        elif len(data) <= _INLINE_BYTES:
            self._post(to, _DATA + data)
        else:
            file = os.memfd_create("unidist-sample", os.MFD_CLOEXEC)
            try:
                _write(file, data)
                self._post(to, _FILE, file)
            finally:
                os.close(file)
        return COMPLETED

    def recv(self, buffer: Buffer, *, source: int) -> Work:
        """See `Communicator.recv`."""
        self.check_rank(source, "source")
        self._check()
        receipt = _Receipt(self, buffer, source)
        self._receipts[source].append(receipt)
        return receipt

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """See `Communicator.split`; of each two members the lower one makes the new socket pair."""
        self._check()
        if not ranks:
            return None
        for rank in ranks:
            self.check_rank(rank, "ranks")
        if self.rank not in ranks or len(set(ranks)) != len(ranks):
            raise UsageError(
                f"split({list(ranks)}) on rank {self.rank}: give each member once, this rank included, or ()"
            )
        digest = _HASH.pack(hash(tuple(ranks)))  # of integers: the same in every process
        higher = [rank for rank in ranks if rank > self.rank]
        near, far = _pairs(higher)
        peers = dict(zip(higher, near, strict=True))
        try:
            for rank, end in zip(higher, far, strict=True):
                self._post(rank, _SPLIT + digest, end.fileno())
            for rank in (rank for rank in ranks if rank < self.rank):
                self._pump_until(lambda rank=rank: bool(self._splits[rank]), rank, self.timeout)  # type: ignore[misc]
                theirs, peers[rank] = self._splits[rank].popleft()
                if theirs != _HASH.unpack(digest)[0]:
                    raise MismatchError(f"split: rank {self.rank} passed {list(ranks)}, rank {rank} another list")
        except BaseException:
            _close(peers.values())
            raise
        finally:
            _close(far)
        group = list(ranks)
        ends = {group.index(rank): end for rank, end in peers.items()}
        return SocketCommunicator(
            ends, group.index(self.rank), tuple(self.members[rank] for rank in ranks), self.timeout
        )

    def abort(self, reason: str) -> None:
        """See `Communicator.abort`: tell every peer, then hang up, which also wakes this process's own wait."""
        super().abort(reason)
        if self._failure is None:
            self._failure = PeerLostError(f"rank {self.rank} aborted: {reason}")
        self._hang_up(_ABORT + f"rank {self.rank} aborted: {reason}".encode()[:4096])

    def close(self) -> None:
        """See `Communicator.close`; what was sent before can still be received by the others."""
        super().close()
        if not self._closed:
            self._closed = True
            self._hang_up(_LEAVE)
            _close(self._peers.values())
            _close(end for queue in self._splits.values() for _, end in queue)

    # What waits call

    def pump(self, seconds: float, *, writable: int | None = None) -> bool:
        """Wait for packets (or for room to send to `writable`), and sort in what came. False: nothing in time."""
        poller = select.poll()
        number_of = {}
        for rank in self._open:
            number_of[self._peers[rank].fileno()] = rank
            poller.register(self._peers[rank], select.POLLIN | (select.POLLOUT if rank == writable else 0))
        ready = poller.poll(max(0.0, 1000 * seconds)) if number_of else []
        for descriptor, _ in ready:
            self._read(number_of[descriptor])
        return bool(ready)

    def deliver(self, source: int) -> None:
        """Give messages that came from `source` to the receipts that wait for them, oldest to oldest."""
        messages, receipts = self._messages[source], self._receipts[source]
        while messages and receipts:
            receipts.popleft().fill(messages.popleft())
        if receipts and self._failure is None and source in self._left:
            receipts.popleft().error = PeerLostError(f"rank {source} closed its communicator", ranks=(source,))

    @property
    def failure(self) -> UnidistError | None:
        """Why this communicator is of no more use."""
        return self._failure

    def fail(self, error: UnidistError) -> None:
        """Let every later operation raise `error`; the first one stays."""
        self._failure = self._failure or error

    # Inside

    def _check(self) -> None:
        if self._closed:
            raise UsageError(f"this communicator is closed ({self.description})")
        if self._failure is not None:
            raise self._failure

    def _post(self, to: int, packet: bytes, *descriptors: int) -> None:
        """Send one packet; while its socket is full, take in what others send, so that two full ones cannot block."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            self._check()
            if to in self._left:
                raise PeerLostError(f"rank {to} closed its communicator", ranks=(to,))
            try:
                socket.send_fds(self._peers[to], [packet], descriptors)
                return
            except BlockingIOError:
                if not self.pump(deadline - time.monotonic(), writable=to):
                    raise self._stalled(to, self.timeout) from None
            except OSError as exc:
                self.fail(PeerLostError(f"rank {self.rank} lost rank {to}: {exc}", ranks=(to,)))

    def _read(self, source: int) -> None:
        """Take every packet that `source` has sent so far."""
        while True:
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._peers[source], _INLINE_BYTES + 1, 1)
            except BlockingIOError:
                return
            except OSError:
                packet, descriptors = b"", []
            kind, rest = packet[:1], packet[1:]
            if kind == _DATA:
                self._messages[source].append(rest)
            elif kind == _FILE:
                with open(descriptors[0], "rb") as file:
                    self._messages[source].append(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0))
            elif kind == _SPLIT:
                self._splits[source].append((_HASH.unpack(rest)[0], socket.socket(fileno=descriptors[0])))
            elif kind == _LEAVE:
                self._left.add(source)
            elif kind == _ABORT:
                self.fail(PeerLostError(rest.decode(), ranks=(source,)))
            else:  # the other end is gone; without a word it died
                self._open.discard(source)
                if source not in self._left:
                    self.fail(PeerLostError(f"rank {source} died (seen on rank {self.rank})", ranks=(source,)))
                return

    def _pump_until(self, condition: object, source: int, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not condition():  # type: ignore[operator]
            self._check()
            if not self.pump(deadline - time.monotonic()):
                raise self._stalled(source, timeout)

    def _stalled(self, peer: int, timeout: timedelta) -> UnidistError:
        text = f"rank {self.rank} waited {timeout.total_seconds():g} s for rank {peer} ({self.description})"
        self.abort(text)
        return StalledError(text, ranks=(peer,))

    def _hang_up(self, last_words: bytes) -> None:
        for peer in self._peers.values():
            try:
                peer.send(last_words, socket.MSG_DONTWAIT)
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # closed, or gone before
