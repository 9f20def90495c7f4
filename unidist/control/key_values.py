"""Keys and values that the processes of a job share while an engine connects: authenticated, and served by one of them.

Messages of a client, and the answers:

    member   its rank                  -> none; a rank whose connection ends without `leave` is lost
    set      key, value                -> done
    get      keys                      -> values; null where there is none yet, and which ranks are lost
    leave                              -> none
"""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

from typing_extensions import override

from unidist.communicator import format_ranks
from unidist.control.client import ControlClient
from unidist.control.connection import Address, ConnectionLost
from unidist.control.service import Action, Send, Service
from unidist.control.wire import Message, WireError
from unidist.errors import PeerLostError, StalledError

_FIRST_PAUSE_SEC = 0.001
_LONGEST_PAUSE_SEC = 0.05
_LEAVE_SEC = 1.0
_ANSWER_SEC = 60.0
"""The server answers at once, unless its host is gone without a word, or its process holds Python's lock."""


class KeyValueService(Service):
    """Keeps the values; for a `ControlServer`."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._ranks: dict[int, int] = {}
        self._lost: set[int] = set()

    @override
    def received(self, peer: int, message: Message, now: float) -> Iterator[Action]:
        kind = message["type"]
        if kind == "member":
            self._ranks[peer] = int(message["rank"])
        elif kind == "set":
            self._values[str(message["key"])] = str(message["value"])
            yield Send(peer, {"type": "done"})
        elif kind == "get":
            found = [self._values.get(str(key)) for key in message["keys"]]
            yield Send(peer, {"type": "values", "values": found, "lost": sorted(self._lost)})
        elif kind == "leave":
            self._ranks.pop(peer, None)
        else:
            raise ValueError(f"unknown message {kind!r}")

    @override
    def lost(self, peer: int, reason: str, now: float) -> Iterator[Action]:
        rank = self._ranks.pop(peer, None)
        if rank is not None:
            self._lost.add(rank)
        yield from ()

    @override
    def tick(self, now: float) -> Iterator[Action]:
        yield from ()


class KeyValues:
    """A rank's view of the shared values. From any thread.

    Args:
        address: of the server.
        secret: of the values; both ends prove that they know it.
        rank: of this process, for messages on all ranks.
        timeout: longest wait for the server's answer; a minute at most.

    Raises:
        PeerLostError: the server is gone, or does not know the secret.
        StalledError: it does not answer.
    """

    def __init__(self, address: Address, secret: bytes, *, rank: int, timeout: timedelta) -> None:
        self._rank = rank
        self._timeout_sec = min(timeout.total_seconds(), _ANSWER_SEC)
        self._lock = threading.Lock()
        self._client: ControlClient | None = None
        with self._translated():
            self._client = ControlClient(address, secret, timeout=self._timeout_sec)
            self._client.send({"type": "member", "rank": rank}, timeout=self._timeout_sec)

    def set(self, key: str, value: bytes) -> None:
        """Set a value. Raises as the class."""
        self._ask({"type": "set", "key": key, "value": base64.b64encode(value).decode()})

    def present(self, keys: Sequence[str]) -> bool:
        """Return whether all of these have a value. Raises as the class."""
        return None not in self._ask({"type": "get", "keys": list(keys)})["values"]

    def wait(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        """Return the values of these keys, in their order, when all have one.

        Raises:
            StalledError: they have none after `timeout`.
            PeerLostError: a rank was lost before it set them, or the server is gone.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        pause = _FIRST_PAUSE_SEC
        while True:
            answer = self._ask({"type": "get", "keys": list(keys)})
            if None not in answer["values"]:
                return [base64.b64decode(value) for value in answer["values"]]
            if answer["lost"]:
                raise PeerLostError(
                    f"rank {self._rank}: rank(s) {format_ranks(answer['lost'])} were lost while the ranks connected",
                    ranks=answer["lost"],
                )
            if time.monotonic() + pause > deadline:
                missing = [key for key, value in zip(keys, answer["values"], strict=True) if value is None]
                raise StalledError(
                    f"rank {self._rank}: {', '.join(missing)} did not come in {timeout.total_seconds():g} s"
                )
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_SEC, 2 * pause)

    def close(self) -> None:
        """Leave, and close the connection. Idempotent."""
        with self._lock:
            client, self._client = self._client, None
            if client is not None:
                with contextlib.suppress(ConnectionLost, WireError, TimeoutError):
                    client.send({"type": "leave"}, timeout=_LEAVE_SEC)
                client.close()

    def _ask(self, message: Message) -> Message:
        with self._lock, self._translated():
            if self._client is None:
                raise ConnectionLost("this end is closed")
            self._client.send(message, timeout=self._timeout_sec)
            return self._client.receive(timeout=self._timeout_sec)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        where = f"rank {self._rank}: the keys that ranks share while they connect"
        try:
            yield
        except TimeoutError as exc:
            raise StalledError(f"{where} cannot be read: {exc}") from exc
        except (ConnectionLost, WireError) as exc:
            raise PeerLostError(f"{where} cannot be read: {exc}. Has rank 0 ended?") from exc


__all__ = ["KeyValueService", "KeyValues"]
