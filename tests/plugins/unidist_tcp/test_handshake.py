"""The proof of the secret on a connection, with every kind of other end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidist_tcp.handshake import (
    ANSWER_BYTES,
    GREETING_BYTES,
    MAGIC,
    PROTOCOL,
    SESSION_BYTES,
    Acceptor,
    Connector,
    HandshakeError,
    Session,
)

SESSION = Session(b"secret", b"s" * SESSION_BYTES, 4, 2)
ENCRYPTED = replace(SESSION, is_encrypted=True)
FUZZ_CASES = 150
SOAK_CASES = 10_000


def pass_on(sender: Acceptor | Connector, receiver: Acceptor | Connector, chunk: int = 1000) -> None:
    """Give all that one end has to say to the other, in chunks."""
    while sender.output and receiver.wanted_bytes:
        n = min(chunk, receiver.wanted_bytes, len(sender.output))
        receiver.receive(bytes(sender.output[:n]))
        del sender.output[:n]


def shake(acceptor: Acceptor, connector: Connector, chunk: int = 1000) -> None:
    pass_on(acceptor, connector, chunk)
    pass_on(connector, acceptor, chunk)
    pass_on(acceptor, connector, chunk)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_ranks_of_one_job_know_each_other(chunk: int) -> None:
    acceptor, connector = Acceptor(SESSION, 1), Connector(SESSION, 3, 1, 1)
    shake(acceptor, connector, chunk)
    assert acceptor.peer == (3, 1)
    assert connector.is_open
    assert not acceptor.output
    assert not connector.output
    assert acceptor.wanted_bytes == connector.wanted_bytes == 0


def test_a_connector_without_the_secret_is_turned_away() -> None:
    acceptor, connector = Acceptor(SESSION, 1), Connector(Session(b"guess", SESSION.name, 4, 2), 3, 1, 0)
    with pytest.raises(HandshakeError, match="does not know the job's secret"):
        shake(acceptor, connector)
    assert acceptor.peer is None
    assert not acceptor.output, "a stranger gets nothing but the greeting"


def test_an_acceptor_without_the_secret_is_found_out() -> None:
    acceptor, connector = Acceptor(SESSION, 1), Connector(SESSION, 3, 1, 0)
    pass_on(acceptor, connector)
    with pytest.raises(HandshakeError, match="address of rank 1 does not know"):
        connector.receive(bytes(32))
    assert not connector.is_open


def test_a_rank_of_an_earlier_generation_is_turned_away() -> None:
    acceptor, connector = Acceptor(SESSION, 1), Connector(Session(b"secret", b"t" * SESSION_BYTES, 4, 2), 3, 1, 0)
    with pytest.raises(HandshakeError, match="another job or generation"):
        shake(acceptor, connector)


@pytest.mark.parametrize(("rank", "lane"), [(1, 0), (0, 0), (4, 0), (2, 2)])
def test_only_ranks_above_may_connect(rank: int, lane: int) -> None:
    acceptor, connector = Acceptor(SESSION, 1), Connector(SESSION, rank, 1, lane)
    with pytest.raises(HandshakeError, match="which is none"):
        shake(acceptor, connector)


def test_a_proof_for_another_rank_does_not_count() -> None:
    """A connection that somebody redirects to another rank of the job."""
    acceptor, connector = Acceptor(SESSION, 1), Connector(SESSION, 3, 2, 0)
    with pytest.raises(HandshakeError, match="does not know"):
        shake(acceptor, connector)


def test_an_answer_cannot_be_used_twice() -> None:
    first, connector = Acceptor(SESSION, 1), Connector(SESSION, 3, 1, 0)
    pass_on(first, connector)
    recorded = bytes(connector.output)
    first.receive(recorded)
    assert first.peer == (3, 0)
    second = Acceptor(SESSION, 1)
    with pytest.raises(HandshakeError):
        second.receive(recorded)


def test_a_proof_cannot_be_reflected() -> None:
    """An end without the secret sends back what it was sent."""
    connector = Connector(SESSION, 3, 1, 0)
    pass_on(Acceptor(SESSION, 1), connector)
    with pytest.raises(HandshakeError):
        connector.receive(bytes(connector.output[-32:]))


@pytest.mark.parametrize("make", [lambda: Acceptor(SESSION, 1), lambda: Connector(SESSION, 3, 1, 0)])
def test_another_version_says_so(make: type[Acceptor]) -> None:
    other = MAGIC[:-2] + bytes([PROTOCOL + 1]) + MAGIC[-1:]
    with pytest.raises(HandshakeError, match="another version"):
        make().receive(other)


@pytest.mark.parametrize("make", [lambda: Acceptor(SESSION, 1), lambda: Connector(SESSION, 3, 1, 0)])
def test_another_byte_order_says_so(make: type[Acceptor]) -> None:
    with pytest.raises(HandshakeError, match="another byte order"):
        make().receive(MAGIC[:-1] + (b"B" if MAGIC[-1:] == b"L" else b"L"))


@pytest.mark.parametrize(("mine", "text"), [(True, "and the other end does not"), (False, "and this rank does not")])
def test_an_end_that_does_not_encrypt_as_this_one_is_turned_away(mine: bool, text: str) -> None:
    sessions = [replace(SESSION, is_encrypted=encrypts) for encrypts in (mine, not mine)]
    connector = Connector(sessions[0], 3, 1, 0)
    with pytest.raises(HandshakeError, match=text):
        pass_on(Acceptor(sessions[1], 1), connector)
    acceptor = Acceptor(sessions[0], 1)
    with pytest.raises(HandshakeError, match=text):
        acceptor.receive(sessions[1].magic)
    assert not connector.key
    assert not acceptor.key


def test_who_changes_what_is_said_of_encryption_is_found_out() -> None:
    """Nobody between the ranks can talk them out of it."""
    acceptor, connector = Acceptor(ENCRYPTED, 1), Connector(SESSION, 3, 1, 0)
    acceptor.output[len(MAGIC)] = 0
    pass_on(acceptor, connector)
    connector.output[len(MAGIC)] = 1
    with pytest.raises(HandshakeError, match="does not know the job's secret"):
        pass_on(connector, acceptor)


def test_both_ends_have_the_same_key_and_each_connection_another() -> None:
    keys = set()
    for lane in (0, 1, 1):
        acceptor, connector = Acceptor(ENCRYPTED, 1), Connector(ENCRYPTED, 3, 1, lane)
        shake(acceptor, connector)
        assert acceptor.key == connector.key
        assert len(acceptor.key) == 32
        keys.add(acceptor.key)
    assert len(keys) == 3


@pytest.mark.parametrize(
    "text", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"SSH-2.0-OpenSSH_9.2\r\n", bytes(9)]
)
def test_other_protocols_are_noticed_by_their_first_bytes(text: bytes) -> None:
    with pytest.raises(HandshakeError, match="does not speak"):
        Acceptor(SESSION, 0).receive(text)


def _fuzz_acceptor(data: bytes) -> None:
    """Whatever comes, an acceptor raises or goes on waiting; it never lets anybody in."""
    acceptor = Acceptor(SESSION, 1)
    try:
        while data and acceptor.wanted_bytes:
            n = min(acceptor.wanted_bytes, len(data))
            acceptor.receive(data[:n])
            data = data[n:]
    except HandshakeError:
        pass
    assert acceptor.peer is None
    assert bytes(acceptor.output[: len(MAGIC)]) == MAGIC
    assert len(acceptor.output) == GREETING_BYTES, "it answered"


def _fuzz_connector(data: bytes) -> None:
    connector = Connector(SESSION, 3, 1, 0)
    try:
        while data and connector.wanted_bytes:
            n = min(connector.wanted_bytes, len(data))
            connector.receive(data[:n])
            data = data[n:]
    except HandshakeError:
        pass
    assert not connector.is_open


def _fuzz_changed_answer(position: int, change: int) -> None:
    """An honest answer in which a byte changed on its way."""
    acceptor, connector = Acceptor(SESSION, 1), Connector(SESSION, 3, 1, 0)
    pass_on(acceptor, connector)
    connector.output[position] ^= change
    with pytest.raises(HandshakeError):
        pass_on(connector, acceptor)
    assert acceptor.peer is None


anything = st.one_of(
    st.binary(max_size=2 * ANSWER_BYTES),
    st.builds(lambda rest: SESSION.magic + rest, st.binary(max_size=2 * ANSWER_BYTES)),
    st.builds(
        lambda rest: SESSION.magic + rest, st.binary(min_size=ANSWER_BYTES - len(SESSION.magic), max_size=ANSWER_BYTES)
    ),
)
changes = {"position": st.integers(0, ANSWER_BYTES - 1), "change": st.integers(1, 255)}


@settings(max_examples=FUZZ_CASES, deadline=None)
@given(data=anything)
def test_garbage_gets_nowhere(data: bytes) -> None:
    _fuzz_acceptor(data)
    _fuzz_connector(data)


@settings(max_examples=FUZZ_CASES, deadline=None)
@given(**changes)
def test_a_changed_byte_is_noticed(position: int, change: int) -> None:
    _fuzz_changed_answer(position, change)


@pytest.mark.soak
@settings(max_examples=SOAK_CASES, deadline=None)
@given(data=anything)
def test_much_garbage_gets_nowhere(data: bytes) -> None:
    _fuzz_acceptor(data)
    _fuzz_connector(data)


@pytest.mark.soak
@settings(max_examples=SOAK_CASES, deadline=None)
@given(**changes)
def test_any_changed_byte_is_noticed(position: int, change: int) -> None:
    _fuzz_changed_answer(position, change)
