"""The control server: one thread that accepts connections, turns strangers away, and runs a service."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from unidist.control.connection import Connection, ConnectionLost, format_address
from unidist.control.service import Action, Drop, Publish, Send, Service
from unidist.control.wire import WireError

_log = logging.getLogger("unidist.control")

S = TypeVar("S", bound=Service)

HANDSHAKE_SEC = 5.0
"""Longest time for a connection to prove that it knows the secret, however busily it talks."""

MAX_STRANGERS = 128
"""Connections that have not proved anything yet; one more, and the oldest is closed."""

_TICK_SEC = 0.1
_CLOSE_SEC = 1.0
_MAX_PENDING_BYTES = 128 << 20
_MAX_LOGGED = 10


@dataclass
class _Peer:
    connection: Connection
    accepted: float
    is_known: bool = False  # it has sent a message


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
        self._count = 0
        self._num_refused = 0
        self._calls: deque[Callable[[], Iterable[Action]]] = deque()
        self._events: deque[object] = deque()
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
        with contextlib.suppress(BlockingIOError):  # it is full: the thread will wake
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        next_tick = 0.0
        while not self._closing:
            for key, events in self._selector.select(_TICK_SEC):
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
                self._do(self._service.tick(now))
        self._do_calls()
        self._send_rest()

    def _read_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _do_calls(self) -> None:
        while self._calls:
            self._do(self._calls.popleft()())

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as exc:  # it went away again, or there are no descriptors left
            self._refuse("a connection", str(exc))
            time.sleep(0.01)  # the second stays so for a while
            return
        try:
            connection = Connection(sock, self._secret, is_server=True)
            connection.flush()
        except (OSError, ConnectionLost) as exc:
            sock.close()
            self._refuse(format_address(address), str(exc))
            return
        number = self._count = self._count + 1
        self._peers[number] = _Peer(connection, time.monotonic())
        self._strangers.append(number)
        self._selector.register(connection, selectors.EVENT_READ, number)

    def _move(self, number: int, events: int) -> None:
        """Read from a peer and write to it, as far as it goes."""
        peer = self._peers[number]
        try:
            if events & selectors.EVENT_WRITE:
                peer.connection.flush()
            messages = peer.connection.receive() if events & selectors.EVENT_READ else ()
        except (ConnectionLost, WireError) as exc:
            self._end(number, str(exc))
            return
        for message in messages:
            if number not in self._peers:
                return  # the service dropped it
            peer.is_known = True
            try:
                self._do(self._service.received(number, message, time.monotonic()))
            except Exception as exc:  # whatever a peer has sent: the server is there for the others
                self._end(number, f"sent a message that cannot be understood: {exc!r}")
                return
        self._watch_writing(number)

    def _drop_strangers(self, now: float) -> None:
        while self._strangers:
            first = self._peers.get(self._strangers[0])
            if first is None or first.connection.is_open:
                self._strangers.popleft()
            elif now - first.accepted > HANDSHAKE_SEC:
                self._end(self._strangers.popleft(), f"did not prove the secret in {HANDSHAKE_SEC:g} seconds")
            else:
                break
        self._strangers = deque(
            number for number in self._strangers if number in self._peers and not self._peers[number].connection.is_open
        )
        while len(self._strangers) > MAX_STRANGERS:
            self._end(self._strangers.popleft(), "too many connections that have proved nothing")

    def _do(self, actions: Iterable[Action]) -> None:
        decided = list(actions)  # the service is done with its state before anything comes back to it
        if self._before_acting is not None:
            self._before_acting()
        for action in decided:
            if isinstance(action, Publish):
                self._events.append(action.event)
                with contextlib.suppress(BlockingIOError):
                    os.write(self._events_write, b"\0")
            elif isinstance(action, Send):
                self._send(action)
            elif isinstance(action, Drop):
                self._drop(action)

    def _send(self, action: Send) -> None:
        peer = self._peers.get(action.peer)
        if peer is None:
            return
        try:
            peer.connection.send(action.message)
            if peer.connection.pending_bytes > _MAX_PENDING_BYTES:
                raise ConnectionLost(f"{peer.connection.peer} does not read what it is sent")
        except ConnectionLost as exc:
            self._end(action.peer, str(exc))
        else:
            self._watch_writing(action.peer)

    def _drop(self, action: Drop) -> None:
        peer = self._peers.get(action.peer)
        if peer is not None:
            self._refuse(peer.connection.peer, action.reason)
            self._forget(action.peer)

    def _end(self, number: int, reason: str) -> None:
        """Close the connection to a peer, and tell the service if it knows the peer."""
        peer = self._peers[number]
        self._forget(number)
        if peer.is_known:
            self._do(self._service.lost(number, reason, time.monotonic()))
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
        if peer is not None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.connection.pending_bytes else 0)
            if self._selector.get_key(peer.connection).events != wanted:
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


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket on a port (0: a free one): of one address, or of all, IPv6's too if there are any."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    else:
        listener = socket.create_server(("", port), backlog=1024)
    listener.setblocking(False)
    return listener
