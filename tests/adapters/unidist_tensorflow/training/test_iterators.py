"""Iterators of tf.data, whose destructors can block, are destroyed in a background thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("tensorflow")

from unidist_tensorflow.training import end_in_background, read_to_its_end


class _Numbers(Iterator[int]):
    """Yields three numbers. Its destructor waits for an event, and records the thread that it runs in."""

    def __init__(self, ended: list[str], may_end: threading.Event) -> None:
        self._ended, self._may_end = ended, may_end
        self._next = 0

    def __next__(self) -> int:
        self._next += 1
        if self._next > 3:
            raise StopIteration
        return self._next

    def __del__(self) -> None:
        self._may_end.wait(30)
        self._ended.append(threading.current_thread().name)


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def may_end() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def _wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "unidist-iterator-end":
            thread.join(30)


def test_a_list_of_iterators_is_given_up(ended: list[str], may_end: threading.Event) -> None:
    held: list[Any] = [_Numbers(ended, may_end)]
    end_in_background(held)
    assert ended == []
    may_end.set()
    _wait_for_threads()
    assert ended == ["unidist-iterator-end"]


@pytest.mark.parametrize("count", [3, 1])
def test_what_is_read_to_its_end_or_left_before_it(ended: list[str], may_end: threading.Event, count: int) -> None:
    numbers = read_to_its_end(_Numbers(ended, may_end))
    assert [next(numbers) for _ in range(count)] == [1, 2, 3][:count]
    if count == 3:
        assert next(numbers, None) is None
    else:
        del numbers
    assert ended == []
    may_end.set()
    _wait_for_threads()
    assert ended == ["unidist-iterator-end"]
