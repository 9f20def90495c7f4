"""The links between agents: they tell when another one is reached, and when it is not."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable

import pytest

from unidist_launch.agent.links import PeerLinks

pytestmark = pytest.mark.usefixtures("leak_check")


def run(selector: selectors.BaseSelector, ends: list[PeerLinks], until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline
        for key, _ in selector.select(0.01):
            key.data()
        for end in ends:
            end.turn()


def test_links_are_told_of_when_they_come_break_and_come_again() -> None:
    told: list[tuple[int, int, bool]] = []
    with selectors.DefaultSelector() as selector:

        def made(number: int, secret: bytes = b"s" * 32) -> PeerLinks:
            return PeerLinks(secret, 0.4, selector, lambda peer, reached, _: told.append((number, peer, reached)))

        first, second, stranger = made(0), made(1), made(2, b"t" * 32)
        port, other = first.listen("127.0.0.1"), second.listen("127.0.0.1")
        first.connect({1: ("127.0.0.1", other)})
        second.connect({0: ("127.0.0.1", port)})
        stranger.connect({0: ("127.0.0.1", port)})
        run(selector, [first, second, stranger], lambda: len(told) == 3)
        assert sorted(told) == [(0, 1, True), (1, 0, True), (2, 0, False)]  # the last does not know the secret
        second.listen("127.0.0.1")  # elsewhere: the first one's beats are answered no more
        run(selector, [first, second], lambda: (0, 1, False) in told)
        assert (1, 0, False) not in told
        for end in (first, second, stranger):
            end.close()
        assert not selector.get_map()


def test_an_agent_that_does_not_get_to_run_is_no_broken_link() -> None:
    """Neither this one, which could not send its beats, nor the other one, whose host acknowledges them."""
    told: list[tuple[int, int, bool]] = []
    with selectors.DefaultSelector() as selector, selectors.DefaultSelector() as other:
        first = PeerLinks(b"s" * 32, 0.2, selector, lambda peer, reached, _: told.append((0, peer, reached)))
        second = PeerLinks(b"s" * 32, 0.2, other, lambda peer, reached, _: told.append((1, peer, reached)))
        first.connect({1: ("127.0.0.1", second.listen("127.0.0.1"))})
        deadline = time.monotonic() + 30
        while not told:
            assert time.monotonic() < deadline
            for chosen, end in ((selector, first), (other, second)):
                for key, _ in chosen.select(0.01):
                    key.data()
                end.turn()
        time.sleep(0.5)  # this one
        first.turn()
        begin = time.monotonic()
        run(selector, [first], lambda: time.monotonic() > begin + 1)  # the other one
        assert told == [(0, 1, True)]
        first.close()
        second.close()
