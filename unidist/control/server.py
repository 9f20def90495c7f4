"""The control server: one thread that accepts connections, turns strangers away, and runs a service."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from unidist.control.codec import Message, WireError, encode
from unidist.control.connection import Connection, ConnectionClosed, ConnectionLost, format_address
from unidist.control.service import Action, Drop, Publish, Send, Service
from unidist.control.standstill import Standstill

_log = logging.getLogger("unidist.control")

S = TypeVar("S", bound=Service)

HANDSHAKE_SEC = 5.0
"""Longest time for a connection to prove that it knows the secret, however busily it talks."""

MAX_STRANGERS = 512
"""Connections that have not proved anything yet, half of what may be open at most. Others wait to be accepted."""

STRANGER_SEC = 3.0
"""So long a stranger may take while others wait to be accepted."""

_TICK_SEC = 0.1
_CLOSE_SEC = 1.0
_BACKLOG = 4096
_MAX_ACCEPTS = 64
"""In one turn: those who have a connection wait no longer for an answer than these take."""

_FULL_SEC = 1.0
"""Without descriptors for more connections: pause before the next attempt."""
_MAX_PENDING_BYTES = 128 << 20
_MAX_LOGGED = 10


@dataclass
class _Peer:
    connection: Connection
    accepted: float
    is_known: bool = False  # it has sent a message
    is_dropped: bool = False  # to be closed when what was decided before is done
    is_writing: bool = False  # something waits to be sent


class ControlServer:
    """Runs a service on a port that it chooses. A context manager; its thread runs until the block is left.

    Args:
        service: what decides; used by the server's thread alone once that runs.
        secret: the job's secret.
        host: address of an own interface to listen on; default: all.
        port: to listen on; default: one that is free.
        before_acting: called by the server's thread when the service has decided something, before anything of it is
            done: what others are told can be kept first. Must not raise.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(
        self,
        service: Service,
        secret: bytes,
        *,
        host: str = "",
        port: int = 0,
        before_acting: Callable[[], None] | None = None,
    ) -> None:
        self._service = service
        self._before_acting = before_acting
        self._secret = secret
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._peers: dict[int, _Peer] = {}
        self._strangers: deque[int] = deque()
        self._decided: list[Action] = []
        self._encoded: tuple[Message | None, bytes] = (None, b"")
        self._accepts_from = 0.0
        self._is_full = False
        self._count = 0
        self._num_refused = 0
        self._calls: deque[Callable[[], Iterable[Action]]] = deque()
        self._events: deque[object] = deque()
        self._is_woken = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.events_fd, self._events_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        """Readable when `take_events` has something, or may have."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="unidist-control", daemon=True)

    def start(self) -> None:
        """Start the thread. Before that, connections wait in the listening socket."""
        self._thread.start()

    def call(self, function: Callable[[], Iterable[Action]]) -> None:
        """Make the server's thread call `function` and execute the returned actions. From any thread or signal handler.

        `function` may touch the service, for nothing else does at that moment.
        """
        self._calls.append(function)
        self._wake()

    def take_events(self) -> list[object]:
        """Return the events that the service has published since the last call, in order. From one thread."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.events_fd, 4096)
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Send what waits (a second at most), close all connections, and end the thread. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        for peer in self._peers.values():
            peer.connection.close()
        self._peers.clear()
        self._selector.close()
        self._listener.close()
        for descriptor in (self._wake_read, self._wake_write, self.events_fd, self._events_write):
            os.close(descriptor)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wake(self) -> None:
        if not self._is_woken:  # after what it wakes for is there; the thread looks for that after it has reset this
            self._is_woken = True
            with contextlib.suppress(BlockingIOError):  # it is full: the thread will wake
                os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        next_tick = 0.0
        standstill = Standstill()
        while not self._closing:
            ready = self._selector.select(_TICK_SEC)
            now = time.monotonic()
            if seconds := standstill.turn(now):
                self._service.stood_still(seconds, now)
            for key, events in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wake_read:
                    self._read_wake()
                elif key.data in self._peers:
                    self._move(key.data, events)
            self._do_calls()
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + _TICK_SEC
                self._drop_strangers(now)
                self._decide(self._service.tick(now))
            self._listen_again(now)
            self._act()
        self._do_calls()
        self._act()
        self._send_rest()

    def _read_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _do_calls(self) -> None:
        self._is_woken = False
        while self._calls:
            self._decide(self._calls.popleft()())

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS):
            if len(self._strangers) >= self._max_strangers:
                self._forget_strangers(time.monotonic())
                if len(self._strangers) >= self._max_strangers:
                    self._stop_listening(_TICK_SEC)
                    return
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno not in (errno.EMFILE, errno.ENFILE):  # else it went away again
                    self._refuse("a connection", str(exc))
                elif not _raise_limit():
                    self._tell_full(exc)
                    self._stop_listening(_FULL_SEC)
                    return
                continue
            self._is_full = False
            self._admit(sock, format_address(address))

    def _admit(self, sock: socket.socket, address: str) -> None:
        try:
            connection = Connection(sock, self._secret, is_server=True)
        except OSError as exc:
            sock.close()
            self._refuse(address, str(exc))
            return
        number = self._count = self._count + 1
        self._peers[number] = _Peer(connection, time.monotonic())
        self._strangers.append(number)
        self._selector.register(connection, selectors.EVENT_READ, number)

    def _stop_listening(self, seconds: float) -> None:
        """Leave others in the listening socket for a while: it would be readable all the time."""
        self._selector.unregister(self._listener)
        self._accepts_from = time.monotonic() + seconds

    def _listen_again(self, now: float) -> None:
        if self._accepts_from and now >= self._accepts_from:
            self._accepts_from = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, None)

    def _tell_full(self, error: OSError) -> None:
        """Report that no descriptors are left, once until some are free again."""
        if self._is_full:
            return
        self._is_full = True
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        what = f"this process has as many files open as it may ({limit})"
        if error.errno == errno.ENFILE:
            what = "this machine has as many files open as it may (/proc/sys/fs/file-max)"
        _log.error(
            "the control server has %d connections and cannot accept more: %s. Others wait until their time limits. "
            "The launcher of a job needs two files for each rank and one for each host: raise the limit where it is "
            "started (`ulimit -n`, LimitNOFILE= of a service, nofile in /etc/security/limits.conf), and start again",
            len(self._peers),
            what,
        )

    def _move(self, number: int, events: int) -> None:
        """Read from a peer and write to it, as far as it goes."""
        peer = self._peers[number]
        try:
            if events & selectors.EVENT_WRITE:
                peer.connection.flush()
            messages = peer.connection.receive() if events & selectors.EVENT_READ else ()
        except ConnectionClosed as exc:
            when = " before it proved that it knows the job's secret" if peer.connection.is_unproved else ""
            self._end(number, f"{exc}{when}")
            return
        except (ConnectionLost, WireError) as exc:
            self._end(number, str(exc))
            return
        for message in messages:
            if peer.is_dropped:
                return
            peer.is_known = True
            try:
                self._decide(self._service.received(number, message, time.monotonic()))
            except Exception as exc:  # whatever a peer has sent: the server is there for the others
                self._end(number, f"sent a message that cannot be understood: {exc!r}")
                return
        self._watch_writing(number)

    @property
    def _max_strangers(self) -> int:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return MAX_STRANGERS if limit == resource.RLIM_INFINITY else min(MAX_STRANGERS, max(1, limit // 2))

    def _drop_strangers(self, now: float) -> None:
        """Close the connections that have taken too long for their proof."""
        while self._strangers:
            first = self._peers.get(self._strangers[0])
            if first is None or first.connection.is_open:
                self._strangers.popleft()
            elif now - first.accepted > HANDSHAKE_SEC:
                self._end(self._strangers.popleft(), f"did not prove the secret in {HANDSHAKE_SEC:g} seconds")
            else:
                break

    def _forget_strangers(self, now: float) -> None:
        """Others wait to be accepted: let go of those that are no strangers any more, or hold the place for long."""
        self._strangers = deque(
            number for number in self._strangers if number in self._peers and not self._peers[number].connection.is_open
        )
        while self._strangers and now - self._peers[self._strangers[0]].accepted > STRANGER_SEC:
            self._end(self._strangers.popleft(), "too many connections that have proved nothing")

    def _decide(self, actions: Iterable[Action]) -> None:
        """Have the service decide; what it decides is done at the end of this turn, for all messages that have come."""
        for action in list(actions):  # the service is done with its state before anything comes back to it
            self._decided.append(action)
            if isinstance(action, Drop) and action.peer in self._peers:
                self._peers[action.peer].is_dropped = True

    def _act(self) -> None:
        """Do what was decided."""
        if self._before_acting is not None:
            self._before_acting()
        has_events = False
        while self._decided:
            decided, self._decided = self._decided, []
            for action in decided:
                if isinstance(action, Publish):
                    self._events.append(action.event)
                    has_events = True
                elif isinstance(action, Send):
                    self._send(action)
                elif isinstance(action, Drop):
                    self._drop(action)
            if self._decided and self._before_acting is not None:
                self._before_acting()
        if has_events:
            with contextlib.suppress(BlockingIOError):
                os.write(self._events_write, b"\0")

    def _send(self, action: Send) -> None:
        peer = self._peers.get(action.peer)
        if peer is None:
            return
        try:
            peer.connection.send_encoded(self._encode(action.message))
            if peer.connection.pending_bytes > _MAX_PENDING_BYTES:
                raise ConnectionLost(f"{peer.connection.peer} does not read what it is sent")
        except (ConnectionLost, ValueError) as exc:  # the second: a message that is too long
            self._end(action.peer, str(exc))
        else:
            self._watch_writing(action.peer)

    def _encode(self, message: Message) -> bytes:
        """Return a message as it travels; one that goes to many is encoded once."""
        if message is not self._encoded[0]:
            self._encoded = message, encode(message)
        return self._encoded[1]

    def _drop(self, action: Drop) -> None:
        peer = self._peers.get(action.peer)
        if peer is not None:
            if peer.is_known:  # the service tells of it
                _log.info("the control server closes the connection of %s: %s", peer.connection.peer, action.reason)
            else:
                self._refuse(peer.connection.peer, action.reason)
            self._forget(action.peer)

    def _end(self, number: int, reason: str) -> None:
        """Close the connection to a peer, and tell the service if it knows the peer."""
        peer = self._peers[number]
        self._forget(number)
        if peer.is_known and not peer.is_dropped:
            self._decide(self._service.lost(number, reason, time.monotonic()))
        else:
            self._refuse(peer.connection.peer, reason)

    def _forget(self, number: int) -> None:
        peer = self._peers.pop(number)
        self._selector.unregister(peer.connection)
        peer.connection.close()

    def _refuse(self, who: str, reason: str) -> None:
        """Log why somebody was turned away; the more there were, the seldomer."""
        self._num_refused += 1
        if self._num_refused <= _MAX_LOGGED or self._num_refused % 1000 == 0:
            _log.warning("the control server turned %s away (no. %d): %s", who, self._num_refused, reason)

    def _watch_writing(self, number: int) -> None:
        peer = self._peers.get(number)
        if peer is not None and peer.is_writing != bool(peer.connection.pending_bytes):
            peer.is_writing = not peer.is_writing
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.is_writing else 0)
            self._selector.modify(peer.connection, wanted, number)

    def _send_rest(self) -> None:
        deadline = time.monotonic() + _CLOSE_SEC
        while time.monotonic() < deadline:
            waiting = [number for number, peer in self._peers.items() if peer.connection.pending_bytes]
            if not waiting:
                return
            for number in waiting:
                try:
                    self._peers[number].connection.flush()
                except ConnectionLost:
                    self._forget(number)
            time.sleep(0.005)


def _raise_limit() -> bool:
    """Let this process open more files, where its user may do so; return whether it can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
    if wanted <= soft:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return False
    return True


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket on a port (0: a free one): of one address, or of all, IPv6's too if there are any."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    else:
        listener = socket.create_server(("", port), backlog=_BACKLOG)
    listener.setblocking(False)
    return listener
