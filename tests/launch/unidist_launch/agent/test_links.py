"""The links between agents: they tell when another one is reached, and when it is not."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable

import pytest

from unidist_launch.agent import links
from unidist_launch.agent.links import PeerLinks

pytestmark = pytest.mark.usefixtures("leak_check")


TURN_SEC = 0.01


class Clock:
    """Stands in for `time`: each turn takes as long, however long the machine takes for it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(links, "time", made)
    return made


def turn(clock: Clock, selector: selectors.BaseSelector, ends: list[PeerLinks]) -> None:
    for key, _ in selector.select(TURN_SEC):
        key.data()
    clock.now += TURN_SEC
    for end in ends:
        end.turn()


def run(clock: Clock, selector: selectors.BaseSelector, ends: list[PeerLinks], until: Callable[[], bool]) -> None:
    limit = clock.now + 30
    while not until():
        assert clock.now < limit
        turn(clock, selector, ends)


def test_links_are_told_of_when_they_come_break_and_come_again(clock: Clock) -> None:
    told: list[tuple[int, int, bool]] = []
    with selectors.DefaultSelector() as selector:

        def made(number: int, secret: bytes = b"s" * 32) -> PeerLinks:
            return PeerLinks(secret, 0.4, selector, lambda peer, reached, _: told.append((number, peer, reached)))

        first, second, stranger = made(0), made(1), made(2, b"t" * 32)
        port, other = first.listen("127.0.0.1"), second.listen("127.0.0.1")
        first.connect({1: ("127.0.0.1", other)})
        second.connect({0: ("127.0.0.1", port)})
        stranger.connect({0: ("127.0.0.1", port)})
        run(clock, selector, [first, second, stranger], lambda: len(told) == 3)
        assert sorted(told) == [(0, 1, True), (1, 0, True), (2, 0, False)]  # the last does not know the secret
        second.listen("127.0.0.1")  # elsewhere: the first one's beats are answered no more
        run(clock, selector, [first, second], lambda: (0, 1, False) in told)
        assert (1, 0, False) not in told
        for end in (first, second, stranger):
            end.close()
        assert not selector.get_map()


def test_an_agent_that_does_not_get_to_run_is_no_broken_link(clock: Clock) -> None:
    """Neither this one, which could not send its beats, nor the other one, whose host acknowledges them."""
    told: list[tuple[int, int, bool]] = []
    with selectors.DefaultSelector() as selector, selectors.DefaultSelector() as other:
        first = PeerLinks(b"s" * 32, 0.2, selector, lambda peer, reached, _: told.append((0, peer, reached)))
        second = PeerLinks(b"s" * 32, 0.2, other, lambda peer, reached, _: told.append((1, peer, reached)))
        first.connect({1: ("127.0.0.1", second.listen("127.0.0.1"))})
        limit = clock.now + 30
        while not told:
            assert clock.now < limit
            turn(clock, selector, [first])
            turn(clock, other, [second])
        time.sleep(0.5)  # this one; meanwhile the host of the other one acknowledges what was sent
        clock.now += 0.5
        first.turn()
        end = clock.now + 1
        run(clock, selector, [first], lambda: clock.now > end)  # the other one
        assert told == [(0, 1, True)]
        first.close()
        second.close()
