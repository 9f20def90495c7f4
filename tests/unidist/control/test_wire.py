"""What is on the wire: proofs first, then frames that nobody else can have made."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist.control import codec, wire
from unidist.control.codec import Message, WireError
from unidist.control.messages import Beat, Give, Listen, Listening
from unidist.control.wire import Wire

SECRET = b"secret"
BEAT = Beat()


def meet(server: Wire, client: Wire) -> None:
    """Carry bytes between both until both are open."""
    for _ in range(2):
        server.receive(client.take_output())
        client.receive(server.take_output())


def pair() -> tuple[Wire, Wire]:
    server, client = Wire(SECRET, is_server=True), Wire(SECRET, is_server=False)
    meet(server, client)
    assert server.is_open
    assert client.is_open
    return server, client


def test_messages_arrive_both_ways_in_order() -> None:
    server, client = pair()
    for i in range(3):
        client.send(Give(0, i, "ä" * i))
        server.send(Listening(i))
    assert server.receive(client.take_output()) == [Give(0, i, "ä" * i) for i in range(3)]
    assert client.receive(server.take_output()) == [Listening(i) for i in range(3)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_it_does_not_matter_how_the_bytes_are_cut(sizes: list[int]) -> None:
    server, client = Wire(SECRET, is_server=True), Wire(SECRET, is_server=False)
    meet_slowly = [(server, client), (client, server)] * 2
    got: list[Message] = []
    for turn in range(3):
        for sender, receiver in meet_slowly:
            data = sender.take_output()
            for size in sizes * (len(data) + 1):
                got += receiver.receive(data[:size])
                data = data[size:]
                if not data:
                    break
        if client.is_open and not turn:
            client.send(BEAT)
    assert server.is_open
    assert got == [BEAT]


def test_a_client_with_another_secret_is_refused_before_it_may_say_anything() -> None:
    server, client = Wire(SECRET, is_server=True), Wire(b"other", is_server=False)
    server.receive(client.take_output())
    assert server.is_unproved
    with pytest.raises(WireError, match="does not know the job's secret"):
        client.receive(server.take_output())
    with pytest.raises(WireError, match="does not know the job's secret"):  # it goes on all the same
        server.receive(bytes(32) + b"its message")
    assert not server.is_open


def test_a_server_with_another_secret_is_refused_too() -> None:
    """A stranger that listens in the launcher's place, and lets everybody in, learns nothing and gives no orders."""
    server, client = Wire(b"other", is_server=True), Wire(SECRET, is_server=False)
    server.receive(client.take_output())
    with pytest.raises(WireError, match="does not know the job's secret"):
        client.receive(server.take_output())
    assert not client.is_open
    assert not client.take_output()


def test_a_servers_own_proof_sent_back_does_not_open_a_connection() -> None:
    """Both proofs carry the role: one connection cannot be used to answer the other."""
    server = Wire(SECRET, is_server=True)
    server.receive(wire.MAGIC + bytes(32))
    proof = server.take_output()[-32:]
    with pytest.raises(WireError, match="does not know the job's secret"):
        server.receive(proof)
    other = Wire(SECRET, is_server=True)  # another connection to the same server
    other.receive(wire.MAGIC + bytes(32))
    with pytest.raises(WireError, match="does not know the job's secret"):
        other.receive(proof)


def test_something_else_that_listens_is_recognised_by_its_first_bytes() -> None:
    with pytest.raises(WireError, match="no control server"):
        Wire(SECRET, is_server=False).receive(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(WireError, match="no control client"):
        Wire(SECRET, is_server=True).receive(b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize("position", [0, 3, 4, 20, 36, -1])
def test_a_changed_byte_anywhere_in_a_frame_is_noticed(position: int) -> None:
    server, client = pair()
    client.send(BEAT)
    frame = bytearray(client.take_output())
    frame[position] ^= 1 if position else 0x80
    if position == 3:  # one byte shorter or longer: complete it, so that there is something to check
        frame += bytes(1)
    with pytest.raises(WireError, match=r"changed on its way|are allowed"):
        server.receive(bytes(frame))


def test_a_repeated_or_left_out_or_reordered_frame_is_noticed() -> None:
    for order in ([0, 0], [1], [1, 0]):
        server, client = pair()
        frames = []
        for i in range(2):
            client.send(Listening(i))
            frames.append(client.take_output())
        with pytest.raises(WireError, match="changed on its way"):
            server.receive(b"".join(frames[i] for i in order))


def test_a_frame_of_another_connection_or_direction_is_noticed() -> None:
    (server, client), (other_server, _) = pair(), pair()
    client.send(BEAT)
    frame = client.take_output()
    with pytest.raises(WireError):
        other_server.receive(frame)
    with pytest.raises(WireError):
        client.receive(frame)
    assert server.receive(frame) == [BEAT]


def test_a_frame_that_says_to_be_huge_is_refused_before_it_is_read() -> None:
    server, _ = pair()
    with pytest.raises(WireError, match="are allowed"):
        server.receive(struct.pack("!I", codec.MAX_FRAME_BYTES + 1))


def test_a_message_that_is_too_long_is_not_sent() -> None:
    _, client = pair()
    with pytest.raises(ValueError, match="at most"):
        client.send(Listen("x" * codec.MAX_FRAME_BYTES))


@pytest.mark.parametrize("payload", [b"[1]", b'{"no":"type"}', b'{"type":1}', b'"text"'])
def test_only_objects_with_a_type_are_messages(payload: bytes) -> None:
    server, client = pair()
    frame = struct.pack("!I", len(payload)) + client._tag(0, payload) + payload
    with pytest.raises(WireError, match="no JSON object with a type"):
        server.receive(frame)


def test_there_is_no_connection_without_a_secret() -> None:
    with pytest.raises(ValueError, match="needs a secret"):
        Wire(b"", is_server=True)
