"""The watchdog looks when it was told to, and can be called earlier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from unidist.negotiation._watchdog import Watchdog


@pytest.fixture
def looks() -> list[float]:
    return []


def start(looks: list[float], wanted: Callable[[float], float]) -> tuple[Watchdog, threading.Condition]:
    looked = threading.Condition()

    def look(now: float) -> float:
        with looked:
            looks.append(now)
            looked.notify_all()
        return wanted(now)

    watchdog = Watchdog(look)
    watchdog.start()
    return watchdog, looked


def wait_for(looked: threading.Condition, looks: list[float], count: int) -> None:
    with looked:
        assert looked.wait_for(lambda: len(looks) >= count, timeout=30)


def test_it_looks_again_at_the_moment_that_was_asked_for(looks: list[float]) -> None:
    watchdog, looked = start(looks, lambda now: now + 0.02)
    wait_for(looked, looks, 3)
    watchdog.close()
    assert looks[1] - looks[0] >= 0.02
    assert looks[2] - looks[1] >= 0.02


def test_it_can_be_woken_earlier_and_not_later(looks: list[float]) -> None:
    watchdog, looked = start(looks, lambda now: now + 1000)
    wait_for(looked, looks, 1)
    watchdog.wake_by(time.monotonic() + 2000)
    moment = time.monotonic() + 0.02
    watchdog.wake_by(moment)
    wait_for(looked, looks, 2)
    watchdog.close()
    assert looks[1] >= moment
    assert len(looks) == 2


def test_a_wish_that_comes_while_it_looks_is_kept(looks: list[float]) -> None:
    watchdog: Watchdog

    def wanted(now: float) -> float:
        if len(looks) == 1:
            watchdog.wake_by(now + 0.01)
        return now + 1000

    begin = threading.Event()
    looked = threading.Condition()

    def look(now: float) -> float:
        assert begin.wait(30)
        with looked:
            looks.append(now)
            looked.notify_all()
        return wanted(now)

    watchdog = Watchdog(look)
    watchdog.start()
    begin.set()
    wait_for(looked, looks, 2)
    watchdog.close()


def test_a_wish_without_end_is_not_an_error(looks: list[float]) -> None:
    watchdog, looked = start(looks, lambda now: float("inf"))
    wait_for(looked, looks, 1)
    watchdog.close()
    assert len(looks) == 1
