"""Messages, and bytes behind them, between two ends that know one secret."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from unidist.control import Channel, ChannelLost
from unidist.control.messages import Beat, Listening

pytestmark = pytest.mark.usefixtures("leak_check")
SECRET = b"s" * 32


class Ends:
    """A listening socket, and what it accepts."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.open: list[Channel] = []

    def pair(self, secret: bytes = SECRET) -> tuple[Channel, Channel]:
        """Return both ends of a new connection."""
        accepted: list[Channel | Exception] = []

        def accept() -> None:
            sock, _ = self.listener.accept()
            try:
                accepted.append(Channel(sock, SECRET, is_server=True, timeout_sec=10))
            except ChannelLost as exc:
                accepted.append(exc)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            own = Channel.connect(self.listener.getsockname(), secret, timeout_sec=10)
        finally:
            thread.join()
        (other,) = accepted
        assert isinstance(other, Channel)
        self.open += [own, other]
        return own, other


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for channel in made.open:
        channel.close()
    made.listener.close()


def test_bytes_follow_a_message(ends: Ends) -> None:
    own, other = ends.pair()
    data = bytes(range(256)) * 10_000
    thread = threading.Thread(target=lambda: own.send(Listening(1), [data, b"", b"end"], timeout_sec=10))
    thread.start()
    assert other.receive(timeout_sec=10) == Listening(1)
    memory = bytearray(len(data) + 3)
    other.receive_into(memoryview(memory))
    assert memory == data + b"end"
    thread.join()
    other.send(Beat(), timeout_sec=10)
    assert own.receive() == Beat()


def test_who_takes_nothing_is_given_up(ends: Ends) -> None:
    own, _ = ends.pair()
    with pytest.raises(ChannelLost, match=r"took nothing for 0\.2 s"):
        own.send(Beat(), [bytes(64 << 20)], timeout_sec=0.2)


def test_who_does_not_know_the_secret_is_refused(ends: Ends) -> None:
    with pytest.raises(ChannelLost, match=r"secret|closed"):
        ends.pair(b"t" * 32)


def test_silence_ends_a_wait(ends: Ends) -> None:
    own, _ = ends.pair()
    with pytest.raises(TimeoutError):
        own.receive(timeout_sec=0.05)


def test_an_end_that_closes_ends_the_others_wait(ends: Ends) -> None:
    own, other = ends.pair()
    timer = threading.Timer(0.05, other.close)
    timer.start()
    with pytest.raises(ChannelLost, match=r"closed the connection|is gone"):
        own.receive(timeout_sec=30)
    timer.join()


def test_nobody_listening_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(ChannelLost, match=r"127\.0\.0\.1:\d+ cannot be reached"):
        Channel.connect(address, SECRET, timeout_sec=5)
