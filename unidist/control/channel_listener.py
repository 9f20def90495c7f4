"""Accepts channels, each on a thread of its own; strangers cannot use up its threads and descriptors."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from unidist.control.channel import Channel, ChannelLost

__all__ = ["ChannelListener"]

_log = logging.getLogger("unidist.control")

ChannelT = TypeVar("ChannelT", bound=Channel)

MAX_STRANGERS = 256
"""Connections that have not proved yet that they know the secret. For one more the oldest of them has to go."""

_FULL_SEC = 0.1
"""Pause where there is no descriptor or no memory for one more connection; others wait in the backlog."""


class ChannelListener(Generic[ChannelT]):
    """See the module's text.

    Args:
        listener: a socket that listens; belongs to this object from now on.
        prove: makes the channel of an accepted socket, which it owns from then on, within a time limit.
        serve: called with each channel, on its thread; closes it.
        name: of the threads, for messages.
    """

    def __init__(
        self,
        listener: socket.socket,
        prove: Callable[[socket.socket], ChannelT],
        serve: Callable[[ChannelT], None],
        *,
        name: str,
    ) -> None:
        self._listener = listener
        self._prove = prove
        self._serve = serve
        self._name = name
        self._closed = threading.Event()
        self._is_full = False
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}  # the oldest first

    def run(self) -> None:
        """Accept connections until `close`."""
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as exc:
                if self._closed.is_set():
                    return
                self._wait(exc)
                continue
            with self._lock:
                if len(self._strangers) >= MAX_STRANGERS:
                    self._turn_oldest_away()
                self._strangers[sock] = None
            try:
                threading.Thread(target=self._accepted, args=(sock,), name=self._name, daemon=True).start()
            except RuntimeError as exc:  # no memory for one more thread
                self._forget(sock)
                sock.close()
                self._wait(exc)
            else:
                self._is_full = False

    def close(self) -> None:
        """End `run`. From any thread; idempotent. Channels stay as they are."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a thread in `accept` does not notice `close`
        self._listener.close()

    def _accepted(self, sock: socket.socket) -> None:
        try:
            channel = self._prove(sock)
        except ChannelLost:
            return  # a stranger, a scanner, or a peer that has died
        finally:
            self._forget(sock)
        self._serve(channel)

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(sock, None)

    def _turn_oldest_away(self) -> None:
        """Have the proof of the oldest stranger fail; its thread closes the socket."""
        if self._strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)

    def _wait(self, error: Exception) -> None:
        """Wait until there is room: descriptors are scarce, or a connection was gone before it was accepted."""
        if not self._is_full:
            self._is_full = True
            _log.warning("%s: a connection cannot be accepted now: %s. Others wait", self._name, error)
        with self._lock:
            self._turn_oldest_away()
        time.sleep(_FULL_SEC)
