"""Server and client over real sockets: every wait ends, strangers do no harm, nothing stays."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Iterable, Iterator

import pytest

from unidist.control import server as server_module
from unidist.control import wire as wire_module
from unidist.control.client import ConnectionLost, ControlClient
from unidist.control.codec import Message, WireError
from unidist.control.connection import Connection
from unidist.control.server import ControlServer
from unidist.control.service import Action, Drop, Publish, Send, Service
from unidist.control.wire import MAGIC

pytestmark = pytest.mark.usefixtures("leak_check")

SECRET = b"s" * 32


class Said(Message):
    """What clients and servers say here."""

    text: str


class Echo(Service):
    """Sends back what it gets, and publishes who is lost."""

    def received(self, peer: int, message: Message, now: float) -> Iterable[Action]:
        if message == Said("drop me"):
            return [Send(peer, Said("farewell")), Drop(peer, "as it wished")]
        if message == Said("nonsense"):
            raise KeyError("rank")
        assert isinstance(message, Said)
        return [Send(peer, message), Publish(message.text)]

    def lost(self, peer: int, reason: str, now: float) -> Iterable[Action]:
        return [Publish(("lost", reason))]

    def tick(self, now: float) -> Iterable[Action]:
        return ()


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with ControlServer(Echo(), SECRET) as running:
        yield running


def client(server: ControlServer, secret: bytes = SECRET) -> ControlClient:
    return ControlClient(("127.0.0.1", server.port), secret, timeout=30)


def works(server: ControlServer) -> None:
    """Check that the server serves."""
    with client(server) as mine:
        mine.send(Said("hello"), timeout=30)
        assert mine.receive(timeout=30) == Said("hello")


def events(server: ControlServer, number: int) -> list[object]:
    found: list[object] = []
    deadline = time.monotonic() + 30
    while len(found) < number and time.monotonic() < deadline:
        found += server.take_events()
        time.sleep(0.005)
    return found


def test_messages_go_there_and_back_large_ones_too(server: ControlServer) -> None:
    with client(server) as mine:
        message = Said("big" * (4 << 20))
        mine.send(message, timeout=30)
        assert mine.receive(timeout=30) == message
    assert events(server, 2)[0] == "big" * (4 << 20)


def test_a_client_that_is_gone_is_reported(server: ControlServer) -> None:
    works(server)
    kinds = events(server, 2)
    assert kinds[0] == "hello"
    assert kinds[1][0] == "lost"  # type: ignore[index]


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        b"[1, 2]",
        b'{"type": []}',
        b'{"type": "x"}',
        b'{"type": "Listening", "port": NaN}',
        b'{"type": "Listening", "port": ' + b"9" * 10_000 + b"}",
        b'{"type": "Listening", "port": 1, "more": 5}',
        b'{"type": "Listening"}',
        b'{"type": "Peers", "peers": [[1, "h", "2"]]}',
    ],
    ids=range(11),
)
def test_a_peer_with_the_secret_that_talks_nonsense_is_dropped_and_the_server_serves_on(payload: bytes) -> None:
    with ControlServer(Echo(), SECRET) as server:
        with client(server) as mine:
            wire = mine._connection._wire
            mine._connection._pending += (
                wire_module._LENGTH.pack(len(payload)) + wire._tag(0, payload) + payload  # as no message of ours is
            )
            mine._connection.flush()
            with pytest.raises(ConnectionLost):
                mine.receive(timeout=30)
        works(server)


def test_other_threads_act_through_call(server: ControlServer) -> None:
    with client(server) as mine:
        mine.send(Said("hello"), timeout=30)
        mine.receive(timeout=30)
        server.call(lambda: [Send(1, Said("called")), Send(99, Said("to nobody"))])
        assert mine.receive(timeout=30) == Said("called")


def test_what_was_sent_before_a_drop_or_close_arrives() -> None:
    server = ControlServer(Echo(), SECRET)
    server.start()
    with client(server) as mine, client(server) as other:
        mine.send(Said("drop me"), timeout=30)
        assert mine.receive(timeout=30) == Said("farewell")
        with pytest.raises(ConnectionLost):
            mine.receive(timeout=30)
        other.send(Said("last"), timeout=30)
        other.receive(timeout=30)
        server.call(lambda: [Send(2, Said("bye"))])
        server.close()
        server.close()
        assert other.receive(timeout=30) == Said("bye")
        with pytest.raises(ConnectionLost):
            other.receive(timeout=30)


def test_a_client_waits_no_longer_than_told(server: ControlServer) -> None:
    with client(server) as mine:
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            mine.receive(timeout=0.05)
        assert time.monotonic() - begin < 30


def test_a_server_that_does_not_answer_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        ControlClient(silent.getsockname(), SECRET, timeout=0.1)


def test_nobody_listening_is_told_with_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    with pytest.raises(ConnectionLost, match=f"127.0.0.1:{address[1]}: Connection refused"):
        ControlClient(address, SECRET, timeout=30)


def test_a_wrong_secret_is_turned_away_and_logged(server: ControlServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="unidist.control"):
        with pytest.raises(WireError, match="does not know the job's secret"):
            client(server, b"other").close()
        works(server)
    assert "closed the connection before it proved that it knows the job's secret" in caplog.text
    assert "127.0.0.1" in caplog.text


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(1000), MAGIC * 100, b"\x80\x04]" * 50])
def test_random_bytes_are_turned_away(server: ControlServer, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.settimeout(30)
        stranger.sendall(data)
        while stranger.recv(4096):
            pass
    works(server)
    assert events(server, 2)[0] == "hello"  # nothing of the stranger reached the service


def test_who_proves_nothing_is_dropped_however_busily_it_talks(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_SEC", 0.3)
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.settimeout(0.02)
        begin = time.monotonic()
        for byte in MAGIC + bytes(52):  # fewer than a greeting and a proof have
            try:
                stranger.send(bytes([byte]))
                if not stranger.recv(4096):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            stranger.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):  # a TimeoutError: it was not dropped
                    pass
        assert time.monotonic() - begin > 0.2
    works(server)


def test_a_crowd_of_silent_strangers_keeps_nobody_out(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 20)
    monkeypatch.setattr(server_module, "STRANGER_SEC", 0.1)
    crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
    works(server)
    deadline = time.monotonic() + 30
    while len(server._peers) > 20:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    works(server)
    for stranger in crowd:
        stranger.close()


def test_a_message_that_cannot_be_understood_ends_its_sender_only(server: ControlServer) -> None:
    with client(server) as mine:
        mine.send(Said("nonsense"), timeout=30)
        with pytest.raises(ConnectionLost):
            mine.receive(timeout=30)
    assert "cannot be understood" in str(events(server, 1)[0])
    works(server)


def test_it_listens_on_one_address_when_told() -> None:
    with ControlServer(Echo(), SECRET, host="127.0.0.1") as server:
        works(server)
        assert server._listener.getsockname()[0] == "127.0.0.1"


@contextlib.contextmanager
def few_files(number: int) -> Iterator[None]:
    """Let this process open so many more files, and no others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    fillers = [os.open(os.devnull, os.O_RDONLY)]
    while fillers[-1] < highest:  # no number below the limit is free but those
        fillers.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1 + number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


def connected(ends: Iterable[socket.socket], server: ControlServer) -> list[Connection]:
    """Return connections over sockets that were made before, whose greeting is still to come."""
    made = []
    for end in ends:
        end.connect(("127.0.0.1", server.port))
        made.append(Connection(end, SECRET, is_server=False))
    return made


def answered(connection: Connection, *, seconds: float) -> bool:
    """Return whether the server proves the secret to a client within this time."""
    deadline = time.monotonic() + seconds
    while not connection.is_open and time.monotonic() < deadline:
        connection.receive()
        time.sleep(0.01)
    return connection.is_open


def test_without_descriptors_others_wait_and_the_server_says_what_to_set(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "_raise_limit", lambda: False)
    monkeypatch.setattr(server_module, "_FULL_SEC", 0.1)
    ends = [socket.socket() for _ in range(8)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(caplog.at_level(logging.WARNING, logger="unidist.control"))
        for end in ends:
            stack.callback(end.close)
        stack.enter_context(few_files(3))
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        made = connected(ends, server)
        assert all(answered(each, seconds=30) for each in made[:3])
        assert not answered(made[3], seconds=0.3)
        assert f"this process has as many files open as it may ({limit})" in caplog.text
        assert caplog.text.count("ulimit -n") == 1
        made[0].send(Said("hello"))  # those that have a connection are served
        assert events(server, 1) == ["hello"]
        for each in made[:3]:
            each.close()
        assert answered(made[3], seconds=30)


def test_the_server_raises_the_limit_of_open_files_where_it_may(server: ControlServer) -> None:
    ends = [socket.socket() for _ in range(8)]
    with few_files(3):
        made = connected(ends, server)
        assert all(answered(each, seconds=30) for each in made)
    for each in made:
        each.close()


def test_many_that_die_at_once_strangers_and_the_silent_harm_nobody(server: ControlServer) -> None:
    silent = client(server)
    lost = [client(server) for _ in range(50)]
    for each in lost:
        each.send(Said("hello"), timeout=30)
        with contextlib.suppress(ConnectionLost, WireError):
            client(server, b"other").close()
    assert events(server, 50) == ["hello"] * 50
    for each in lost:
        each.close()
    found = events(server, 50)
    assert len(found) == 50
    assert {kind for kind, _ in found} == {"lost"}  # type: ignore[attr-defined]
    silent.send(Said("at last"), timeout=30)
    assert silent.receive(timeout=30) == Said("at last")
    silent.close()


def test_what_comes_at_the_same_time_is_kept_once_before_anybody_is_answered() -> None:
    received, kept = [], set[int]()

    class Counted(Echo):
        def received(self, peer: int, message: Message, now: float) -> Iterable[Action]:
            received.append(peer)
            return super().received(peer, message, now)

    with ControlServer(Counted(), SECRET, before_acting=lambda: kept.add(len(received))) as server:
        clients = [client(server) for _ in range(20)]
        blocked, released = threading.Event(), threading.Event()

        def block() -> Iterable[Action]:
            blocked.set()
            assert released.wait(30)
            return ()

        server.call(block)
        assert blocked.wait(30)
        for each in clients:
            each.send(Said("hello"), timeout=30)
        released.set()
        for each in clients:
            assert each.receive(timeout=30) == Said("hello")
            each.close()
        assert len(kept) < 10
