"""The protocol of a control connection: a mutual proof of the secret, then authenticated frames.

Pure: bytes in, messages and bytes out. A client speaks first, and its first message may follow its proof at once:

    client -> server   MAGIC, client nonce
    server -> client   MAGIC, server nonce, HMAC(secret, "server", both nonces)
    client -> server   HMAC(secret, "client", both nonces)

After that each direction has its own key, derived from the secret and both nonces. A frame is its length (4
bytes), an HMAC-SHA256 over the frame's number in this direction and its payload, and the payload: a message (`codec`).
So a frame cannot be forged, repeated, left out or moved to another connection. It can be read: nothing here is
encrypted. Until the proof is complete an end accepts a fixed number of bytes, and nothing is ever unpickled.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from enum import Enum, auto

from unidist.control.codec import MAX_FRAME_BYTES, Message, WireError, decode, encode

MAGIC = b"unidist\x02"

_NONCE_BYTES = 32
_TAG_BYTES = 32
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")


class _Stage(Enum):
    GREETING = auto()  # waiting for the other's nonce, a client for its proof, too
    PROOF = auto()  # the server waits for the client's proof
    OPEN = auto()


class Wire:
    """One end of a connection.

    Args:
        secret: the job's secret, at least one byte.
        is_server: this end accepted the connection.
    """

    def __init__(self, secret: bytes, *, is_server: bool) -> None:
        if not secret:
            raise ValueError("a control connection needs a secret")
        self._secret = secret
        self._is_server = is_server
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._their_nonce = b""
        self._received = bytearray()
        self._output = bytearray()
        self._keys: tuple[hmac.HMAC, ...] = ()  # for what is sent, for what is received
        self._numbers = [0, 0]
        self._stage = _Stage.GREETING
        if not is_server:
            self._output += MAGIC + self._nonce

    @property
    def is_open(self) -> bool:
        """Return whether both ends have proved that they know the secret."""
        return self._stage is _Stage.OPEN

    @property
    def is_unproved(self) -> bool:
        """Return whether the other end has begun to speak this protocol, and has not proved the secret yet."""
        return self._stage is _Stage.PROOF

    def take_output(self) -> bytes:
        """Return the bytes to send now; each byte is returned once."""
        data = bytes(self._output)
        self._output.clear()
        return data

    def send(self, message: Message) -> None:
        """Add a message to the output.

        Raises:
            ValueError: it is longer than MAX_FRAME_BYTES.
        """
        self.send_encoded(encode(message))

    def send_encoded(self, payload: bytes) -> None:
        """Add a message that `encode` has made to the output: one that goes to many is encoded once."""
        assert self.is_open, "messages travel after the handshake"
        self._output += _LENGTH.pack(len(payload)) + self._tag(0, payload) + payload
        self._numbers[0] += 1

    def receive(self, data: bytes) -> list[Message]:
        """Take bytes from the other end and return the messages that they complete.

        Raises:
            WireError: see there; says what was wrong.
        """
        self._received += data
        if self._stage is _Stage.GREETING:
            self._read_greeting()
        if self._stage is _Stage.PROOF:
            self._read_proof()
        messages = []
        while self._stage is _Stage.OPEN and (message := self._read_frame()) is not None:
            messages.append(message)
        return messages

    def _read_greeting(self) -> None:
        if not MAGIC.startswith(bytes(self._received[: len(MAGIC)])):
            what = "client" if self._is_server else "server"
            raise WireError(f"this is no control {what} of unidist, or one of another version")
        greeting = self._take(len(MAGIC) + _NONCE_BYTES + (0 if self._is_server else _TAG_BYTES))
        if greeting is None:
            return
        start = len(MAGIC) + _NONCE_BYTES
        self._their_nonce, proof = greeting[len(MAGIC) : start], greeting[start:]
        if self._is_server:
            self._output += MAGIC + self._nonce + self._proof(b"server")
            self._stage = _Stage.PROOF
        else:
            self._check(proof, b"server")
            self._output += self._proof(b"client")
            self._open()

    def _read_proof(self) -> None:
        proof = self._take(_TAG_BYTES)
        if proof is not None:
            self._check(proof, b"client")
            self._open()

    def _check(self, proof: bytes, role: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof(role)):
            raise WireError("the other end does not know the job's secret")

    def _open(self) -> None:
        # Copies of these need no key again, and do not let go of Python's lock for each message.
        to_server, to_client = (
            hmac.new(self._proof(role), digestmod="sha256") for role in (b"to server", b"to client")
        )
        self._keys = (to_client, to_server) if self._is_server else (to_server, to_client)
        self._stage = _Stage.OPEN

    def _read_frame(self) -> Message | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > MAX_FRAME_BYTES:
            raise WireError(f"a message says to have {length} bytes; {MAX_FRAME_BYTES} are allowed")
        frame = self._take(_LENGTH.size + _TAG_BYTES + length)
        if frame is None:
            return None
        tag, payload = frame[_LENGTH.size : _LENGTH.size + _TAG_BYTES], frame[_LENGTH.size + _TAG_BYTES :]
        if not hmac.compare_digest(tag, self._tag(1, payload)):
            raise WireError("a message was changed on its way, or is not from the other end")
        self._numbers[1] += 1
        return decode(payload)

    def _take(self, count: int) -> bytes | None:
        """Return the next `count` bytes, None while there are fewer."""
        if len(self._received) < count:
            return None
        data = bytes(self._received[:count])
        del self._received[:count]
        return data

    def _proof(self, role: bytes) -> bytes:
        server, client = (self._nonce, self._their_nonce) if self._is_server else (self._their_nonce, self._nonce)
        return hmac.digest(self._secret, role + b"\0" + server + client, "sha256")

    def _tag(self, direction: int, payload: bytes) -> bytes:
        tag = self._keys[direction].copy()
        tag.update(_NUMBER.pack(self._numbers[direction]))
        tag.update(payload)
        return tag.digest()


__all__ = ["MAGIC", "Wire"]
