"""The proof, on each connection between two ranks, that both know the secret of their job. Pure: bytes in, bytes out.

    acceptor  -> connector   greeting, nonce
    connector -> acceptor    greeting, nonce, session, its rank, the lane, HMAC(secret, "connect", all of this)
    acceptor  -> connector   HMAC(secret, "accept", the same)

A greeting is MAGIC and whether what follows is encrypted. The proofs cover both nonces, both ranks and the greeting.
If it is encrypted, TLS begins after the handshake, with a key that both derive: HMAC(secret, "tls", the same). So only
an end that has proved the secret gets to speak to OpenSSL, and no two connections have the same key.

The session is a random name for one `connect` of a job: a connection of an earlier generation is refused. Neither side
reads more than a fixed number of bytes, and what follows the handshake is left in the socket.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import sys
from dataclasses import dataclass

from unidist.errors import UnidistError

PROTOCOL = 2
"""Version of handshake and frames. Ranks of different versions do not connect."""

SESSION_BYTES = 16
_NAME = b"unidist tcp\0"
MAGIC = _NAME + bytes([PROTOCOL]) + (b"L" if sys.byteorder == "little" else b"B")
_NONCE_BYTES = 32
_TAG_BYTES = 32
_PLACE = struct.Struct("!II")
_MODES = {False: b"\0", True: b"\1"}
_MAGIC_BYTES = len(MAGIC) + 1
GREETING_BYTES = _MAGIC_BYTES + _NONCE_BYTES
ANSWER_BYTES = GREETING_BYTES + SESSION_BYTES + _PLACE.size + _TAG_BYTES


class HandshakeError(UnidistError):
    """The other end is no rank of this job, or of another version. The connection is of no use."""


@dataclass(frozen=True)
class Session:
    """Facts about one `connect` that all ranks of a job know.

    Args:
        secret: at least one byte.
        name: `SESSION_BYTES` random bytes.
        size: number of ranks.
        num_lanes: connections between each two ranks.
        is_encrypted: TLS follows the handshake.
    """

    secret: bytes
    name: bytes
    size: int
    num_lanes: int
    is_encrypted: bool = False

    @property
    def magic(self) -> bytes:
        """Return the first bytes of a greeting."""
        return MAGIC + _MODES[self.is_encrypted]

    def tag(self, role: bytes, nonces: bytes, rank: int, to: int, lane: int) -> bytes:
        """Return the proof of one end."""
        text = role + b"\0" + self.magic + nonces + self.name + _PLACE.pack(rank, to) + _PLACE.pack(lane, self.size)
        return hmac.digest(self.secret, text, "sha256")


class Acceptor:
    """The end that accepted a connection; it speaks first.

    Args:
        session: of this job.
        rank: of this process.

    Attributes:
        output: to be sent; the caller removes what it has sent.
        peer: rank and lane of the other end, once it has proved the secret; None before.
        key: of this connection, for TLS; empty before.
    """

    def __init__(self, session: Session, rank: int) -> None:
        self._session = session
        self._rank = rank
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._received = bytearray()
        self.output = bytearray(session.magic + self._nonce)
        self.peer: tuple[int, int] | None = None
        self.key = b""

    @property
    def wanted_bytes(self) -> int:
        """Return how many bytes may be read from the connection."""
        return 0 if self.peer else ANSWER_BYTES - len(self._received)

    def receive(self, data: bytes) -> None:
        """Take bytes of the other end, `wanted_bytes` at most.

        Raises:
            HandshakeError: it is no rank of this job; says what was wrong.
        """
        assert len(data) <= self.wanted_bytes, "more was read than the handshake has"
        self._received += data
        _check_magic(bytes(self._received[:_MAGIC_BYTES]), self._session)
        if len(self._received) < ANSWER_BYTES:
            return
        start = _MAGIC_BYTES
        nonce = bytes(self._received[start : start + _NONCE_BYTES])
        start += _NONCE_BYTES
        name = bytes(self._received[start : start + SESSION_BYTES])
        start += SESSION_BYTES
        rank, lane = _PLACE.unpack_from(self._received, start)
        session, nonces = self._session, self._nonce + nonce
        expected = session.tag(b"connect", nonces, rank, self._rank, lane)
        if name != session.name:
            raise HandshakeError("the other end is of another job or generation")
        if not hmac.compare_digest(expected, bytes(self._received[-_TAG_BYTES:])):
            raise HandshakeError("the other end does not know the job's secret")
        # Ranks connect to those below them.
        if not self._rank < rank < session.size or lane >= session.num_lanes:
            raise HandshakeError(f"the other end says to be rank {rank}, connection {lane}, which is none")
        self.output += session.tag(b"accept", nonces, rank, self._rank, lane)
        self.key = session.tag(b"tls", nonces, rank, self._rank, lane)
        self.peer = rank, lane


class Connector:
    """The end that made a connection.

    Args:
        session: of this job.
        rank: of this process.
        to: rank of the other end.
        lane: number of the connection between the two.

    Attributes:
        output: to be sent; the caller removes what it has sent.
        is_open: the other end has proved the secret.
        key: of this connection, for TLS; empty before.
    """

    def __init__(self, session: Session, rank: int, to: int, lane: int) -> None:
        self._session = session
        self._place = rank, to, lane
        self._nonces = b""
        self._received = bytearray()
        self.output = bytearray()
        self.is_open = False
        self.key = b""

    @property
    def wanted_bytes(self) -> int:
        """Return how many bytes may be read from the connection."""
        if self.is_open:
            return 0
        return (_TAG_BYTES if self._nonces else GREETING_BYTES) - len(self._received)

    def receive(self, data: bytes) -> None:
        """Take bytes of the other end, `wanted_bytes` at most.

        Raises:
            HandshakeError: it is no rank of this job; says what was wrong.
        """
        assert len(data) <= self.wanted_bytes, "more was read than the handshake has"
        self._received += data
        rank, to, lane = self._place
        if not self._nonces:
            _check_magic(bytes(self._received[:_MAGIC_BYTES]), self._session)
            if len(self._received) == GREETING_BYTES:
                own = secrets.token_bytes(_NONCE_BYTES)
                self._nonces = bytes(self._received[_MAGIC_BYTES:]) + own
                tag = self._session.tag(b"connect", self._nonces, rank, to, lane)
                self.output += self._session.magic + own + self._session.name + _PLACE.pack(rank, lane) + tag
                self._received.clear()
        elif len(self._received) == _TAG_BYTES:
            expected = self._session.tag(b"accept", self._nonces, rank, to, lane)
            if not hmac.compare_digest(expected, bytes(self._received)):
                raise HandshakeError(f"what listens at the address of rank {to} does not know the job's secret")
            self.key = self._session.tag(b"tls", self._nonces, rank, to, lane)
            self.is_open = True


def _check_magic(start: bytes, session: Session) -> None:
    if session.magic.startswith(start):
        return
    if start.startswith(MAGIC):
        raise HandshakeError(
            "this rank encrypts its connections, and the other end does not; give --tls to all"
            if session.is_encrypted
            else "the other end encrypts its connections, and this rank does not; give --tls to all"
        )
    if start.startswith(_NAME):
        raise HandshakeError("the other end has another version of unidist, or another byte order; install one version")
    raise HandshakeError("the other end does not speak unidist's protocol")
