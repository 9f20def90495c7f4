"""Rendezvous of the processes of one host, over a Unix socket in the abstract namespace.

The socket has no file, so nothing is left behind whatever happens. Rank 0 (the leader) listens, the others
connect. Both sides check that the other runs as the same user and knows the job's secret (challenge and
response, HMAC-SHA256) before anything else is read.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta

from typing_extensions import override

from unidist.communicator import format_ranks
from unidist.errors import ConfigurationError, PeerLostError, StalledError
from unidist.rendezvous import Contribution, Rendezvous

_log = logging.getLogger("unidist.rendezvous")

_HELLO = struct.Struct("!II")  # rank, world size
_NONCE_BYTES = 16
_DIGEST_BYTES = hashlib.sha256().digest_size
_MAX_MESSAGE = 128 << 10
_MAX_FDS = 64
_HANDSHAKE_SEC = 5.0
_DATA, _ERROR = b"D", b"E"


class Interrupt:
    """Ends the waits of a rendezvous from another thread."""

    def __init__(self) -> None:
        self.reason = ""
        """Why; "" while it was not set."""
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def set(self, reason: str) -> None:
        """End the present wait, and all later ones, with PeerLostError. From any thread; the first reason counts."""
        if not self.reason and self._write >= 0:
            self.reason = reason or "interrupted"
            os.write(self._write, b"\0")

    def fileno(self) -> int:
        """Return a descriptor that is readable once it is set."""
        return self._read

    def close(self) -> None:
        """Release the descriptors. Idempotent."""
        if self._write >= 0:
            os.close(self._read)
            os.close(self._write)
            self._read = self._write = -1


class LocalRendezvous(Rendezvous):
    """Connects the ranks of one host.

    Args:
        rank: of this process.
        world_size: number of processes.
        key: equal on all ranks of the job, different between jobs and between init() calls of one job.
        secret: the job's secret; may be empty, then only the user is checked.
        timeout: longest wait for all ranks to come.
        interrupt: ends every wait when it is set; None: only the time limit does.

    Raises:
        StalledError: ranks are missing after `timeout`; rank 0 names them, to the others too.
        PeerLostError: it was interrupted.
        ConfigurationError: another job uses the same key at this moment.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        key: str,
        secret: bytes,
        timeout: timedelta,
        interrupt: Interrupt | None = None,
    ) -> None:
        self._interrupt = interrupt
        self.rank = rank
        self.world_size = world_size
        self._secret = secret
        self._peers: dict[int, socket.socket] = {}
        name = hashlib.sha256(f"{os.getuid()}/{key}".encode()).hexdigest()
        address = f"\0unidist/{name}"
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            if rank == 0:
                self._listen(address, deadline)
            else:
                self._connect(address, deadline)
        except BaseException:
            self.close()
            raise

    @override
    def allgather(self, payload: bytes, *, fds: Sequence[int] = (), timeout: timedelta) -> list[Contribution]:
        deadline = time.monotonic() + timeout.total_seconds()
        if len(payload) >= _MAX_MESSAGE or len(fds) > _MAX_FDS:
            raise ValueError(f"a contribution is at most {_MAX_MESSAGE} bytes and {_MAX_FDS} descriptors")
        if self.rank != 0:
            self._send(0, _DATA + payload, fds)
            return [self._receive(0, deadline) for _ in range(self.world_size)]
        own = Contribution(payload, tuple(os.dup(fd) for fd in fds))
        try:
            others = self._collect(deadline)
        except PeerLostError as exc:
            for peer in self._peers:
                with contextlib.suppress(PeerLostError):
                    self._send(peer, _ERROR + type(exc).__name__.encode() + b"\0" + str(exc).encode(), ())
            raise
        contributions = [own, *(others[rank] for rank in range(1, self.world_size))]
        for peer in self._peers:
            for item in contributions:
                self._send(peer, _DATA + item.payload, item.fds)
        return contributions

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _listen(self, address: str, deadline: float) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(address)
            except OSError as exc:
                raise ConfigurationError(
                    "another job of this user with the same identity is starting on this host; give each job "
                    f"an address or port of its own, or use `unidist launch` ({exc})"
                ) from exc
            listener.listen(self.world_size)
            while len(self._peers) < self.world_size - 1:
                if not self._wait(listener, deadline):
                    missing = sorted(set(range(1, self.world_size)) - set(self._peers))
                    text = (
                        f"init: rank{'s' if len(missing) > 1 else ''} {format_ranks(missing)} of {self.world_size} did "
                        "not come in time. Look for an earlier error of theirs; slow starts need a larger "
                        "UNIDIST_START_TIMEOUT_SEC."
                    )
                    for peer in self._peers:
                        with contextlib.suppress(PeerLostError):
                            self._send(peer, _ERROR + b"StalledError\0" + text.encode(), ())
                    raise StalledError(text, ranks=missing)
                self._accept(listener)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(_HANDSHAKE_SEC)
        try:
            rank = self._challenge_peer(connection)
        except (OSError, ConfigurationError, struct.error) as exc:
            _log.warning("rank 0 turned a connection away: %s", exc)
            connection.close()
            return
        self._peers[rank] = connection

    def _challenge_peer(self, connection: socket.socket) -> int:
        _check_user(connection)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.send(nonce)
        answer = connection.recv(_DIGEST_BYTES + _NONCE_BYTES + _HELLO.size)
        digest, theirs = answer[:_DIGEST_BYTES], answer[_DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._sign(b"member", nonce)):
            raise ConfigurationError("wrong secret")
        rank: int
        world_size: int
        rank, world_size = _HELLO.unpack(theirs[_NONCE_BYTES:])
        if world_size != self.world_size or not 0 < rank < world_size or rank in self._peers:
            raise ConfigurationError(f"rank {rank} of {world_size} does not belong here, or came twice")
        connection.send(self._sign(b"leader", theirs[:_NONCE_BYTES]))
        return rank

    def _connect(self, address: str, deadline: float) -> None:
        pause = 0.0005
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(address)
                break
            except OSError:
                connection.close()
                if time.monotonic() > deadline:
                    raise StalledError(
                        f"init: rank {self.rank} waited for rank 0, which did not come in time. Look for an earlier "
                        "error of rank 0; slow starts need a larger UNIDIST_START_TIMEOUT_SEC.",
                        ranks=(0,),
                    ) from None
                self._check_interrupt()
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
        self._peers[0] = connection
        _check_user(connection)
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        self._wait(connection, deadline)  # it comes when the leader has come to this connection
        try:
            nonce, mine = connection.recv(_NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
            connection.send(self._sign(b"member", nonce) + mine + _HELLO.pack(self.rank, self.world_size))
            self._wait(connection, deadline)
            proof = connection.recv(_DIGEST_BYTES)
        except OSError as exc:
            raise StalledError(f"init: rank {self.rank} lost rank 0 while it connected: {exc}", ranks=(0,)) from exc
        if not hmac.compare_digest(proof, self._sign(b"leader", mine)):
            raise ConfigurationError(
                f"rank {self.rank}: rank 0 did not accept this process, or does not know the job's secret. "
                "Two jobs with the same identity? Ranks with different WORLD_SIZE?"
            )

    def _sign(self, role: bytes, nonce: bytes) -> bytes:
        return hmac.digest(self._secret or b"unidist", role + nonce, "sha256")

    def _collect(self, deadline: float) -> dict[int, Contribution]:
        """Receive from every peer, in whatever order they come."""
        found: dict[int, Contribution] = {}
        waiting = {peer.fileno(): rank for rank, peer in self._peers.items()}
        poller = select.poll()
        for descriptor in waiting:
            poller.register(descriptor, select.POLLIN)
        if self._interrupt is not None:
            poller.register(self._interrupt, select.POLLIN)
        while waiting:
            ready = poller.poll(max(0.0, 1000 * (deadline - time.monotonic())))
            self._check_interrupt()
            if not ready:
                missing = sorted(waiting.values())
                raise StalledError(f"init: rank(s) {format_ranks(missing)} did not answer in time", ranks=missing)
            for descriptor, _ in ready:
                rank = waiting.pop(descriptor)
                poller.unregister(descriptor)
                found[rank] = self._receive(rank, deadline)
        return found

    def _wait(self, connection: socket.socket, deadline: float) -> bool:
        """Wait until there is something to read; False if there is not in time.

        Raises:
            PeerLostError: it was interrupted.
        """
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        if self._interrupt is not None:
            poller.register(self._interrupt, select.POLLIN)
        ready = poller.poll(max(0.0, 1000 * (deadline - time.monotonic())))
        self._check_interrupt()
        return bool(ready)

    def _check_interrupt(self) -> None:
        if self._interrupt is not None and self._interrupt.reason:
            raise PeerLostError(f"rank {self.rank} was interrupted during init: {self._interrupt.reason}")

    def _send(self, peer: int, message: bytes, fds: Sequence[int]) -> None:
        try:
            socket.send_fds(self._peers[peer], [message], list(fds))
        except OSError as exc:
            if message[:1] == _DATA:
                self._raise_farewell(peer)
            raise PeerLostError(f"rank {self.rank} lost rank {peer} during init: {exc}", ranks=(peer,)) from exc

    def _receive(self, peer: int, deadline: float) -> Contribution:
        connection = self._peers[peer]
        self._wait(connection, deadline)
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            try:
                message, fds = _receive_fds(connection)
            except ConnectionResetError:
                # It closed with something of ours unread. What it had said before comes after this error.
                message, fds = _receive_fds(connection)
        except TimeoutError:
            raise StalledError(f"init: rank {self.rank} waited for rank {peer} in vain", ranks=(peer,)) from None
        except OSError as exc:
            raise PeerLostError(f"rank {self.rank} lost rank {peer} during init: {exc}", ranks=(peer,)) from exc
        if not message:
            raise PeerLostError(f"rank {peer} died or left during init (seen on rank {self.rank})", ranks=(peer,))
        if message[:1] == _ERROR:
            raise _told_error(message)
        return Contribution(message[1:], tuple(fds))

    def _raise_farewell(self, peer: int) -> None:
        """Raise the error that a peer told before it closed the connection, if it did."""
        with contextlib.suppress(OSError):
            self._peers[peer].settimeout(0.001)
            message, fds = _receive_fds(self._peers[peer])
            for descriptor in fds:
                os.close(descriptor)
            if message[:1] == _ERROR:
                raise _told_error(message)


def _told_error(message: bytes) -> PeerLostError:
    """Return the error in a message of another rank."""
    kind, _, text = message[1:].decode().partition("\0")
    return StalledError(text) if kind == "StalledError" else PeerLostError(text)


def _receive_fds(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one message with its descriptors, which are closed on exec."""
    numbers = array.array("i")
    message, ancillary, _, _ = connection.recvmsg(
        _MAX_MESSAGE + 1, socket.CMSG_SPACE(_MAX_FDS * numbers.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return message, list(numbers)


def _check_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    if uid != os.getuid():
        raise ConfigurationError(f"process {pid} of user {uid} is not of this user ({os.getuid()})")
