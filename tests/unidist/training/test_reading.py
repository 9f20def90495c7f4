"""Batches that are read ahead, and the time that steps wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from unidist.errors import UsageError
from unidist.optim.script_position import DrawnBatches
from unidist.runtime import context
from unidist.training import reading
from unidist.training.reading import read_ahead, timed


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = SimpleNamespace(data_sec=0.0)
    runtime: Any = SimpleNamespace(recorder=found)
    batches = DrawnBatches(runtime)
    runtime.owned = lambda kind: batches
    monkeypatch.setattr(context, "current", lambda: runtime)
    return found


def _threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "unidist-prefetch"]


def _gone() -> bool:
    deadline = time.monotonic() + 30
    while _threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not _threads()


def test_the_time_in_which_steps_wait_for_batches_is_added_up(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(reading, "time", SimpleNamespace(monotonic=lambda: now))

    def decoded() -> Iterator[int]:
        nonlocal now
        for number in range(10):
            now += 2
            yield number

    for _ in timed(decoded()):
        now += 30  # the step
    assert recorder.data_sec == 20


def test_a_step_does_not_wait_for_what_is_read_ahead() -> None:
    """While it computes, as many batches are read as may wait."""
    read = []

    def batches() -> Iterator[int]:
        for number in range(10):
            read.append(number)
            yield number

    ahead = read_ahead(batches(), 2)
    assert next(ahead) == 0
    deadline = time.monotonic() + 30
    while len(read) < 1 + 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert list(ahead) == list(range(1, 10))
    assert _gone()


def test_the_same_batches_in_order_prepared_by_the_thread() -> None:
    def doubled(number: int) -> int:
        assert threading.current_thread() in _threads()
        return 2 * number

    assert list(read_ahead(range(20), 3, doubled)) == list(range(0, 40, 2))
    assert _gone()


def test_no_more_are_read_than_wait() -> None:
    read = []

    def batches() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    ahead = read_ahead(batches(), 2)
    assert next(ahead) == 0
    time.sleep(0.1)
    assert len(read) <= 1 + 2 + 1
    ahead.close()  # type: ignore[attr-defined]  # it is a generator
    assert _gone()


def test_an_error_comes_behind_the_batches_before_it() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise ValueError("a damaged file")

    ahead = read_ahead(batches(), 4)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="a damaged file"):
        next(ahead)
    assert _gone()


def test_a_count_below_one() -> None:
    with pytest.raises(UsageError, match=r"prefetch\(0\)"):
        read_ahead([], 0)
