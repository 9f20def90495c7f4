"""Connections between the ranks of a host, beside Horovod's: messages, aborts, arrivals, and who has died.

Horovod has no send and receive, tells nobody why it gave up, and does not name who is missing. So each pair of ranks
has a Unix socket as well. No thread is needed for them: a rank that waits drives them.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Protocol

from unidist.buffer import Buffer
from unidist.errors import StalledError
from unidist.rendezvous import Rendezvous

_HEADER = struct.Struct("!BHQ")  # kind, bytes of the channel's name, value
_HELLO = struct.Struct("!I")  # rank
_TOKEN_BYTES = 16
_PART_BYTES = 64 << 10
_PACKET_BYTES = _PART_BYTES + 4096
_MAX_UNCLAIMED_BYTES = 64 << 20


class PacketKind(IntEnum):
    """The kinds of packets: a message's beginning (value: its size), a further part of it, or a notice."""

    MESSAGE = 0
    PART = 1
    ABORT = 2
    ARRIVED = 3
    ACTIVE = 4
    BYE = 5


class Receiver(Protocol):
    """Takes the packets of one channel. Called with the links' lock held."""

    def begin(self, peer: int, nbytes: int) -> Incoming:
        """Return the destination of a message that begins now."""

    def notice(self, peer: int, kind: PacketKind, value: int, payload: bytes) -> None:
        """Take a packet that is no message."""

    def unclaimed(self, peer: int) -> int:
        """Return how many bytes of `peer` nobody has asked for, or 0 if somebody waits for a message of it."""


class Incoming:
    """A message on its way in.

    Args:
        view: `(nbytes,)` bytes to fill.
        completed: called when all have come.
    """

    def __init__(self, view: memoryview, completed: Callable[[], None]) -> None:
        self.view = view
        self.completed = completed
        self.num_filled = 0

    def take(self, payload: memoryview) -> bool:
        """Fill in the next bytes; returns whether these were the last."""
        self.view[self.num_filled : self.num_filled + len(payload)] = payload
        self.num_filled += len(payload)
        if self.num_filled == len(self.view):
            self.completed()
            return True
        return False


@dataclass
class Outgoing:
    """A message on its way out; `buffer` is kept until `sent` is True."""

    channel: bytes
    buffer: Buffer
    view: memoryview
    num_sent: int = -1
    sent: bool = False


@dataclass
class _Peer:
    rank: int
    connection: socket.socket
    notices: deque[bytes] = field(default_factory=deque)
    messages: deque[Outgoing] = field(default_factory=deque)
    incoming: Incoming | None = None
    incoming_channel: str = ""
    interest: int = select.EPOLLIN
    said_bye: bool = False


class Links:
    """The connections of this rank. Thread-safe. Collective: every rank of the job makes one.

    Args:
        rank: of this process in the world.
        size: number of ranks.
        rendezvous: to exchange addresses.
        timeout: longest wait for the other ranks.

    Attributes:
        name: random, equal on all ranks, and different for every set of connections.
        died: ranks whose connection ended without a word.
        left: ranks that said that they close theirs.
    """

    def __init__(self, rank: int, size: int, rendezvous: Rendezvous, *, timeout: timedelta) -> None:
        self.rank = rank
        self.name = ""
        self.died: set[int] = set()
        self.left: set[int] = set()
        self._peers: dict[int, _Peer] = {}
        self._by_fd: dict[int, _Peer] = {}
        self._receivers: dict[str, Receiver] = {}
        self._early: dict[str, list[tuple[int, PacketKind, int, bytes]]] = {}
        self._ended: set[str] = set()
        self._said_bye = False
        self._lock = threading.RLock()
        self._scratch = bytearray(_PACKET_BYTES)
        self._epoll = select.epoll()
        try:
            self._connect(size, rendezvous, timeout)
        except BaseException:
            self.close()
            raise
        _all_links.add(self)

    @property
    def gone(self) -> set[int]:
        """The ranks that have died or left."""
        return self.died | self.left if self.died or self.left else self.died

    # Channels

    def open(self, name: str, receiver: Receiver) -> None:
        """Give the packets of channel `name` to `receiver`, earlier ones included."""
        with self._lock:
            self._receivers[name] = receiver
            for peer, kind, value, payload in self._early.pop(name, ()):
                if kind is PacketKind.MESSAGE:
                    receiver.begin(peer, value).take(memoryview(payload))
                else:
                    receiver.notice(peer, kind, value, payload)

    def shut(self, name: str) -> None:
        """Drop packets that arrive, or wait to be sent, on a channel from now on."""
        with self._lock:
            self._receivers.pop(name, None)
            self._ended.add(name)

    def send(self, peer: int, channel: str, buffer: Buffer) -> Outgoing:
        """Send a message; the memory belongs to the links until `sent`."""
        message = Outgoing(channel.encode(), buffer, buffer.bytes())
        with self._lock:
            if peer not in self.gone:
                self._peers[peer].messages.append(message)
                self._flush(self._peers[peer])
        return message

    def notify(self, peer: int, channel: str, kind: PacketKind, value: int = 0, payload: bytes = b"") -> None:
        """Send a notice, ahead of messages that wait. From any thread; never blocks."""
        with self._lock:
            if peer in self._peers and peer not in self.gone:
                self._peers[peer].notices.append(_packet(kind, channel.encode(), value) + payload[:4000])
                self._flush(self._peers[peer])

    def drive(self, seconds: float = 0.0) -> None:
        """Move what can be moved; wait up to `seconds` (in steps of a millisecond) for something to do."""
        try:
            events = self._epoll.poll(seconds)
        except ValueError:  # closed by another thread
            return
        if not events:
            return
        with self._lock:
            for descriptor, mask in events:
                peer = self._by_fd.get(descriptor)
                if peer is not None and mask & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                    self._receive(peer)
                if peer is not None and mask & select.EPOLLOUT and peer.rank not in self.gone:
                    self._flush(peer)

    def claimed(self, peer: int) -> None:
        """Check again whether to read from `peer`, of which a message was asked for."""
        with self._lock:
            if peer in self._peers and peer not in self.gone:
                self._watch(self._peers[peer])

    def leave(self, limit: timedelta) -> None:
        """Say good-bye, and wait until all others have said it, or died; `limit` at most."""
        deadline = time.monotonic() + limit.total_seconds()
        with self._lock:
            self._say_bye()
        while len(self.gone) < len(self._peers) and time.monotonic() < deadline:
            self.drive(0.005)

    def close(self) -> None:
        """Say good-bye and close all connections. Idempotent."""
        with self._lock:
            self._say_bye()
            for peer in self._peers.values():
                peer.connection.close()
            self._by_fd.clear()
            self._epoll.close()

    def _say_bye(self) -> None:
        for peer in () if self._said_bye else self._by_fd.values():
            with contextlib.suppress(OSError):
                peer.connection.send(_packet(PacketKind.BYE, b"", 0))
        self._said_bye = True

    # Connecting

    def _connect(self, size: int, rendezvous: Rendezvous, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        name, token = secrets.token_hex(16), secrets.token_bytes(_TOKEN_BYTES)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0unidist/horovod/{name}")
            listener.listen(size)
            # The rendezvous has checked who the others are; a peer that knows the token is one of them.
            replies = rendezvous.allgather(token + name.encode(), timeout=timeout)
            self.name = replies[0].payload[_TOKEN_BYTES:].decode()[:8]
            for other, reply in enumerate(replies[: self.rank]):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._peers[other] = _Peer(other, connection)
                connection.connect(f"\0unidist/horovod/{reply.payload[_TOKEN_BYTES:].decode()}")
                connection.send(reply.payload[:_TOKEN_BYTES] + _HELLO.pack(self.rank))
            while len(self._peers) < size - 1:
                self._accept(listener, token, size, deadline)
        for peer in self._peers.values():
            peer.connection.setblocking(False)
            self._by_fd[peer.connection.fileno()] = peer
            self._epoll.register(peer.connection, peer.interest)

    def _accept(self, listener: socket.socket, token: bytes, size: int, deadline: float) -> None:
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            hello = connection.recv(_TOKEN_BYTES + _HELLO.size)
        except TimeoutError:
            missing = sorted(set(range(size)) - set(self._peers) - {self.rank})
            raise StalledError(
                f"init: ranks {missing} did not connect to rank {self.rank} in time", ranks=missing
            ) from None
        if len(hello) == _TOKEN_BYTES + _HELLO.size and hmac.compare_digest(hello[:_TOKEN_BYTES], token):
            (rank,) = _HELLO.unpack(hello[_TOKEN_BYTES:])
            self._peers[rank] = _Peer(rank, connection)
        else:
            connection.close()

    # Moving packets; the lock is held.

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.notices:
                peer.connection.send(peer.notices[0])
                peer.notices.popleft()
            while peer.messages:
                if self._send_part(peer.connection, peer.messages[0]):
                    peer.messages.popleft()
        except BlockingIOError:
            pass
        except OSError:
            # The peer is gone. What it sent before is read first; the end of that tells of its loss.
            peer.notices.clear()
            peer.messages.clear()
        self._watch(peer)

    def _send_part(self, connection: socket.socket, message: Outgoing) -> bool:
        """Send the next part of a message; returns whether it was the last."""
        begins = message.num_sent < 0
        start = max(0, message.num_sent)
        part = message.view[start : start + _PART_BYTES]
        kind, name, value = (
            (PacketKind.MESSAGE, message.channel, len(message.view)) if begins else (PacketKind.PART, b"", 0)
        )
        connection.sendmsg([_packet(kind, name, value), part])
        message.num_sent = start + len(part)
        message.sent = message.num_sent == len(message.view)
        return message.sent

    def _receive(self, peer: _Peer) -> None:
        scratch = memoryview(self._scratch)
        while peer.rank not in self.gone and peer.interest & select.EPOLLIN:
            try:
                count = peer.connection.recv_into(scratch)
                if not count:  # a last packet may come between the kernel's look into the queue and its "ended"
                    count = peer.connection.recv_into(scratch)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it closed with something of ours unread; what it had said before comes after this error
            except OSError:
                count = 0
            if not count:
                self._lose(peer)
                return
            kind, length, value = _HEADER.unpack_from(scratch)
            body = scratch[_HEADER.size : count]
            self._take(peer, PacketKind(kind), str(body[:length], "ascii"), value, body[length:])
            self._watch(peer)

    def _take(self, peer: _Peer, kind: PacketKind, name: str, value: int, payload: memoryview) -> None:
        if kind is PacketKind.BYE:
            peer.said_bye = True
            self._lose(peer)  # it says nothing more, but may keep the connection for a while
            return
        if kind is PacketKind.PART:
            assert peer.incoming is not None
            if peer.incoming.take(payload):
                peer.incoming = None
            return
        receiver = self._receivers.get(name)
        if kind is not PacketKind.MESSAGE:
            if receiver is not None:
                receiver.notice(peer.rank, kind, value, bytes(payload))
            elif name not in self._ended:
                self._early.setdefault(name, []).append((peer.rank, kind, value, bytes(payload)))
            return
        if receiver is not None:
            incoming = receiver.begin(peer.rank, value)
        else:  # a split that this rank has yet to make, or has closed
            data = bytearray(value)
            incoming = Incoming(memoryview(data), lambda: self._keep_early(name, peer.rank, data))
        peer.incoming_channel = name
        peer.incoming = None if incoming.take(payload) else incoming

    def _keep_early(self, name: str, peer: int, data: bytearray) -> None:
        receiver = self._receivers.get(name)  # it may have been opened while the message came
        if receiver is not None:
            receiver.begin(peer, len(data)).take(memoryview(data))
        elif name not in self._ended:
            self._early.setdefault(name, []).append((peer, PacketKind.MESSAGE, len(data), bytes(data)))

    def _lose(self, peer: _Peer) -> None:
        (self.left if peer.said_bye else self.died).add(peer.rank)
        self._epoll.unregister(peer.connection)

    def _watch(self, peer: _Peer) -> None:
        """Register for the events of interest. A peer that sends messages nobody asks for is not read for a while."""
        if peer.rank in self.gone:
            return
        unclaimed = sum(each.unclaimed(peer.rank) for each in self._receivers.values()) if peer.incoming is None else 0
        interest = select.EPOLLIN if unclaimed < _MAX_UNCLAIMED_BYTES else 0
        if peer.notices or peer.messages:
            interest |= select.EPOLLOUT
        if interest != peer.interest:
            peer.interest = interest
            with contextlib.suppress(OSError):  # lost, or closed by another thread
                self._epoll.modify(peer.connection, interest)


def _packet(kind: PacketKind, name: bytes, value: int) -> bytes:
    return _HEADER.pack(kind, len(name), value) + name


_all_links: weakref.WeakSet[Links] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked child: while it held them, its parent's death would go unnoticed."""
    for links in list(_all_links):
        links._epoll.close()
        for peer in links._peers.values():
            with contextlib.suppress(OSError):
                os.close(peer.connection.detach())


os.register_at_fork(after_in_child=_close_in_child)
