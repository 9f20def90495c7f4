"""Stands between two processes on their TCP connections: keeps what passes, and can change or cut it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

Address = tuple[str, int]
Change = Callable[[str, int, bytes], bytes | None]
"""Gets the direction ("up" to the one that listens, "down" from it), the number of bytes that came before in it, and
bytes. Returns what is passed on, None to cut the connection."""


class RecordedWire:
    """Passes on what comes to `address`. A context manager.

    Args:
        to: where it is passed on to.
        change: see `Change`; default: nothing is changed.
    """

    def __init__(self, to: Address, change: Change | None = None) -> None:
        self._to = to
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = ("127.0.0.1", self._listener.getsockname()[1])
        self._passed: list[bytearray] = []
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def recorded(self) -> bytes:
        """Return all that has passed."""
        return b"|".join(bytes(each) for each in self._passed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _cut(*self._sockets)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), "a connection does not end"
        for sock in self._sockets:
            sock.close()

    def _start(self, function: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._to)
                self._sockets += [client, server]
                for source, target, direction in ((client, server, "up"), (server, client, "down")):
                    self._passed.append(kept := bytearray())
                    self._start(self._pass, source, target, direction, kept)

    def _pass(self, source: socket.socket, target: socket.socket, direction: str, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                passed = data if self._change is None else self._change(direction, len(kept), data)
                kept += data
                if passed is None:
                    break
                target.sendall(passed)
        _cut(source, target)


def _cut(*sockets: socket.socket) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
