"""A control connection over a socket that never blocks; for event loops of either end."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
import termios
from collections.abc import Sequence

from unidist.control.codec import Message, encode
from unidist.control.wire import Wire
from unidist.errors import UnidistError

Address = tuple[str, int]
"""Host (a name or an IP address) and port."""

_READ_BYTES = 1 << 18
_MAX_READS = 16
_CLOSED = (errno.ECONNRESET, errno.EPIPE, errno.ECONNREFUSED, errno.ENOTCONN)
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 5))


class ConnectionLost(UnidistError):
    """The other end closed the connection, or cannot be reached any more; says why."""


class ConnectionClosed(ConnectionLost):
    """The other end's machine is up, and reports that no process has the connection any more."""


class Connection:
    """One end of a control connection.

    Args:
        sock: connected; belongs to this object from now on.
        secret: the job's secret.
        is_server: this end accepted it.
    """

    def __init__(self, sock: socket.socket, secret: bytes, *, is_server: bool) -> None:
        self._socket = sock
        self._wire = Wire(secret, is_server=is_server)
        self._pending = bytearray(self._wire.take_output())
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self.peer = format_address(sock.getpeername())
        """The other end's address, for messages."""

    @property
    def is_open(self) -> bool:
        """Return whether both ends have proved that they know the secret."""
        return self._wire.is_open

    @property
    def is_unproved(self) -> bool:
        """Return whether the other end has begun to speak this protocol, and has not proved the secret yet."""
        return self._wire.is_unproved

    @property
    def pending_bytes(self) -> int:
        """How much waits to be sent."""
        return len(self._pending)

    @property
    def is_acknowledged(self) -> bool:
        """Return whether the other end's machine has acknowledged all that was sent, whatever its process does."""
        if self._pending:
            return False
        (unacknowledged,) = struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))
        return not unacknowledged

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message, or as much of it as the socket takes now; `flush` sends the rest.

        Raises:
            ConnectionLost: see there.
        """
        self.send_encoded(encode(message))

    def send_encoded(self, payload: bytes) -> None:
        """Send a message that `unidist.control.codec.encode` has made. As `send`."""
        self._wire.send_encoded(payload)
        self._collect()
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it.

        Raises:
            ConnectionLost: see there.
        """
        try:
            while self._pending:
                del self._pending[: self._socket.send(self._pending)]
        except BlockingIOError:
            return
        except OSError as exc:
            raise lost(self.peer, exc) from exc

    def receive(self) -> Sequence[Message]:
        """Return the messages that have come, without waiting. Call it again while the socket is readable.

        Raises:
            ConnectionLost: see there; messages that came before are lost with it.
            WireError: the other end is not one of ours.
        """
        messages: list[Message] = []
        for _ in range(_MAX_READS):
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError as exc:
                if messages:
                    break  # these count first; the next call raises
                raise lost(self.peer, exc) from exc
            if not data:
                if messages:
                    break
                raise ConnectionClosed(f"{self.peer} closed the connection")
            messages += self._wire.receive(data)
            self._collect()
            if len(data) < _READ_BYTES:
                break
        try:
            self.flush()
        except ConnectionLost:
            if not messages:  # these count first, too
                raise
        return messages

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()

    def _collect(self) -> None:
        self._pending += self._wire.take_output()


def lost(peer: str, error: OSError) -> ConnectionLost:
    """Return what an error of a socket means: whether the other end's machine is still there."""
    kind = ConnectionClosed if error.errno in _CLOSED else ConnectionLost
    return kind(f"{peer}: {error.strerror or error}")


def is_own_end(sock: socket.socket) -> bool:
    """Return whether a socket is connected to itself: nobody listens, and the kernel gave it that very port.

    Raises:
        OSError: the other end has reset the connection.
    """
    return bool(sock.getsockname() == sock.getpeername())


def format_address(address: Sequence[object]) -> str:
    """Return a socket's address for a message: "10.0.0.7:2222", "[fe80::1]:2222"."""
    host, port = str(address[0]).removeprefix("::ffff:"), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
