"""The links of an agent to the agents of the other hosts: beats that tell whether two hosts reach each other.

The ranks of two hosts exchange data directly. Where that link is broken, each rank only sees a peer that says nothing,
and the launcher, which both reach, sees nothing at all. So each agent keeps a connection to every other one, sends
beats on it, and tells the launcher of those that do not answer. No threads: the agent forks.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from unidist.control.codec import WireError
from unidist.control.connection import Address, Connection, ConnectionLost
from unidist.control.coordinator import BEATS_PER_LIMIT
from unidist.control.messages import Beat
from unidist.control.standstill import Standstill

_LOOK_SEC = 0.05
_RETRY_SEC = 0.2
_HANDSHAKE_SEC = 5.0
_MAX_STRANGERS = 64
"""Connections of others that have not proved anything yet; one more, and the oldest is closed."""


@dataclass(eq=False)
class _Peer:
    """Another agent, and the connection to it.

    Args:
        address: where it listens.
        heard: when it or its host answered last; at first, when it became a peer.
        connecting: a connection under way.
        connection: the one that is there.
        connected_at: since when.
        is_refused: the last one ended before both ends had proved the secret.
        retry_at: when to connect again.
        beat_at: when to send the next beat.
        told: what the launcher knows: it is reached, or not, or nothing yet.
    """

    address: Address
    heard: float
    connecting: socket.socket | None = None
    connection: Connection | None = None
    connected_at: float = 0.0
    is_refused: bool = False
    retry_at: float = 0.0
    beat_at: float = 0.0
    told: bool | None = None


class PeerLinks:
    """The links of one agent.

    Args:
        secret: the job's secret.
        heartbeat_sec: a peer whose host does not answer for longer is not reached.
        selector: of the agent's loop; a key's data is called when it is ready.
        tell: called with a peer's index, whether it is reached, and for how long it was silent, when that changes.
    """

    def __init__(
        self,
        secret: bytes,
        heartbeat_sec: float,
        selector: selectors.BaseSelector,
        tell: Callable[[int, bool, float], None],
    ) -> None:
        self._secret = secret
        self._heartbeat_sec = heartbeat_sec
        self._beat_sec = heartbeat_sec / BEATS_PER_LIMIT
        self._selector = selector
        self._tell = tell
        self._listener: socket.socket | None = None
        self._accepted: dict[Connection, float] = {}
        self._peers: dict[int, _Peer] = {}
        self._look_at = 0.0
        self._standstill = Standstill()

    def listen(self, address: str) -> int:
        """Listen at an address of this host, instead of at the one before; returns the port.

        Raises:
            OSError: it cannot be listened at.
        """
        self._stop_listening()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=_MAX_STRANGERS)
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        port: int = listener.getsockname()[1]
        return port

    def connect(self, peers: Mapping[int, Address]) -> None:
        """Keep links to these agents, by index, and to no others."""
        now = time.monotonic()
        for index, peer in list(self._peers.items()):
            if peers.get(index) != peer.address:
                self._disconnect(peer)
                del self._peers[index]
        for index, address in peers.items():
            known = self._peers.setdefault(index, _Peer(address, heard=now))
            known.told = None  # to be told again: the launcher may be another one
        self._look_at = now

    def turn(self) -> None:
        """Connect, send beats, and tell of what has changed; several times per beat. Costs nothing in between."""
        now = time.monotonic()
        if seconds := self._standstill.turn(now):
            for peer in self._peers.values():
                peer.heard = min(now, peer.heard + seconds)
        if now < self._look_at:
            return
        self._look_at = now + min(_LOOK_SEC, self._beat_sec / 2)
        for index, peer in list(self._peers.items()):
            if peer.connection is None and peer.connecting is None and now >= peer.retry_at:
                self._begin(peer, now)
            connection = peer.connection
            if self._is_acknowledged(peer, now):  # before the next beat, which nobody can have answered
                peer.heard = now
            if connection is not None and connection.is_open and now >= peer.beat_at:
                peer.beat_at = now + self._beat_sec
                self._send(connection, partial(self._disconnect, peer))
            silent = now - peer.heard
            if silent > self._heartbeat_sec and peer.told is not False:
                peer.told = False
                self._tell(index, False, silent)
                self._disconnect(peer)  # a new connection is quicker than one that repeats what was lost
        for stranger, since in list(self._accepted.items()):
            if not stranger.is_open and now - since > _HANDSHAKE_SEC:
                self._forget(stranger)

    def _is_acknowledged(self, peer: _Peer, now: float) -> bool:
        """Return whether nothing that was sent to a peer waits for its host.

        Where more is to be done than there are cores, an agent may not run for a second, this one or the peer: that is
        no broken link. A peer that is gone, the launcher notices.
        """
        connection = peer.connection
        if connection is None:
            return False
        if not connection.is_open:
            return not peer.is_refused and now - peer.connected_at < _HANDSHAKE_SEC
        return connection.is_acknowledged

    def close(self) -> None:
        """Close everything. Idempotent."""
        self.connect({})
        self._stop_listening()

    # Links to the others

    def _begin(self, peer: _Peer, now: float) -> None:
        peer.retry_at = now + max(_RETRY_SEC, self._beat_sec)
        sock = socket.socket(socket.AF_INET6 if ":" in peer.address[0] else socket.AF_INET)
        sock.setblocking(False)
        if sock.connect_ex(peer.address) not in (0, errno.EINPROGRESS):
            sock.close()
            return
        peer.connecting = sock
        self._selector.register(sock, selectors.EVENT_WRITE, partial(self._connected, peer))

    def _connected(self, peer: _Peer) -> None:
        sock, peer.connecting = peer.connecting, None
        if sock is None:  # what came before in this turn had it closed
            return
        self._selector.unregister(sock)
        try:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise ConnectionLost("it does not listen")
            connection = Connection(sock, self._secret, is_server=False)
            connection.flush()
        except (ConnectionLost, OSError):
            sock.close()
            return
        peer.connection, peer.connected_at = connection, time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ, partial(self._hear, peer))

    def _hear(self, peer: _Peer) -> None:
        connection = peer.connection
        if connection is None:
            return
        was_open = connection.is_open
        try:
            messages = connection.receive()
        except (ConnectionLost, WireError):
            peer.is_refused = not connection.is_open
            self._disconnect(peer)
            return
        is_proved = connection.is_open and not was_open  # as good as an answer to a beat
        if messages or is_proved:
            peer.heard = time.monotonic()
            if is_proved:
                peer.beat_at = peer.heard + self._beat_sec
            if peer.told is not True:
                peer.told = True
                self._tell(next(index for index, each in self._peers.items() if each is peer), True, 0.0)

    def _disconnect(self, peer: _Peer) -> None:
        for sock in (peer.connecting, peer.connection):
            if sock is not None:
                self._selector.unregister(sock)
                sock.close()
        peer.connecting = peer.connection = None

    # Links of the others to this one

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        try:
            connection = Connection(sock, self._secret, is_server=True)
        except OSError:
            sock.close()
            return
        strangers = [each for each in self._accepted if not each.is_open]
        if len(strangers) >= _MAX_STRANGERS:
            self._forget(strangers[0])
        self._accepted[connection] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ, partial(self._answer, connection))

    def _answer(self, connection: Connection) -> None:
        if connection not in self._accepted:
            return
        try:
            messages = connection.receive()
        except (ConnectionLost, WireError):
            self._forget(connection)
            return
        for _ in messages:
            self._send(connection, partial(self._forget, connection))

    def _forget(self, connection: Connection) -> None:
        if self._accepted.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()

    def _stop_listening(self) -> None:
        for connection in list(self._accepted):
            self._forget(connection)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _send(self, connection: Connection, give_up: Callable[[], None]) -> None:
        with contextlib.suppress(ConnectionLost):
            connection.send(Beat())
            return
        give_up()


__all__ = ["PeerLinks"]
