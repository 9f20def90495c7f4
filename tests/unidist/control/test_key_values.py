"""Keys and values that ranks share while they connect: only with the secret, and no rank waits for a lost one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from unidist.control import ControlServer, KeyValues, KeyValueService
from unidist.errors import PeerLostError, StalledError

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
        waiting.wait(["a"], timedelta(seconds=0.2))
    began = time.monotonic()
    threading.Timer(0.1, dying._client.close).start()  # type: ignore[union-attr]  # as if its process had ended
    with pytest.raises(PeerLostError, match=r"rank\(s\) 2 were lost") as raised:
        waiting.wait(["a"], WAIT)
    assert raised.value.ranks == (2,)
    assert time.monotonic() - began < 10
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
