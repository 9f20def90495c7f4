"""Threads that wait for operations."""

from __future__ import annotations

import threading

import pytest

from unidist.errors import UsageError
from unidist_horovod.bindings.waiters import Waiters

LIMIT_SEC = 60.0


def test_all_jobs_run_at_once_however_many() -> None:
    waiters = Waiters("test")
    everyone = threading.Barrier(101)
    for _ in range(100):
        waiters.run(lambda: (everyone.wait(LIMIT_SEC), None)[1])
    everyone.wait(LIMIT_SEC)  # breaks, and raises, if one of them is not running
    assert waiters.stop()


def test_a_thread_that_is_free_takes_the_next_job() -> None:
    waiters = Waiters("test")
    threads = []
    for _ in range(20):
        done = threading.Event()

        def job(done: threading.Event = done) -> None:
            threads.append(threading.current_thread())
            done.set()

        waiters.run(job)
        assert done.wait(LIMIT_SEC)
    assert len(set(threads)) < 20
    assert waiters.stop()
    assert not any(thread.is_alive() for thread in threads)


def test_too_many_jobs_are_an_error_and_the_others_go_on() -> None:
    waiters = Waiters("test", max_threads=2)
    go = threading.Event()
    ended = threading.Semaphore(0)

    def job() -> None:
        go.wait(LIMIT_SEC)
        ended.release()

    for _ in range(2):
        waiters.run(job)
    with pytest.raises(UsageError, match="2 operations of Horovod's are under way"):
        waiters.run(job)
    go.set()
    assert all(ended.acquire(timeout=LIMIT_SEC) for _ in range(2))
    assert waiters.stop()


def test_it_can_be_used_again_after_it_was_stopped() -> None:
    waiters = Waiters("test")
    for _ in range(3):
        done = threading.Event()
        waiters.run(done.set)
        assert done.wait(LIMIT_SEC)
        assert waiters.stop()
        assert waiters.stop()
