"""Connects every two ranks of a job, and lets in nobody else.

Each rank listens at its address in the job while they connect, and connects to the ranks below it. Strangers get a line
in the log; those that say nothing are turned away after `_STRANGER_SEC`.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from unidist.communicator import format_ranks
from unidist.errors import PeerLostError, StalledError
from unidist_tcp.handshake import Acceptor, Connector, HandshakeError, Session

if TYPE_CHECKING:
    from unidist_tcp._tcp import Tls

_log = logging.getLogger("unidist.engine")

_STRANGER_SEC = 5.0
_MAX_STRANGERS = 256
"""Connections that have not proved the secret yet, at one time; of more, the oldest go."""

_TLS_EVENTS = (0, selectors.EVENT_READ, selectors.EVENT_WRITE)
"""What a handshake of TLS waits for, by what the C code returns; 0: nothing, it is over."""

_SHORT_PATH_USEC = 500
_TCP_INFO_BYTES, _RTT_OFFSET = 104, 68  # struct tcp_info of linux/tcp.h

Address = tuple[str, int]
"""IP address and port."""


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of an address of this host, and nowhere else."""
    family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(place)
        listener.listen(4096)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


class Lane(NamedTuple):
    """A connection that is made: its descriptor, and what encrypts it."""

    descriptor: int
    tls: Tls | None


@dataclass
class _Outgoing:
    """A connection to a rank below this one."""

    socket: socket.socket
    handshake: Connector
    peer: int
    lane: int
    is_connected: bool = False
    tls: Tls | None = None


@dataclass
class _Incoming:
    """A connection that was accepted."""

    socket: socket.socket
    handshake: Acceptor
    name: str
    since: float = field(default_factory=time.monotonic)
    tls: Tls | None = None


class ConnectionSetup:
    """The making of all connections of one rank. Use `connect_all`."""

    def __init__(
        self, rank: int, addresses: Sequence[Address], session: Session, listener: socket.socket, timeout: timedelta
    ) -> None:
        self._rank = rank
        self._addresses = addresses
        self._session = session
        self._listener = listener
        self._timeout = timeout
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[int, _Incoming] = {}
        self._made: dict[tuple[int, int], tuple[socket.socket, Tls | None]] = {}
        self._wanted = {
            (peer, lane) for peer in range(session.size) if peer != rank for lane in range(session.num_lanes)
        }

    def run(self) -> dict[tuple[int, int], tuple[socket.socket, Tls | None]]:
        """Return the connections by rank and lane, each with what encrypts it."""
        with ExitStack() as stack:
            stack.callback(self._close_all)
            self._selector.register(self._listener, selectors.EVENT_READ, None)
            for peer in range(self._rank):
                for lane in range(self._session.num_lanes):
                    self._begin(peer, lane)
            deadline = time.monotonic() + self._timeout.total_seconds()
            while not self._is_complete():
                now = time.monotonic()
                if now >= deadline:
                    raise self._stalled()
                for key, _ in self._selector.select(min(0.5, deadline - now)):
                    if key.data is None:
                        self._accept()
                    elif isinstance(key.data, _Outgoing):
                        self._go_on(key.data)
                    elif isinstance(key.data, _Incoming):
                        self._hear(key.data)
                    else:
                        self._watch(key.data)
                self._turn_away_silent(time.monotonic())
            made, self._made = self._made, {}
            return made

    def _is_complete(self) -> bool:
        return len(self._made) == len(self._wanted)

    def _begin(self, peer: int, lane: int) -> None:
        host, port = self._addresses[peer]
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        outgoing = _Outgoing(sock, Connector(self._session, self._rank, peer, lane), peer, lane)
        self._selector.register(sock, selectors.EVENT_WRITE, outgoing)
        code = sock.connect_ex(place)
        if code not in (0, errno.EINPROGRESS):
            raise self._lost(peer, OSError(code, errno.errorcode.get(code, str(code))))

    def _go_on(self, outgoing: _Outgoing) -> None:
        sock = outgoing.socket
        try:
            if not outgoing.is_connected:
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, errno.errorcode.get(code, str(code)))
                outgoing.is_connected = True
                self._selector.modify(sock, selectors.EVENT_READ, outgoing)
            events = self._advance(outgoing)
            if events:
                self._selector.modify(sock, events, outgoing)
        except OSError as exc:
            raise self._lost(outgoing.peer, exc) from exc
        except HandshakeError as exc:
            raise PeerLostError(
                f"tcp: rank {self._rank} cannot connect to rank {outgoing.peer} at "
                f"{_place(self._addresses[outgoing.peer])}: {exc}",
                ranks=(outgoing.peer,),
            ) from exc
        if not events:
            self._keep(sock, outgoing.peer, outgoing.lane, outgoing.tls)

    def _advance(self, connection: _Outgoing | _Incoming) -> int:
        """Do what is possible of a handshake; return the events that it waits for, 0 when it is over."""
        sock, handshake = connection.socket, connection.handshake
        if connection.tls is None:
            _exchange(sock, handshake)
            if handshake.output or handshake.wanted_bytes:
                return selectors.EVENT_READ | (selectors.EVENT_WRITE if handshake.output else 0)
            if not self._session.is_encrypted:
                return 0
            from unidist_tcp._tcp import Tls

            is_server = isinstance(handshake, Acceptor)
            connection.tls = Tls(descriptor=sock.fileno(), is_server=is_server, key=handshake.key)
        return _TLS_EVENTS[connection.tls.handshake()]

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:  # it was gone before it was accepted, or there are too many open files
                _log.warning("tcp: rank %d could not accept a connection: %s", self._rank, exc)
                return
            sock.setblocking(False)
            incoming = _Incoming(sock, Acceptor(self._session, self._rank), _place(address))
            self._strangers[sock.fileno()] = incoming
            self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, incoming)
            if len(self._strangers) > _MAX_STRANGERS:
                oldest = min(self._strangers.values(), key=lambda each: each.since)
                self._turn_away(oldest, "there are too many that have not proved the job's secret")

    def _hear(self, incoming: _Incoming) -> None:
        sock, handshake = incoming.socket, incoming.handshake
        if sock.fileno() < 0:  # turned away while this was on its way
            return
        try:
            events = self._advance(incoming)
            if events:
                self._selector.modify(sock, events, incoming)
        except (OSError, HandshakeError) as exc:
            self._turn_away(incoming, str(exc))
            return
        if events or handshake.peer is None:
            return
        if handshake.peer in self._made:
            self._turn_away(incoming, f"rank {handshake.peer[0]} has connected already")
            return
        self._strangers.pop(sock.fileno(), None)
        self._keep(sock, *handshake.peer, incoming.tls)

    def _keep(self, sock: socket.socket, peer: int, lane: int, tls: Tls | None) -> None:
        self._made[peer, lane] = sock, tls
        self._selector.modify(sock, selectors.EVENT_READ, (peer, lane))

    def _watch(self, place: tuple[int, int]) -> None:
        """See a rank that dies while others still connect."""
        sock, _ = self._made[place]
        try:
            has_ended = not sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError as exc:
            raise self._lost(place[0], exc) from exc
        if has_ended:
            raise self._lost(place[0], OSError(errno.ECONNRESET, "it closed the connection"))
        self._selector.unregister(sock)  # it has begun to work; the C code reads that

    def _turn_away_silent(self, now: float) -> None:
        for incoming in [each for each in self._strangers.values() if now - each.since > _STRANGER_SEC]:
            self._turn_away(incoming, f"it did not prove the job's secret within {_STRANGER_SEC:g} s")

    def _turn_away(self, incoming: _Incoming, why: str) -> None:
        _log.warning("tcp: rank %d turned a connection from %s away: %s", self._rank, incoming.name, why)
        self._strangers.pop(incoming.socket.fileno(), None)
        self._selector.unregister(incoming.socket)
        incoming.socket.close()

    def _stalled(self) -> StalledError:
        missing = sorted({peer for peer, _ in self._wanted - self._made.keys()})
        listed = ", ".join(f"rank {peer} at {_place(self._addresses[peer])}" for peer in missing)
        return StalledError(
            f"tcp: rank {self._rank} is not connected to rank(s) {format_ranks(missing)} after "
            f"{self._timeout.total_seconds():g} s ({listed}). Can the hosts reach each other by TCP at these "
            "addresses, on any port? --network-interface chooses others.",
            ranks=missing,
        )

    def _lost(self, peer: int, error: OSError) -> PeerLostError:
        return PeerLostError(
            f"tcp: rank {self._rank} cannot connect to rank {peer} at {_place(self._addresses[peer])}: "
            f"{error.strerror or error}. Did it die? Can the hosts reach each other by TCP, on any port?",
            ranks=(peer,),
        )

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None and not isinstance(key.data, tuple):
                with suppress(OSError):
                    key.fileobj.close()  # type: ignore[union-attr]  # sockets are what was registered
        for sock, _ in self._made.values():
            sock.close()
        self._selector.close()


def connect_all(
    rank: int, addresses: Sequence[Address], session: Session, listener: socket.socket, *, timeout: timedelta
) -> tuple[tuple[Lane, ...], ...]:
    """Return this rank's connections, by rank, which the caller owns. Collective.

    Args:
        rank: of this process.
        addresses: where each rank listens.
        session: of this job.
        listener: of this rank, from `listen`; closed afterwards.
        timeout: longest wait for all connections.

    Raises:
        StalledError: some ranks cannot be reached; names them.
        PeerLostError: a rank died meanwhile, or something else listens at its address.
    """
    try:
        made = ConnectionSetup(rank, addresses, session, listener, timeout).run()
    finally:
        listener.close()
    return tuple(
        tuple(_lane(*made[peer, lane]) for lane in range(session.num_lanes)) if peer != rank else ()
        for peer in range(session.size)
    )


def _lane(sock: socket.socket, tls: Tls | None) -> Lane:
    return Lane(sock.detach(), tls)


def tune(descriptor: int, heartbeat: timedelta) -> None:
    """Set the options of a connection that is made.

    The kernel asks the other end of an idle connection whether it is there, and ends it if no answer comes. And BBR,
    where it is the system's choice, makes way for Reno on short paths: it paces what it sends, which takes a third of
    the speed where there is hardly a queue to keep short.
    """
    seconds = max(1, int(heartbeat.total_seconds()))
    sock = socket.socket(fileno=descriptor)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, seconds + 1)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        control = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
        if control.startswith(b"bbr") and _round_trip_usec(sock) <= _SHORT_PATH_USEC:
            with suppress(OSError):  # it is allowed to everybody, but this is no reason to fail
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    finally:
        sock.detach()


def _round_trip_usec(sock: socket.socket) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int(struct.unpack_from("=I", info, _RTT_OFFSET)[0])


def _exchange(sock: socket.socket, handshake: Acceptor | Connector) -> None:
    """Move bytes of a handshake as far as they go."""
    while True:
        with suppress(BlockingIOError):
            while handshake.output:
                del handshake.output[: sock.send(handshake.output)]
        if not handshake.wanted_bytes:
            return
        try:
            data = sock.recv(handshake.wanted_bytes)
        except BlockingIOError:
            return
        if not data:
            raise OSError(errno.ECONNRESET, "it closed the connection")
        handshake.receive(data)


def _place(address: Sequence[object]) -> str:
    host, port = str(address[0]).removeprefix("::ffff:"), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
