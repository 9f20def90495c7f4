"""Connecting the ranks of a job while others knock: a port scan, garbage, no secret, half a handshake, floods."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest

from unidist.errors import PeerLostError, StalledError
from unidist_tcp import connecting
from unidist_tcp.connecting import Address, Lane, connect_all, listen
from unidist_tcp.handshake import GREETING_BYTES, SESSION_BYTES, Connector, Session

LIMIT = timedelta(seconds=60)
Lanes = tuple[tuple[Lane, ...], ...]


class Job:
    """Ranks of a job, each a thread, that connect to each other.

    Args:
        size: number of ranks.
        host: where they listen.
    """

    def __init__(self, size: int, host: str = "127.0.0.1") -> None:
        self.session = Session(b"secret", b"n" * SESSION_BYTES, size, 2)
        self.listeners = [listen(host) for _ in range(size)]
        self.addresses: list[Address] = [(host, each.getsockname()[1]) for each in self.listeners]
        self._pool = ThreadPoolExecutor(size)

    def start(self, rank: int, *, session: Session | None = None, timeout: timedelta = LIMIT) -> Future[Lanes]:
        return self._pool.submit(
            connect_all, rank, self.addresses, session or self.session, self.listeners[rank], timeout=timeout
        )

    def finish(self, first: Future[Lanes]) -> list[Lanes]:
        """Start the ranks above 0, and return what all of them have."""
        return [each.result(60) for each in [first, *(self.start(rank) for rank in range(1, len(self.listeners)))]]

    def close(self) -> None:
        for each in self.listeners:
            each.close()
        self._pool.shutdown()


@pytest.fixture
def job() -> Job:
    return Job(3)


def check_and_close(found: list[Lanes]) -> None:
    """Every two ranks have two connections, which carry bytes between these two."""
    for rank, mine in enumerate(found):
        for other, lanes in enumerate(mine):
            assert len(lanes) == (0 if rank == other else 2)
            for number, lane in enumerate(lanes):
                assert lane.tls is None
                if rank < other:
                    os.write(lane.descriptor, bytes([rank, other, number]))
                    os.set_blocking(found[other][rank][number].descriptor, True)
                    assert os.read(found[other][rank][number].descriptor, 10) == bytes([rank, other, number])
    close(found)


def close(found: list[Lanes]) -> None:
    for mine in found:
        for lanes in mine:
            for lane in lanes:
                os.close(lane.descriptor)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_two_ranks_are_connected(size: int, host: str) -> None:
    job = Job(size, host)
    check_and_close([each.result(60) for each in [job.start(rank) for rank in range(size)]])
    job.close()


def scan(address: Address) -> None:
    """Connect and close, as a port scan does."""
    for _ in range(20):
        socket.create_connection(address, 5).close()


def reset(address: Address) -> None:
    """Connect and end with a reset."""
    sock = socket.create_connection(address, 5)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()


def garbage(address: Address) -> None:
    with socket.create_connection(address, 5) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def long_garbage(address: Address) -> None:
    with socket.create_connection(address, 5) as sock:
        try:
            for _ in range(100):
                sock.sendall(os.urandom(100_000))
        except ConnectionError:
            pass


def without_the_secret(address: Address) -> None:
    connector = Connector(Session(b"guess", b"n" * SESSION_BYTES, 3, 2), 2, 0, 0)
    with socket.create_connection(address, 5) as sock:
        connector.receive(sock.recv(GREETING_BYTES, socket.MSG_WAITALL))
        sock.sendall(connector.output)
        assert sock.recv(1000) == b"", "a stranger was answered"


def half_a_handshake(address: Address) -> None:
    with socket.create_connection(address, 5) as sock:
        sock.sendall(Session(b"guess", b"", 3, 2).magic + b"half")


@pytest.mark.parametrize("stranger", [scan, reset, garbage, long_garbage, without_the_secret, half_a_handshake])
def test_strangers_get_a_line_in_the_log_and_disturb_nobody(
    job: Job, stranger: Callable[[Address], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "unidist.engine")
    first = job.start(0)
    stranger(job.addresses[0])
    deadline = time.monotonic() + 30
    while "turned a connection from 127.0.0.1" not in caplog.text:
        assert time.monotonic() < deadline, f"nothing was logged: {caplog.text}"
        time.sleep(0.01)
    check_and_close(job.finish(first))
    job.close()


def test_one_that_says_nothing_is_turned_away_in_time(
    job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "_STRANGER_SEC", 0.2)
    first = job.start(0)
    with socket.create_connection(job.addresses[0], 5) as sock:
        sock.recv(GREETING_BYTES, socket.MSG_WAITALL)
        sock.settimeout(60)
        assert sock.recv(1) == b""
    assert "did not prove the job's secret within 0.2 s" in caplog.text
    check_and_close(job.finish(first))
    job.close()


def test_a_flood_of_connections_keeps_nobody_out(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "_MAX_STRANGERS", 10)
    first = job.start(0)
    flood = [socket.create_connection(job.addresses[0], 5) for _ in range(50)]
    check_and_close(job.finish(first))
    for sock in flood:
        sock.close()
    job.close()


def test_a_rank_that_does_not_come_is_named(job: Job) -> None:
    second, first = job.start(1), job.start(0, timeout=timedelta(seconds=2))  # in which rank 1 has to connect
    with pytest.raises(StalledError, match=r"not connected to rank\(s\) 2 after 2 s .*--network-interface") as caught:
        first.result(60)
    assert caught.value.ranks == (2,)
    with pytest.raises(PeerLostError) as lost:  # the first has given up
        second.result(60)
    assert lost.value.ranks == (0,)
    job.close()


def test_a_rank_that_is_gone_is_named(job: Job) -> None:
    job.listeners[1].close()
    with pytest.raises(PeerLostError, match=r"rank 2 cannot connect to rank 1 at 127\.0\.0\.1:") as caught:
        job.start(2).result(60)
    assert caught.value.ranks == (1,)
    job.close()


def test_a_rank_that_dies_while_others_connect_is_named(job: Job) -> None:
    """It has connected to rank 0, and is gone before rank 1 comes."""
    first, made = job.start(0), []
    for lane in range(2):
        sock = socket.create_connection(job.addresses[0], 5)
        connector = Connector(job.session, 2, 0, lane)
        connector.receive(sock.recv(GREETING_BYTES, socket.MSG_WAITALL))
        sock.sendall(connector.output)
        connector.receive(sock.recv(connector.wanted_bytes, socket.MSG_WAITALL))
        assert connector.is_open
        made.append(sock)
    for sock in made:
        sock.close()
    with pytest.raises(PeerLostError) as caught:
        first.result(60)
    assert caught.value.ranks == (2,)
    job.close()


def test_what_answers_at_a_ranks_address_without_the_secret_is_named(job: Job) -> None:
    impostor = Job(3)
    impostor.session = Session(b"guess", b"n" * SESSION_BYTES, 3, 2)
    listening = impostor.start(0, timeout=timedelta(seconds=3))
    job.addresses[0] = impostor.addresses[0]
    with pytest.raises(PeerLostError, match=r"closed the connection|does not know the job's secret") as caught:
        job.start(2).result(60)
    assert caught.value.ranks == (0,)
    assert isinstance(listening.exception(60), StalledError)
    impostor.close()
    job.close()
