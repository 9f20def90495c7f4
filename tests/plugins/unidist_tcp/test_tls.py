"""Encrypted connections of the engine tcp: what somebody on the wire sees, and what becomes of who changes it."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
from recorded_wire import Change, RecordedWire

from unidist.buffer import Buffer
from unidist.errors import PeerLostError

pytest.importorskip("unidist_tcp._tcp", reason="the C code is not built")

from unidist_tcp import _tcp, encryption
from unidist_tcp.communicator import Connections, TcpCommunicator
from unidist_tcp.connecting import connect_all, listen
from unidist_tcp.handshake import SESSION_BYTES, Connector, Session

pytestmark = pytest.mark.skipif(bool(encryption.problem()), reason=encryption.problem() or "there is OpenSSL")

LIMIT = timedelta(seconds=30)
SESSION = Session(b"secret", b"n" * SESSION_BYTES, 2, 2)
ENCRYPTED = replace(SESSION, is_encrypted=True)
PAYLOAD = b"the weights of a model that nobody else shall have; " * 20_000
HANDSHAKES = 3000
"""Of a connection no handshake takes so many bytes in one direction, and all data takes more."""


@dataclass
class Pair:
    """Two ranks in this process, and the wire between them."""

    wire: RecordedWire
    ranks: list[TcpCommunicator]

    def run(self, function: Callable[[TcpCommunicator], object]) -> list[object]:
        """Run a function on both ranks."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(function, self.ranks))


@contextlib.contextmanager
def pair(session: Session, change: Change | None = None) -> Iterator[Pair]:
    listeners = [listen("127.0.0.1") for _ in range(2)]
    with RecordedWire(("127.0.0.1", listeners[0].getsockname()[1]), change) as wire:
        yield from _ranks(session, listeners, wire)


def _ranks(session: Session, listeners: list[socket.socket], wire: RecordedWire) -> Iterator[Pair]:
    addresses = [wire.address, ("127.0.0.1", listeners[1].getsockname()[1])]
    with ThreadPoolExecutor(2) as pool:
        lanes = list(
            pool.map(lambda rank: connect_all(rank, addresses, session, listeners[rank], timeout=LIMIT), (0, 1))
        )
    ranks = [
        TcpCommunicator(Connections(rank, lanes[rank], spin_ns=0, heartbeat=LIMIT), 0, rank, (0, 1), LIMIT)
        for rank in (0, 1)
    ]
    try:
        yield Pair(wire, ranks)
    finally:
        for rank in ranks:
            rank.close()


def pass_payload(world: TcpCommunicator) -> bytes:
    """Send it from rank 0 to rank 1, in a short message and in a long one; return what this rank has in the end."""
    found = b""
    for size in (100, len(PAYLOAD)):
        memory = bytearray(PAYLOAD[:size] if world.rank == 0 else size)
        world.broadcast(Buffer.of(memory), root=0).wait()
        found += bytes(memory)
    return found


def outcome(world: TcpCommunicator) -> tuple[tuple[int, ...], str]:
    try:
        for _ in range(100):
            pass_payload(world)
    except PeerLostError as exc:
        return tuple(exc.ranks), str(exc)
    return (), "nothing was noticed"


def test_who_reads_the_wire_sees_the_payload_without_tls_and_nothing_of_it_with_tls() -> None:
    secret = PAYLOAD[:30]
    with pair(SESSION) as plain:
        assert plain.run(pass_payload) == [PAYLOAD[:100] + PAYLOAD] * 2
        seen = plain.wire.recorded()
        assert seen.count(PAYLOAD[:52]) > 10_000
        assert b"TCP1" in seen
    with pair(ENCRYPTED) as encrypted:
        assert encrypted.run(pass_payload) == [PAYLOAD[:100] + PAYLOAD] * 2
        assert "with TLS" in encrypted.ranks[0].description
        seen = encrypted.wire.recorded()
        assert len(seen) > len(PAYLOAD)
        assert secret not in seen
        assert b"TCP1" not in seen, "headers of frames are not encrypted"
        # Bytes of a cipher are spread evenly; of a text, half of the values never occur.
        counts = [seen.count(bytes([value])) for value in range(256)]
        assert max(counts) < 2 * min(counts)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_changed_byte_ends_the_connection_and_gives_nobody_a_number(direction: str) -> None:
    changed = threading.Event()

    def change(to: str, before: int, data: bytes) -> bytes:
        if to != direction or changed.is_set() or before + len(data) <= HANDSHAKES:
            return data
        changed.set()
        return data[:-1] + bytes([data[-1] ^ 1])

    with pair(ENCRYPTED, change) as between:
        found = between.run(outcome)
        assert changed.is_set()
    reader = 0 if direction == "up" else 1
    ranks, text = found[reader]  # type: ignore[misc]
    assert ranks == (1 - reader,), text
    assert "what came was not encrypted by it, or was changed" in text
    assert found[1 - reader][0] == (reader,)  # type: ignore[index]


def test_a_connection_that_is_cut_in_the_middle_of_a_record_is_a_lost_peer() -> None:
    def cut(to: str, before: int, data: bytes) -> bytes | None:
        return None if to == "down" and before + len(data) > 100_000 else data

    with pair(ENCRYPTED, cut) as between:
        found = between.run(outcome)
    for rank, (ranks, text) in enumerate(found):  # type: ignore[misc]
        assert ranks == (1 - rank,), text
        assert "it closed the connection" in text or "one of the connections to it broke" in text


def test_keys_change_while_both_ends_send_as_much_as_they_can() -> None:
    _tcp.set_key_records(5)

    def both_ways(world: TcpCommunicator) -> bool:
        mine, other = bytearray([world.rank]) * 3_000_000, bytearray(3_000_000)
        for _ in range(5):
            works = [
                world.send(Buffer.of(mine), to=1 - world.rank),
                world.recv(Buffer.of(other), source=1 - world.rank),
            ]
            for work in works:
                work.wait()
        return other == bytearray([1 - world.rank]) * 3_000_000

    try:
        with pair(ENCRYPTED) as between:
            assert between.run(both_ways) == [True, True]
    finally:
        _tcp.set_key_records(1 << 22)


@pytest.mark.parametrize("mine", [True, False])
def test_a_rank_that_does_not_encrypt_as_the_other_is_refused_with_a_line_on_both_sides(
    mine: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "unidist.engine")
    listeners = [listen("127.0.0.1") for _ in range(2)]
    addresses = [("127.0.0.1", each.getsockname()[1]) for each in listeners]
    sessions = [replace(SESSION, is_encrypted=mine), replace(SESSION, is_encrypted=not mine)]
    limits = [timedelta(seconds=2), LIMIT]
    with ThreadPoolExecutor(2) as pool:
        first, second = (
            pool.submit(connect_all, rank, addresses, sessions[rank], listeners[rank], timeout=limits[rank])
            for rank in (0, 1)
        )
        text = str(second.exception(60))
        assert first.exception(60) is not None
    assert "give --tls to all" in text
    # It hears either the greeting of the other one, or that this one has gone.
    assert "turned a connection from 127.0.0.1" in caplog.text


@pytest.mark.parametrize(
    "data", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01" + bytes(600), bytes(5000)]
)
def test_who_has_the_secret_and_does_not_speak_tls_is_turned_away(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "unidist.engine")
    listener = listen("127.0.0.1")
    address = ("127.0.0.1", listener.getsockname()[1])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connect_all, 0, [address, address], ENCRYPTED, listener, timeout=timedelta(seconds=2))
        with socket.create_connection(address, 5) as sock:
            connector = Connector(ENCRYPTED, 1, 0, 0)
            while not connector.is_open:
                connector.receive(sock.recv(connector.wanted_bytes, socket.MSG_WAITALL))
                sock.sendall(connector.output)
                connector.output.clear()
            sock.sendall(data)
        deadline = time.monotonic() + 30
        while "turned a connection from 127.0.0.1" not in caplog.text:
            assert time.monotonic() < deadline, f"nothing was logged: {caplog.text}"
            time.sleep(0.01)
        assert waiting.exception(60) is not None


def test_another_key_is_refused() -> None:
    first, second = socket.socketpair()
    first.setblocking(False)
    second.setblocking(False)
    client, server = _tcp.Tls(first.fileno(), False, b"a" * 32), _tcp.Tls(second.fileno(), True, b"b" * 32)
    assert client.handshake() == 1
    with pytest.raises(ConnectionError, match="binder does not verify"):
        server.handshake()
    with pytest.raises(ConnectionError):
        client.handshake()
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("libno-such.so.3", "libno-such.so.1"), "libno-such.so.3: cannot open shared object file"),
        (("libno-such.so.3", "libm.so.6"), "libm.so.6 has no TLS_method: OpenSSL 1.1.1 or later is needed"),
    ],
)
def test_a_missing_or_old_library_says_what_is_needed(names: tuple[str, str], text: str) -> None:
    script = (
        f"from unidist_tcp import encryption\nencryption._NAMES = {names!r}\n"
        "from unidist_tcp.engine import TcpEngine\nprint(TcpEngine().availability().reason)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={"UNIDIST_TLS": "1"}, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("--tls needs OpenSSL 1.1.1 or later on every host (")
    assert text in done.stdout
