"""Where a thread of the script is."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unidist.waits.script_line import library_line, script_line


@contextmanager
def _thread(target: Callable[[], object]) -> Iterator[int]:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    assert thread.ident is not None
    yield thread.ident


def _eventually(line: Callable[[], str], end: str) -> bool:
    deadline = time.monotonic() + 30
    while not line().endswith(end) and time.monotonic() < deadline:
        time.sleep(0.001)
    return line().endswith(end)


def test_a_wait_in_a_library_has_the_line_of_the_script_and_that_of_the_library() -> None:
    things: queue.Queue[None] = queue.Queue()

    def take() -> None:
        things.get()

    with _thread(take) as thread:
        assert _eventually(lambda: script_line(thread), " in take")
        assert _eventually(lambda: library_line(thread), " in wait")
        assert library_line(thread).split(":")[0].endswith("/threading.py")
        things.put(None)


def test_what_the_script_computes_itself_is_in_no_library() -> None:
    stop: list[bool] = []

    def compute() -> None:
        while not stop:
            pass

    with _thread(compute) as thread:
        assert _eventually(lambda: script_line(thread), " in compute")
        assert library_line(thread) == ""
        stop.append(True)


def test_a_thread_that_has_ended_is_nowhere() -> None:
    with _thread(lambda: None) as thread:
        assert _eventually(lambda: script_line(thread) or "nowhere", "nowhere")
        assert library_line(thread) == ""
