"""Keys and values that ranks share while they connect: only with the secret, and no rank waits for a lost one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta

import pytest

from unidist.control import (
    Action,
    ControlServer,
    KeyValues,
    KeyValueService,
    Message,
    Send,
    Service,
    WithKeyValues,
    job_values,
)
from unidist.control.client import ControlClient
from unidist.errors import ConfigurationError, PeerLostError, StalledError

pytestmark = pytest.mark.usefixtures("leak_check")
SECRET = b"s" * 32
WAIT = timedelta(seconds=30)


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with ControlServer(KeyValueService(), SECRET, host="127.0.0.1") as made:
        yield made


def client(server: ControlServer, rank: int = 0, secret: bytes = SECRET) -> KeyValues:
    return KeyValues(("127.0.0.1", server.port), secret, rank=rank, timeout=WAIT)


def test_a_value_that_one_sets_another_waits_for(server: ControlServer) -> None:
    first, second = client(server, 0), client(server, 1)
    thread = threading.Timer(0.1, first.set, ("a", b"\0\xff"))
    thread.start()
    assert second.wait(["a"], WAIT) == [b"\0\xff"]
    assert second.present(["a"])
    assert not second.present(["a", "b"])
    thread.join()
    with pytest.raises(StalledError, match=r"b did not come in 0\.05 s"):
        second.wait(["a", "b"], timedelta(seconds=0.05))
    first.close()
    second.close()


def test_without_the_secret_nothing_is_told(server: ControlServer) -> None:
    own = client(server)
    own.set("a", b"private")
    with pytest.raises(PeerLostError, match="cannot be read"):
        client(server, 1, b"t" * 32)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(b"\0" * 4096)  # whatever a stranger says
        received = b""
        while data := _receive(sock):
            received += data
    assert b"private" not in received
    assert own.wait(["a"], WAIT) == [b"private"]
    own.close()


def test_who_waits_is_told_of_a_rank_that_was_lost_and_not_of_one_that_has_left(server: ControlServer) -> None:
    waiting, leaving, dying = client(server, 0), client(server, 1), client(server, 2)
    leaving.close()
    with pytest.raises(StalledError):
        waiting.wait(["a"], timedelta(seconds=0.05))
    threading.Timer(0.05, dying._client.close).start()  # type: ignore[union-attr]  # as if its process had ended
    with pytest.raises(PeerLostError, match=r"rank\(s\) 2 were lost") as raised:
        waiting.wait(["a"], WAIT)
    assert raised.value.ranks == (2,)
    waiting.close()


def test_who_waits_for_a_process_that_has_ended_is_told() -> None:
    service = KeyValueService()
    with ControlServer(service, SECRET, host="127.0.0.1") as made:
        waiting = client(made, 0)
        waiting.set("a", b"1")
        made.call(lambda: service.note_end("ps 1", "killed by signal 9"))
        with pytest.raises(PeerLostError, match="rank 0: a, b will not come: ps 1 has ended: killed by signal 9"):
            waiting.wait(["a", "b"], WAIT, of=["ps 0", "ps 1"])
        assert waiting.wait(["a"], WAIT, of=["ps 1"]) == [b"1"]
        with pytest.raises(StalledError):
            waiting.wait(["b"], timedelta(seconds=0.2), of=["ps 0"])
        waiting.close()


def test_waits_end_with_the_server() -> None:
    with ControlServer(KeyValueService(), SECRET, host="127.0.0.1") as made:
        waiting = client(made)
        threading.Timer(0.1, made.close).start()
        with pytest.raises(PeerLostError, match="Has rank 0 ended"):
            waiting.wait(["a"], WAIT)
        waiting.close()


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(4096)
    except ConnectionResetError:
        return b""


def test_of_several_claims_the_first_holds(server: ControlServer) -> None:
    first, second = client(server, 0), client(server, 1)
    assert second.claim("a", b"second") == b"second"
    assert first.claim("a", b"first") == b"second"
    assert first.wait(["a"], WAIT) == [b"second"]
    first.close()
    second.close()


def test_one_that_is_no_rank_ends_nobodys_wait(server: ControlServer) -> None:
    waiting = client(server, 1)
    beside = KeyValues(("127.0.0.1", server.port), SECRET, rank=None, name="ps 0", timeout=WAIT)
    beside.set("a", b"1")
    assert beside.get(["a", "b"]) == [b"1", None]
    assert beside._client is not None
    beside._client.close()  # without a goodbye
    with pytest.raises(StalledError, match="rank 1: b did not come"):
        waiting.wait(["b"], timedelta(seconds=0.5))
    waiting.close()


class _Hello(Message):
    text: str


class _Echo(Service):
    def received(self, peer: int, message: Message, now: float) -> Iterable[Action]:
        return [Send(peer, message)]

    def lost(self, peer: int, reason: str, now: float) -> Iterable[Action]:
        return ()

    def tick(self, now: float) -> Iterable[Action]:
        return ()


def test_values_beside_another_service_on_one_port() -> None:
    with (
        ControlServer(WithKeyValues(_Echo(), KeyValueService()), SECRET, host="127.0.0.1") as made,
        ControlClient(("127.0.0.1", made.port), SECRET, timeout=30) as other,
    ):
        values = KeyValues(("127.0.0.1", made.port), SECRET, rank=0, timeout=WAIT)
        values.set("a", b"1")
        other.send(_Hello("agent"), timeout=30)
        assert other.receive(timeout=30) == _Hello("agent")
        assert values.get(["a"]) == [b"1"]
        values.close()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "this process: UNIDIST_JOB_VALUES is not set"),
        ({"UNIDIST_RANK": "3"}, "rank 3: UNIDIST_JOB_VALUES is not set"),
        ({"UNIDIST_JOB_VALUES": "nowhere"}, "is not HOST:PORT"),
        (
            {"UNIDIST_JOB_VALUES": "h1:1", "UNIDIST_ROLE": "ps", "UNIDIST_ROLE_INDEX": "2"},
            "ps 2: UNIDIST_SECRET_FD is not set",
        ),
    ],
)
def test_no_values(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        job_values(environ)
