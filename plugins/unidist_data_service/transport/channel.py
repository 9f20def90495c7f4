"""A connection between a rank and a data worker: authenticated messages, and the raw bytes of arrays behind them.

Both ends prove first that they know the job's secret, and messages are authenticated (`unidist.control.Wire`). The
bytes of arrays are neither authenticated nor encrypted, as those of the engine tcp without `--tls`.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from unidist.control import MAX_FRAME_BYTES, Message, Wire, WireError, format_address
from unidist.errors import UnidistError

_HEAD = struct.Struct("!I")
_TAG_BYTES = 32
_MAX_BUFFERS = 512  # of one system call; Linux takes 1024
_POLL_MS = 1000
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 4))
_UNACKNOWLEDGED_MS = 5000
"""A host that acknowledges nothing for so long is gone."""


class ChannelLost(UnidistError):
    """The other end is gone, or is none of ours. Says why."""


class Channel:
    """One end of a connection. One thread reads; any thread writes, and closes.

    Args:
        sock: connected; belongs to this object from now on.
        secret: of the job.
        is_server: this end accepted the connection.
        timeout_sec: longest wait for the proof of the secret.

    Raises:
        ChannelLost: the other end is gone, silent, or does not know the secret.
    """

    def __init__(self, sock: socket.socket, secret: bytes, *, is_server: bool, timeout_sec: float) -> None:
        self._socket = sock
        self._wire = Wire(secret, is_server=is_server)
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            self.peer = format_address(sock.getpeername())
            """Address of the other end, for messages."""
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            self._prove(time.monotonic() + timeout_sec)
        except OSError as exc:
            self.close()
            raise ChannelLost(f"the other end is gone: {exc}") from exc
        except BaseException:
            self.close()
            raise

    @classmethod
    def connect(cls, address: tuple[str, int], secret: bytes, *, timeout_sec: float) -> Channel:
        """Return a connection to a data worker.

        Raises:
            ChannelLost: nobody listens there, or as the class.
        """
        deadline = time.monotonic() + timeout_sec
        where = format_address(address)
        try:
            sock = socket.create_connection(address, timeout=timeout_sec)
        except OSError as exc:
            raise ChannelLost(f"{where} cannot be reached: {exc}") from exc
        if sock.getsockname() == sock.getpeername():  # nobody listens, and the kernel gave this end that very port
            sock.close()
            raise ChannelLost(f"{where} cannot be reached: nobody listens there")
        return cls(sock, secret, is_server=False, timeout_sec=deadline - time.monotonic())

    def send(self, message: Message, payload: Sequence[memoryview | bytes] = (), *, timeout_sec: float) -> None:
        """Send a message, and bytes behind it, whose number the other end knows from the message.

        Args:
            message: with a "type".
            payload: flat buffers of bytes.
            timeout_sec: longest time in which the other end takes nothing.

        Raises:
            ChannelLost: it is gone, or takes nothing.
        """
        with self._lock:
            self._wire.send(message)
            self._write([self._wire.take_output(), *payload], timeout_sec)

    def receive(self) -> Message:
        """Return the next message. Waits until one comes, or the connection ends.

        Raises:
            ChannelLost: the other end is gone, or breaks the protocol.
        """
        head = bytearray(_HEAD.size + _TAG_BYTES)
        self.receive_into(memoryview(head))
        (length,) = _HEAD.unpack_from(head)
        if length > MAX_FRAME_BYTES:
            raise ChannelLost(f"{self.peer} announces a message of {length} bytes; {MAX_FRAME_BYTES} are allowed")
        payload = bytearray(length)
        self.receive_into(memoryview(payload))
        try:
            (message,) = self._wire.receive(bytes(head + payload))
        except WireError as exc:
            raise ChannelLost(f"{self.peer}: {exc}") from exc
        return message

    def receive_into(self, memory: memoryview) -> None:
        """Fill memory with the next bytes. Raises as `receive`."""
        position = 0
        while position < len(memory):
            try:
                count = self._socket.recv_into(memory[position:])
            except BlockingIOError:
                while not self._ready(select.POLLIN, _POLL_MS):
                    pass
                continue
            except OSError as exc:
                raise ChannelLost(f"{self.peer} is gone: {exc}") from exc
            if not count:
                raise ChannelLost(f"{self.peer} closed the connection")
            position += count

    def close(self) -> None:
        """Close the connection; whoever waits on it gets ChannelLost. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _prove(self, deadline: float) -> None:
        self._write([self._wire.take_output()], deadline - time.monotonic())
        while not self._wire.is_open:
            if not self._ready(select.POLLIN, max(0, int(1000 * (deadline - time.monotonic())))):
                raise ChannelLost(f"{self.peer} did not prove that it knows the job's secret")
            try:
                data = self._socket.recv(1)  # the first message may follow at once, and is not for here
            except BlockingIOError:
                continue
            if not data:
                raise ChannelLost(f"{self.peer} closed the connection")
            try:
                self._wire.receive(data)
            except WireError as exc:
                raise ChannelLost(f"{self.peer}: {exc}") from exc
            self._write([self._wire.take_output()], deadline - time.monotonic())

    def _write(self, buffers: Sequence[memoryview | bytes], timeout_sec: float) -> None:
        pending = [memoryview(buffer) for buffer in buffers if len(buffer)]
        first = 0
        while first < len(pending):
            try:
                count = self._socket.sendmsg(pending[first : first + _MAX_BUFFERS])
            except BlockingIOError:
                if not self._ready(select.POLLOUT, int(1000 * timeout_sec)):
                    raise ChannelLost(f"{self.peer} took nothing for {timeout_sec:g} s") from None
                continue
            except OSError as exc:
                raise ChannelLost(f"{self.peer} is gone: {exc}") from exc
            while first < len(pending) and count >= len(pending[first]):
                count -= len(pending[first])
                first += 1
            if count:
                pending[first] = pending[first][count:]

    def _ready(self, events: int, timeout_ms: int) -> bool:
        if self._is_closed:
            raise ChannelLost(f"the connection to {self.peer} is closed")
        poller = select.poll()
        try:
            poller.register(self._socket.fileno(), events)
        except (OSError, ValueError) as exc:
            raise ChannelLost(f"the connection to {self.peer} is closed") from exc
        return bool(poller.poll(timeout_ms))
