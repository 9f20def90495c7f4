"""Messages between one rank and its peers over sockets, one socket for each peer.

A short message travels in the socket, a long one as an anonymous file whose descriptor does, so a send
waits for its receiver only while about a hundred messages are under way. Whoever waits takes in the
messages of all peers, so two ranks that fill each other's sockets cannot block.

How a peer ends is told by its last packet: "left" (it closed its communicator), "aborted", or none (it died).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta

from unidist.buffer import Buffer
from unidist.communicator import Work
from unidist.errors import MismatchError, PeerLostError, StalledError, UnidistError, UsageError

_MESSAGE, _FILE, _SOCKET, _ABORTED, _LEFT = b"M", b"F", b"S", b"A", b"L"
_MAX_PACKET = 1024  # so small that many fit into a socket


class Mailbox:
    """The messages of one communicator. One thread at a time uses it, except for `abort`.

    Args:
        peers: a SOCK_SEQPACKET socket to each other rank; they belong to the mailbox.
        rank: this rank.
        timeout: longest wait for a peer.
    """

    def __init__(self, peers: Mapping[int, socket.socket], rank: int, timeout: timedelta) -> None:
        self.rank, self.timeout = rank, timeout
        self._peers = dict(peers)
        self._live = set(peers)  # from which more may come
        self._left: set[int] = set()
        self._messages: dict[int, deque[bytes]] = {source: deque() for source in (rank, *peers)}
        self._receipts: dict[int, deque[Receipt]] = {source: deque() for source in (rank, *peers)}
        self._sockets: dict[int, deque[tuple[bytes, socket.socket]]] = {source: deque() for source in peers}
        self._failure: PeerLostError | None = None
        self._closed = False
        for peer in self._peers.values():
            peer.setblocking(False)

    def send(self, to: int, data: memoryview) -> None:
        """Send a message; the data are copied."""
        self.check()
        if to == self.rank:
            self._messages[to].append(bytes(data))
            self._deliver(to)
        elif len(data) < _MAX_PACKET:
            self._post(to, _MESSAGE + data)
        else:
            with open(os.memfd_create("unidist-sample", os.MFD_CLOEXEC), "wb") as file:
                file.write(data)
                file.flush()
                self._post(to, _FILE, file.fileno())

    def receive(self, source: int, buffer: Buffer) -> Receipt:
        """Take the next message of `source` that no earlier receipt takes, as soon as it is there."""
        self.check()
        receipt = Receipt(self, source, buffer)
        self._receipts[source].append(receipt)
        self._deliver(source)
        return receipt

    def send_socket(self, to: int, note: bytes, end: socket.socket) -> None:
        """Hand one end of a new socket pair to a peer, with a note."""
        self._post(to, _SOCKET + note, end.fileno())

    def receive_socket(self, source: int) -> tuple[bytes, socket.socket]:
        """Wait for the next socket from `source`; returns its note too."""
        arrived = self._sockets[source]
        self.wait(lambda: bool(arrived), source, self.timeout)
        return arrived.popleft()

    def wait(self, condition: Callable[[], bool], source: int, timeout: timedelta) -> None:
        """Take in packets until `condition` holds, which depends on `source`; the time running out aborts."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not condition():
            self.check()
            if source in self._left:
                raise PeerLostError(
                    f"rank {source} closed its communicator (seen on rank {self.rank})", ranks=(source,)
                )
            if not self.pump(deadline - time.monotonic()):
                text = f"rank {self.rank} got nothing from rank {source} within {timeout.total_seconds():g} s"
                self.abort(text)
                raise StalledError(text, ranks=(source,))

    def pump(self, seconds: float, *, writable: int | None = None) -> bool:
        """Wait for packets, or for room to send to `writable`, and sort in what came; False if nothing did in time."""
        ranks = {self._peers[rank].fileno(): rank for rank in self._live}
        poller = select.poll()
        for descriptor, rank in ranks.items():
            poller.register(descriptor, select.POLLIN | (select.POLLOUT if rank == writable else 0))
        ready = poller.poll(max(0.0, 1000 * seconds))
        for descriptor, events in ready:
            if events & ~select.POLLOUT:
                self._read(ranks[descriptor])
        return bool(ready)

    def check(self) -> None:
        """Raise unless operations are possible."""
        if self._closed:
            raise UsageError(f"rank {self.rank} uses its communicator after close()")
        if self._failure is not None:
            raise self._failure

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks whose loss made this mailbox useless."""
        return () if self._failure is None else self._failure.ranks

    def abort(self, reason: str, *, lost: tuple[int, ...] = ()) -> None:
        """Tell every peer and hang up, which also ends a wait in another thread of this process.

        A mailbox that has failed before passes the first cause on: the others shall hear of it, not of the messenger.

        Args:
            reason: for the peers' message.
            lost: the ranks that are the cause, if it is not this one.
        """
        self._fail(PeerLostError(f"rank {self.rank} aborted: {reason}", ranks=lost))
        culprit = (*self.lost, self.rank)[0]
        self._hang_up(_ABORTED + bytes([culprit]) + str(self._failure).encode()[: _MAX_PACKET - 2])

    def close(self) -> None:
        """Tell every peer that nothing more will come, and close the sockets. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._hang_up(_LEFT)
        for end in (*self._peers.values(), *(end for queue in self._sockets.values() for _, end in queue)):
            end.close()

    def _post(self, to: int, packet: bytes, *descriptors: int) -> None:
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            self.check()
            try:
                socket.send_fds(self._peers[to], [packet], descriptors)
                return
            except BlockingIOError:
                room = self.pump(deadline - time.monotonic(), writable=to)
            except OSError:  # hung up: its last packet says why
                room = True
                self._read(to)
            if to in self._left:
                raise PeerLostError(f"rank {to} closed its communicator (seen on rank {self.rank})", ranks=(to,))
            if not room:
                text = f"rank {self.rank} could send nothing to rank {to} within {self.timeout.total_seconds():g} s"
                self.abort(text)
                raise StalledError(text, ranks=(to,))

    def _read(self, source: int) -> None:
        """Take every packet that `source` has sent so far."""
        while source in self._live:
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._peers[source], _MAX_PACKET, 1)
                if not packet:  # a last packet may come between the kernel's look into the queue and its "ended"
                    packet, descriptors, _, _ = socket.recv_fds(self._peers[source], _MAX_PACKET, 1)
            except BlockingIOError:
                break
            except ConnectionResetError:  # reported once, before the packets that are still there
                continue
            except OSError:
                packet, descriptors = b"", []
            kind, rest = packet[:1], packet[1:]
            if kind == _MESSAGE:
                self._messages[source].append(rest)
            elif kind == _FILE:
                with open(descriptors[0], "rb") as file:
                    file.seek(0)
                    self._messages[source].append(file.read())
            elif kind == _SOCKET:
                self._sockets[source].append((rest, socket.socket(fileno=descriptors[0])))
            elif kind == _ABORTED:
                self._fail(PeerLostError(rest[1:].decode(errors="replace"), ranks=(rest[0],)))
            elif kind == _LEFT:
                self._left.add(source)
            else:
                self._live.discard(source)
                if source not in self._left:
                    self._fail(PeerLostError(f"rank {source} died (seen on rank {self.rank})", ranks=(source,)))
        self._deliver(source)

    def _deliver(self, source: int) -> None:
        messages, receipts = self._messages[source], self._receipts[source]
        while messages and receipts:
            receipts.popleft().fill(messages.popleft())

    def _fail(self, error: PeerLostError) -> None:
        self._failure = self._failure or error

    def _hang_up(self, last_packet: bytes) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # full, or gone
                peer.send(last_packet)
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)


class Receipt(Work):
    """A receive under way."""

    def __init__(self, mailbox: Mailbox, source: int, buffer: Buffer) -> None:
        self._mailbox, self._source, self._buffer = mailbox, source, buffer
        self._error: MismatchError | None = None
        self._filled = False

    def fill(self, message: bytes) -> None:
        """Put the message into the buffer."""
        self._filled = True
        if len(message) == self._buffer.nbytes:
            self._buffer.bytes()[:] = message
            return
        self._error = MismatchError(
            f"rank {self._mailbox.rank} receives {self._buffer.nbytes} bytes from rank {self._source}, "
            f"which sent {len(message)}; make both sizes equal"
        )

    def wait(self, timeout: timedelta | None = None) -> None:
        """See `Work.wait`."""
        self._mailbox.wait(lambda: self._filled, self._source, self._mailbox.timeout if timeout is None else timeout)
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """See `Work.done`."""
        try:
            self._mailbox.check()
        except UnidistError:
            return True
        self._mailbox.pump(0)
        return self._filled
