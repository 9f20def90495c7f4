"""Functions in threads."""

from __future__ import annotations

import threading

import pytest

from unidist.horovod_api.threads import execute_function_multithreaded, in_thread, on_event

WAIT_SEC = 30.0


def test_a_function_runs_in_a_thread_with_its_arguments() -> None:
    seen: list[object] = []
    thread = in_thread(lambda *args: seen.extend((*args, threading.current_thread().name)), (1, 2), name="worker")
    thread.join(WAIT_SEC)
    assert seen == [1, 2, "worker"]
    assert thread.daemon
    with pytest.raises(ValueError, match=r"give a tuple; for a single argument \(3,\)"):
        in_thread(seen.append, 3)  # type: ignore[arg-type]


def test_a_silent_thread_drops_its_exception() -> None:
    in_thread(lambda: 1 / 0, silent=True).join(WAIT_SEC)  # another warns, which is an error in tests


def test_an_event_starts_the_function_once_unless_it_is_stopped_before() -> None:
    seen: list[str] = []
    event, stop = threading.Event(), threading.Event()
    threads = [
        on_event(event, seen.append, ("first",)),
        on_event(event, seen.append, ("second",), stop=stop, check_stop_interval_s=0.01, daemon=False),
    ]
    stop.set()
    threads[1].join(WAIT_SEC)
    assert seen == []
    event.set()
    threads[0].join(WAIT_SEC)
    assert seen == ["first"]
    with pytest.raises(ValueError, match="stop="):
        on_event(event, print, daemon=False)
    with pytest.raises(ValueError, match="event to wait for"):
        on_event(None, print)  # type: ignore[arg-type]


def test_results_come_by_place_and_an_error_is_one() -> None:
    assert execute_function_multithreaded(pow, [[2, 3], [3, 2]], max_concurrent_executions=1) == {0: 8, 1: 9}
    assert execute_function_multithreaded(pow, []) == {}
    with pytest.raises(RuntimeError, match="divmod failed in a thread"):
        execute_function_multithreaded(divmod, [[1, 1], [1, 0]])


def test_without_waiting_every_call_is_made() -> None:
    made = threading.Semaphore(0)
    assert execute_function_multithreaded(made.release, [[], [2]], block_until_all_done=False) is None
    assert all(made.acquire(timeout=WAIT_SEC) for _ in range(3))
