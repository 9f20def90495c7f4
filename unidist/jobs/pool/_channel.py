"""Length-prefixed messages over the socket between `RankPool` and its workers. Bytes only."""

from __future__ import annotations

import socket
import struct

_HEADER = struct.Struct("!Q")
_CHUNK_BYTES = 1 << 20


class WorkerChannel:
    """One side of a worker's socket, for a process that serves many: never blocks.

    Attributes:
        fd: for a selector.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()
        self.fd = connection.fileno()
        self.closed_by_peer = False

    def post(self, message: bytes) -> None:
        """Take a message to send with `write`; the one before must be gone."""
        assert not self._outgoing, "one message at a time"
        self._outgoing = memoryview(_HEADER.pack(len(message)) + message)

    @property
    def has_to_write(self) -> bool:
        """Return whether part of the message is still to be sent."""
        return bool(self._outgoing)

    def write(self) -> None:
        """Send what the socket takes now."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
        except BlockingIOError:
            pass
        except OSError:  # the worker is gone; what it said before can still be read
            self._outgoing = memoryview(b"")

    def read(self) -> bytes | None:
        """Read what is there; return the message if it is complete, else None."""
        try:
            while not self.closed_by_peer:
                data = self._socket.recv(_CHUNK_BYTES)
                self._incoming += data
                self.closed_by_peer = not data
        except BlockingIOError:
            pass
        except OSError:
            self.closed_by_peer = True
        if len(self._incoming) < _HEADER.size:
            return None
        end = _HEADER.size + _HEADER.unpack_from(self._incoming)[0]
        if len(self._incoming) < end:
            return None
        message = bytes(memoryview(self._incoming)[_HEADER.size : end])
        self._incoming = self._incoming[end:]
        return message

    def close(self) -> None:
        """Close the socket: the worker ends when it sees that."""
        self._socket.close()


def send(connection: socket.socket, message: bytes) -> None:
    """Send one message, on a socket that blocks."""
    connection.sendall(_HEADER.pack(len(message)))
    connection.sendall(message)


def receive(connection: socket.socket) -> bytes | None:
    """Return the next message on a socket that blocks, or None when the other side has closed it."""
    header = _receive_exactly(connection, _HEADER.size)
    return None if header is None else _receive_exactly(connection, _HEADER.unpack(header)[0])


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            return None
        view = view[received:]
    return bytes(data)
