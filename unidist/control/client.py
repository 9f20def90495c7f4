"""The client's end of a control connection, for code that waits: every wait has a time limit."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from types import TracebackType
from typing import Self

from unidist.control.codec import Message
from unidist.control.connection import (
    Address,
    Connection,
    ConnectionClosed,
    ConnectionLost,
    format_address,
    is_own_end,
    lost,
)


def connect(address: Address, secret: bytes, *, timeout: float) -> Connection:
    """Connect to a control server and prove the secret to each other.

    Args:
        address: the server's.
        secret: the job's secret.
        timeout: seconds for all of it.

    Raises:
        ConnectionLost: nobody listens there, or it closed the connection.
        WireError: it is no server of ours, or does not know the secret.
        TimeoutError: it did not answer in time.
    """
    deadline = time.monotonic() + timeout
    try:
        sock = socket.create_connection(address, timeout=timeout)
    except TimeoutError:
        raise
    except OSError as exc:
        raise lost(format_address(address), exc) from exc
    try:
        if is_own_end(sock):
            raise ConnectionClosed(f"{format_address(address)}: nobody listens there")
        connection = Connection(sock, secret, is_server=False)
    except OSError as exc:  # a server that ends resets what it has not accepted yet
        sock.close()
        raise lost(format_address(address), exc) from exc
    except ConnectionClosed:
        sock.close()
        raise
    try:
        while not connection.is_open or connection.pending_bytes:
            _wait(connection, deadline)
            early = connection.receive()
            assert not early, "a server speaks when it is spoken to"
    except BaseException:
        connection.close()
        raise
    return connection


class ControlClient:
    """A connection on which messages are sent and waited for. One thread at a time.

    Args:
        address: the server's.
        secret: the job's secret.
        timeout: seconds for connecting.

    Raises:
        As `connect`.
    """

    def __init__(self, address: Address, secret: bytes, *, timeout: float) -> None:
        self._connection = connect(address, secret, timeout=timeout)
        self._messages: deque[Message] = deque()

    def send(self, message: Message, *, timeout: float) -> None:
        """Send a message; `timeout` seconds are the longest wait for the server to take it.

        Raises:
            ConnectionLost: the server is gone.
            TimeoutError: it does not take the message.
        """
        deadline = time.monotonic() + timeout
        self._connection.send(message)
        while self._connection.pending_bytes:
            _wait(self._connection, deadline)
            self._messages += self._connection.receive()

    def receive(self, *, timeout: float) -> Message:
        """Return the next message of the server, waiting for it at most `timeout` seconds.

        Raises:
            ConnectionLost: the server is gone.
            TimeoutError: none came.
        """
        deadline = time.monotonic() + timeout
        while not self._messages:
            _wait(self._connection, deadline)
            self._messages += self._connection.receive()
        return self._messages.popleft()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _wait(connection: Connection, deadline: float) -> None:
    """Wait until the connection can be read, or written if something waits to be sent; flushes.

    Raises:
        TimeoutError: neither happened before `deadline`.
    """
    poller = select.poll()
    poller.register(connection, select.POLLIN | (select.POLLOUT if connection.pending_bytes else 0))
    remaining = deadline - time.monotonic()
    if not poller.poll(max(0.0, 1000 * remaining)):
        raise TimeoutError(f"no answer from {connection.peer} in time")
    connection.flush()


__all__ = ["ConnectionLost", "ControlClient", "connect"]
