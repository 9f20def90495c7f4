"""Batches that are read ahead, and the time that steps wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from unidist.errors import UsageError
from unidist.runtime import context
from unidist.training.reading import read_ahead, timed


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = SimpleNamespace(data_sec=0.0)
    monkeypatch.setattr(context, "current", lambda: SimpleNamespace(recorder=found))
    return found


def _decoded(count: int, seconds: float) -> Iterator[int]:
    for number in range(count):
        time.sleep(seconds)
        yield number


def _threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "unidist-prefetch"]


def _gone() -> bool:
    deadline = time.monotonic() + 5
    while _threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not _threads()


def test_a_step_does_not_wait_for_what_is_read_ahead(recorder: Any) -> None:
    waited = {}
    for name, batches in (("alone", _decoded(10, 0.02)), ("ahead", read_ahead(_decoded(10, 0.02), 2))):
        recorder.data_sec = 0.0
        for _ in timed(batches):
            time.sleep(0.04)
        waited[name] = recorder.data_sec
    assert waited["alone"] >= 0.2
    assert waited["ahead"] < waited["alone"] / 2  # the first batch is waited for


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

    reading = read_ahead(batches(), 2)
    assert next(reading) == 0
    time.sleep(0.1)
    assert len(read) <= 1 + 2 + 1
    reading.close()  # type: ignore[attr-defined]  # it is a generator
    assert _gone()


def test_an_error_comes_behind_the_batches_before_it() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise ValueError("a damaged file")

    reading = read_ahead(batches(), 4)
    assert next(reading) == 1
    with pytest.raises(ValueError, match="a damaged file"):
        next(reading)
    assert _gone()


def test_a_count_below_one() -> None:
    with pytest.raises(UsageError, match=r"prefetch\(0\)"):
        read_ahead([], 0)
