"""Locks between processes, and bounded waits."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from unidist_parameter_server.store import ProcessLocks
from unidist_parameter_server.store.waiting import wait_until

processes = multiprocessing.get_context("fork")
LONG = timedelta(seconds=60)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return a file for locks."""
    (tmp_path / "locks").touch()
    return str(tmp_path / "locks")


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Return a function that starts processes, which are killed at the end."""
    started: list[Any] = []

    def begin(function: Callable[..., None], *args: Any) -> Any:
        process = processes.Process(target=function, args=args, daemon=True)
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.join()


def test_a_lock_is_another_processs_until_that_is_killed(path: str, start: Callable[..., Any]) -> None:
    has_it = processes.Event()

    def hold() -> None:
        locks = ProcessLocks(path)
        assert locks.try_lock(3)
        has_it.set()
        signal.pause()

    locks = ProcessLocks(path)
    process = start(hold)
    assert has_it.wait(60)
    assert not locks.try_lock(3)
    assert locks.holder(3) == process.pid
    assert locks.try_lock(2), "the others are free"
    assert locks.holder(2) == 0, "no other process has it"
    process.kill()
    process.join()
    assert locks.try_lock(3)


def test_a_forked_child_holds_none_of_its_parents_locks(path: str, start: Callable[..., Any]) -> None:
    """As the workers of a data loader, which outlive a rank that is killed."""
    child_is_there, other = processes.Event(), ProcessLocks(path)

    def parent() -> None:
        locks = ProcessLocks(path)
        assert locks.try_lock(0)
        if os.fork() == 0:
            child_is_there.set()
            signal.alarm(10)
            signal.pause()
        signal.pause()

    process = start(parent)
    assert child_is_there.wait(60)
    assert not other.try_lock(0)
    process.kill()
    process.join()
    assert other.try_lock(0)


def test_a_lock_is_released_after_a_block_that_raises(path: str) -> None:
    locks = ProcessLocks(path)
    with pytest.raises(ZeroDivisionError), locks.hold(0, lambda condition: None):
        raise ZeroDivisionError
    locks.close()
    locks.close()
    assert not locks.is_open


def test_a_wait_ends_when_the_condition_holds() -> None:
    looked: list[int] = []

    def condition() -> bool:
        looked.append(1)
        return len(looked) > 40

    wait_until(condition, LONG, lambda seconds: None)
    assert len(looked) == 41


def test_a_wait_ends_in_time() -> None:
    seconds: list[float] = []
    with pytest.raises(TimeoutError):
        wait_until(lambda: False, timedelta(seconds=0.2), seconds.append)
    assert seconds == sorted(seconds)
    assert seconds[-1] >= 0.2


def test_who_looks_may_end_a_wait() -> None:
    def look(seconds: float) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        wait_until(lambda: False, LONG, look)
