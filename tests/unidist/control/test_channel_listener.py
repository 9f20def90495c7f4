"""Strangers at a port of a job: many of them, silent ones, and those that use up the descriptors."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from unidist.control import Channel, ChannelLost
from unidist.control import channel_listener as module
from unidist.control.channel_listener import ChannelListener
from unidist.control.messages import Beat

SECRET = b"s" * 32


def prove(sock: socket.socket) -> Channel:
    return Channel(sock, SECRET, is_server=True, timeout_sec=60)


def answer(channel: Channel) -> None:
    """Send each message back."""
    try:
        while True:
            channel.send(channel.receive(timeout_sec=60), timeout_sec=60)
    except ChannelLost:
        channel.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Any], tuple[str, int]]]:
    ends: list[Callable[[], object]] = []

    def begin(sock: Any) -> tuple[str, int]:
        listener = ChannelListener(sock, prove, answer, name="test")
        thread = threading.Thread(target=listener.run)
        thread.start()
        ends.extend([listener.close, lambda: thread.join(30)])
        address: tuple[str, int] = sock.getsockname()[:2]
        return address

    yield begin
    for end in ends:
        end()


def asks(address: tuple[str, int]) -> None:
    """Be a peer that knows the secret, and is answered."""
    channel = Channel.connect(address, SECRET, timeout_sec=30)
    channel.send(Beat(), timeout_sec=30)
    assert channel.receive(timeout_sec=30) == Beat()
    channel.close()


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=512)


def test_silent_strangers_do_not_keep_peers_out(
    serve: Callable[[Any], tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_STRANGERS", 4)
    address = serve(listening())
    strangers = [socket.create_connection(address) for _ in range(40)]
    asks(address)
    gone = 0
    for stranger in strangers:
        stranger.settimeout(0.2)
        try:
            while stranger.recv(4096):
                pass
            gone += 1
        except TimeoutError:
            pass
        except ConnectionError:
            gone += 1
        stranger.close()
    assert gone >= 35, "the oldest ones have to go"
    asks(address)


class Scarce:
    """A socket that listens, in a process that has no descriptors left for a while."""

    def __init__(self, sock: socket.socket, errors: list[int]) -> None:
        self._sock, self._errors = sock, errors

    def accept(self) -> tuple[socket.socket, Any]:
        if self._errors:
            number = self._errors.pop()
            raise OSError(number, "as the kernel says")
        return self._sock.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def test_it_accepts_again_when_there_are_descriptors_again(
    serve: Callable[[Any], tuple[str, int]], caplog: pytest.LogCaptureFixture
) -> None:
    errors = [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ECONNABORTED]
    address = serve(Scarce(listening(), errors))
    asks(address)
    assert not errors
    assert sum("cannot be accepted now" in record.getMessage() for record in caplog.records) == 1


def test_who_does_not_know_the_secret_is_turned_away(serve: Callable[[Any], tuple[str, int]]) -> None:
    address = serve(listening())
    with pytest.raises(ChannelLost):
        Channel.connect(address, b"x" * 32, timeout_sec=10).receive(timeout_sec=10)
    asks(address)
