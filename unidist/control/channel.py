"""A connection that carries messages, and raw bytes behind them: for what processes of a job send each other in bulk.

Both ends prove first that they know the job's secret, and messages are authenticated (`wire`). The raw bytes are
neither authenticated nor encrypted, as those of the engine tcp without `--tls`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Self

from unidist.control.codec import MAX_FRAME_BYTES, Message, WireError
from unidist.control.connection import Address, format_address, is_own_end
from unidist.control.wire import Wire
from unidist.errors import UnidistError

_HEAD = struct.Struct("!I")
_TAG_BYTES = 32
_MAX_BUFFERS = 512  # of one system call; Linux takes 1024
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
_UNACKNOWLEDGED_MS = 4000
"""A host that acknowledges nothing for so long is gone."""
_TIMEVAL = struct.Struct("@ll")
_SHORTEST_SEC = 0.001


class ChannelLost(UnidistError):
    """The other end is gone, or is none of ours. Says why."""


class Channel:
    """One end of a connection. One thread reads; any thread writes, and closes.

    Args:
        sock: connected; belongs to this object from now on.
        secret: the job's.
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
        self._limits: dict[int, float] = {}
        try:
            self.peer = format_address(sock.getpeername())
            """Address of the other end, for messages."""
            sock.setblocking(True)
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
    def connect(cls, address: Address, secret: bytes, *, timeout_sec: float) -> Self:
        """Return a connection to who listens at an address.

        Raises:
            ChannelLost: nobody does, or as the class.
        """
        deadline = time.monotonic() + timeout_sec
        where = format_address(address)
        try:
            sock = socket.create_connection(address, timeout=timeout_sec)
        except OSError as exc:
            raise ChannelLost(f"{where} cannot be reached: {exc}") from exc
        try:
            nobody = is_own_end(sock)
        except OSError as exc:
            sock.close()
            raise ChannelLost(f"{where} cannot be reached: {exc}") from exc
        if nobody:
            sock.close()
            raise ChannelLost(f"{where} cannot be reached: nobody listens there")
        return cls(sock, secret, is_server=False, timeout_sec=deadline - time.monotonic())

    def send(self, message: Message, buffers: Sequence[memoryview | bytes] = (), *, timeout_sec: float) -> None:
        """Send a message, and bytes behind it, whose number the other end knows from the message.

        Args:
            message: to send.
            buffers: flat, of bytes.
            timeout_sec: longest time in which the other end takes nothing.

        Raises:
            ChannelLost: it is gone, or takes nothing.
        """
        with self._lock:
            self._wire.send(message)
            self._write([self._wire.take_output(), *buffers], timeout_sec)

    def send_bytes(self, buffers: Sequence[memoryview | bytes], *, timeout_sec: float) -> None:
        """Send bytes that an earlier message has announced. As `send`."""
        with self._lock:
            self._write(buffers, timeout_sec)

    def receive(self, *, timeout_sec: float | None = None) -> Message:
        """Return the next message.

        Args:
            timeout_sec: longest wait; None: until one comes, or the connection ends, as it does with the other's host.

        Raises:
            ChannelLost: the other end is gone, or breaks the protocol.
            TimeoutError: nothing came.
        """
        head = bytearray(_HEAD.size + _TAG_BYTES)
        self.receive_into(memoryview(head), timeout_sec=timeout_sec)
        (length,) = _HEAD.unpack_from(head)
        if length > MAX_FRAME_BYTES:
            raise ChannelLost(f"{self.peer} announces a message of {length} bytes; {MAX_FRAME_BYTES} are allowed")
        payload = bytearray(length)
        self.receive_into(memoryview(payload), timeout_sec=timeout_sec)
        try:
            (message,) = self._wire.receive(bytes(head + payload))
        except WireError as exc:
            raise ChannelLost(f"{self.peer}: {exc}") from exc
        return message

    def receive_into(self, memory: memoryview, *, timeout_sec: float | None = None) -> None:
        """Fill flat memory with the next bytes. As `receive`."""
        position = 0
        self._limit(socket.SO_RCVTIMEO, timeout_sec)
        while position < len(memory):
            try:
                count = self._socket.recv_into(memory[position:], flags=socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError from None
            except OSError as exc:
                raise ChannelLost(f"{self.peer} is gone: {exc}") from exc
            if not count:
                raise ChannelLost(f"{self.peer} closed the connection")
            position += count

    def close(self) -> None:
        """Close the connection; threads waiting on it get ChannelLost. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _prove(self, deadline: float) -> None:
        self._write([self._wire.take_output()], deadline - time.monotonic())
        while not self._wire.is_open:
            data = bytearray(1)  # the first message may follow at once, and is not for here
            try:
                self.receive_into(memoryview(data), timeout_sec=deadline - time.monotonic())
                self._wire.receive(bytes(data))
            except TimeoutError:
                raise ChannelLost(f"{self.peer} did not prove that it knows the job's secret") from None
            except WireError as exc:
                raise ChannelLost(f"{self.peer}: {exc}") from exc
            self._write([self._wire.take_output()], deadline - time.monotonic())

    def _write(self, buffers: Sequence[memoryview | bytes], timeout_sec: float) -> None:
        pending = [memoryview(buffer) for buffer in buffers if len(buffer)]
        first = 0
        self._limit(socket.SO_SNDTIMEO, timeout_sec)
        try:
            while first < len(pending):
                count = self._socket.sendmsg(pending[first : first + _MAX_BUFFERS])
                while first < len(pending) and count >= len(pending[first]):
                    count -= len(pending[first])
                    first += 1
                if count:
                    pending[first] = pending[first][count:]
        except BlockingIOError:
            raise ChannelLost(f"{self.peer} took nothing for {timeout_sec:g} s") from None
        except OSError as exc:
            raise ChannelLost(f"{self.peer} is gone: {exc}") from exc

    def _limit(self, option: int, timeout_sec: float | None) -> None:
        """Set the kernel's limit for one system call: Python's own needs several calls for each."""
        limit = 0.0 if timeout_sec is None else max(timeout_sec, _SHORTEST_SEC)  # 0: none
        if self._limits.get(option) != limit:
            seconds, fraction = divmod(limit, 1)
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(fraction * 1e6)))
            except OSError as exc:
                raise ChannelLost(f"the connection to {self.peer} is closed: {exc}") from exc
            self._limits[option] = limit


__all__ = ["Channel", "ChannelLost"]
