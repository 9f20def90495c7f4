"""Keys and values that the processes of a job share: authenticated, and served by one of them.

Ranks share them while an engine connects. In a job with processes beside its ranks the launcher serves some as well, by
which all of these find each other (`job_values`).

Messages of a client, and the answers:

    Member        -> none; a rank whose connection ends without `LeaveValues` is lost
    SetValue      -> Values without any
    ClaimValue    -> Values with the one that the key has now: this one, or the one that it had
    GetValues     -> Values; None where there is none yet, and which ranks are lost, and which of the processes beside
                     the ranks whose names are given have ended, and why
    LeaveValues   -> none
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta

from typing_extensions import override

from unidist.communicator import format_ranks
from unidist.control.client import ControlClient
from unidist.control.codec import Message, WireError, unexpected
from unidist.control.connection import Address, ConnectionLost
from unidist.control.messages import ClaimValue, GetValues, LeaveValues, Member, SetValue, Values
from unidist.control.service import Action, Send, Service
from unidist.errors import PeerLostError, StalledError
from unidist.settings.placement import values_place

_FIRST_PAUSE_SEC = 0.001
_LONGEST_PAUSE_SEC = 0.05
_LEAVE_SEC = 1.0
_ANSWER_SEC = 60.0
"""The server answers at once, unless its host is gone without a word, or its process holds Python's lock."""


class KeyValueService(Service):
    """Keeps the values; for a `ControlServer`."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._ranks: dict[int, int] = {}
        self._lost: set[int] = set()
        self._ended: dict[str, str] = {}

    def note_end(self, name: str, reason: str) -> Iterable[Action]:
        """A process beside the ranks has ended, which nobody had asked for: who waits for its values is told.

        Args:
            name: "ps 0".
            reason: "killed by signal 9 (SIGKILL)".
        """
        self._ended[name] = reason
        return ()

    @override
    def received(self, peer: int, message: Message, now: float) -> Iterator[Action]:
        match message:
            case Member(rank):
                if rank is not None:
                    self._ranks[peer] = rank
            case SetValue(key, value):
                self._values[key] = value
                yield Send(peer, Values())
            case ClaimValue(key, value):
                yield Send(peer, Values((self._values.setdefault(key, value),)))
            case GetValues(keys, of):
                found = tuple(self._values.get(key) for key in keys)
                ended = {name: self._ended[name] for name in of if name in self._ended}
                yield Send(peer, Values(found, tuple(sorted(self._lost)), ended))
            case LeaveValues():
                self._ranks.pop(peer, None)
            case _:
                raise unexpected(message)

    @override
    def lost(self, peer: int, reason: str, now: float) -> Iterator[Action]:
        rank = self._ranks.pop(peer, None)
        if rank is not None:
            self._lost.add(rank)
        yield from ()

    @override
    def tick(self, now: float) -> Iterator[Action]:
        yield from ()


class WithKeyValues(Service):
    """Serves values beside another service, on the same port. A peer whose first message is `Member` is theirs.

    Args:
        service: of all other peers.
        values: the values.
    """

    def __init__(self, service: Service, values: KeyValueService) -> None:
        self._service = service
        self._values = values
        self._members: set[int] = set()

    @override
    def received(self, peer: int, message: Message, now: float) -> Iterable[Action]:
        if isinstance(message, Member):
            self._members.add(peer)
        return self._of(peer).received(peer, message, now)

    @override
    def lost(self, peer: int, reason: str, now: float) -> Iterable[Action]:
        service = self._of(peer)
        self._members.discard(peer)
        return service.lost(peer, reason, now)

    @override
    def stood_still(self, seconds: float, now: float) -> None:
        self._service.stood_still(seconds, now)

    @override
    def tick(self, now: float) -> Iterable[Action]:
        return self._service.tick(now)

    def _of(self, peer: int) -> Service:
        return self._values if peer in self._members else self._service


class KeyValues:
    """A process's view of the shared values. From any thread.

    Args:
        address: of the server.
        secret: of the values; both ends prove that they know it.
        rank: of this process, for messages on all ranks; its loss ends the others' waiting. None: this is no rank, or
            the others go on without it.
        name: of this process in errors; default: its rank.
        served_by: what serves the values, for errors.
        timeout: longest wait for the server's answer; a minute at most.

    Raises:
        PeerLostError: the server is gone, or does not know the secret.
        StalledError: it does not answer.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        *,
        rank: int | None,
        timeout: timedelta,
        name: str = "",
        served_by: str = "rank 0",
    ) -> None:
        self._name = name or f"rank {rank}"
        self._served_by = served_by
        self._timeout_sec = min(timeout.total_seconds(), _ANSWER_SEC)
        self._lock = threading.Lock()
        self._client: ControlClient | None = None
        with self._translated():
            self._client = ControlClient(address, secret, timeout=self._timeout_sec)
            self._client.send(Member(rank), timeout=self._timeout_sec)

    def set(self, key: str, value: bytes) -> None:
        """Set a value. Raises as the class."""
        self._ask(SetValue(key, value))

    def claim(self, key: str, value: bytes) -> bytes:
        """Set a value unless the key has one, and return the one that it has then. Of several processes, one wins.

        Raises as the class.
        """
        (held,) = self._ask(ClaimValue(key, value)).values
        assert held is not None
        return held

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of these keys, None where there is none yet. Raises as the class."""
        return list(self._ask(GetValues(tuple(keys))).values)

    def present(self, keys: Sequence[str]) -> bool:
        """Return whether all of these have a value. Raises as the class."""
        return None not in self._ask(GetValues(tuple(keys))).values

    def wait(self, keys: Sequence[str], timeout: timedelta, *, of: Sequence[str] = ()) -> list[bytes]:
        """Return the values of these keys, in their order, when all have one.

        Args:
            keys: of the values.
            timeout: longest wait.
            of: processes beside the ranks that are to set them, by name ("ps 0").

        Raises:
            StalledError: they have none after `timeout`.
            PeerLostError: a rank was lost, or one of these processes has ended, before they were set, or the server is
                gone.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        pause = _FIRST_PAUSE_SEC
        while True:
            answer = self._ask(GetValues(tuple(keys), tuple(of)))
            found = [value for value in answer.values if value is not None]
            if len(found) == len(keys):
                return found
            if answer.lost:
                raise PeerLostError(
                    f"{self._name}: rank(s) {format_ranks(answer.lost)} were lost while the ranks connected",
                    ranks=answer.lost,
                )
            if answer.ended:
                ends = "; ".join(f"{name} has ended: {reason}" for name, reason in answer.ended.items())
                raise PeerLostError(f"{self._name}: {', '.join(keys)} will not come: {ends}")
            if time.monotonic() + pause > deadline:
                missing = [key for key, value in zip(keys, answer.values, strict=True) if value is None]
                raise StalledError(f"{self._name}: {', '.join(missing)} did not come in {timeout.total_seconds():g} s")
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_SEC, 2 * pause)

    def close(self) -> None:
        """Leave, and close the connection. Idempotent."""
        with self._lock:
            client, self._client = self._client, None
            if client is not None:
                with contextlib.suppress(ConnectionLost, WireError, TimeoutError):
                    client.send(LeaveValues(), timeout=_LEAVE_SEC)
                client.close()

    def _ask(self, message: Message) -> Values:
        with self._lock, self._translated():
            if self._client is None:
                raise ConnectionLost("this end is closed")
            self._client.send(message, timeout=self._timeout_sec)
            answer = self._client.receive(timeout=self._timeout_sec)
            if not isinstance(answer, Values):
                raise unexpected(answer)
            return answer

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        where = f"{self._name}: the values that the processes of the job share"
        try:
            yield
        except TimeoutError as exc:
            raise StalledError(f"{where} cannot be read: {exc}") from exc
        except (ConnectionLost, WireError) as exc:
            raise PeerLostError(f"{where} cannot be read: {exc}. Has {self._served_by} ended?") from exc


def job_values(
    environ: Mapping[str, str] | None = None, *, name: str = "", timeout: timedelta = timedelta(seconds=60)
) -> KeyValues:
    """Connect to the values that all processes of this job share: its ranks, and those beside them.

    The launcher serves them in a job with processes beside its ranks, for as long as the job runs. They are for
    addresses and the like: small, and set once. A process that ends leaves its values there, and ends nobody's `wait`.

    Args:
        environ: the environment; default: that of this process.
        name: of this process in errors; default: its role and index, or its rank.
        timeout: longest wait for the launcher's answer; a minute at most.

    Raises:
        ConfigurationError: nothing serves such values: this is no process of `unidist launch`, or its job has no
            processes beside the ranks.
        PeerLostError: the launcher is gone.
        StalledError: it does not answer.
    """
    place = values_place(environ)
    return KeyValues(
        place.address, place.secret, rank=None, name=name or place.name, served_by="`unidist launch`", timeout=timeout
    )


__all__ = ["KeyValueService", "KeyValues", "WithKeyValues", "job_values"]
