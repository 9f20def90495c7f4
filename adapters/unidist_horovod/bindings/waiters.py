"""Threads that each wait for one operation: as many as operations are under way."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from unidist.errors import UsageError

MAX_THREADS = 2048
"""More operations under way than this are an error: to queue them could mean to wait for them forever."""
_IDLE_SEC = 10.0
_STOP_SEC = 5.0


class Waiters:
    """Runs jobs that block, every one at once, on threads that are kept a while for the next. Thread-safe.

    Ranks may begin operations in any order, and none ends before all have begun it: with a fixed number of threads,
    each rank could fill all of its threads with operations that wait for others' queued ones. The threads are daemons:
    one that waits for a lost peer does not keep the process from ending.

    Args:
        name: of the threads.
        max_threads: most jobs at a time.
    """

    def __init__(self, name: str, max_threads: int = MAX_THREADS) -> None:
        self._name = name
        self._max_threads = max_threads
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._num_idle = 0
        self._threads: set[threading.Thread] = set()
        self._stopping = False

    def run(self, job: Callable[[], None]) -> None:
        """Run `job`, which must not raise, on a thread; returns at once.

        Raises:
            UsageError: too many are running.
        """
        with self._changed:
            self._stopping = False
            if self._num_idle > len(self._jobs):
                self._jobs.append(job)
                self._changed.notify()
                return
            if len(self._threads) >= self._max_threads:
                raise UsageError(
                    f"{self._max_threads} operations of Horovod's are under way, each on a thread of its own: wait for "
                    "some of them before beginning more"
                )
            self._jobs.append(job)
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._threads.add(thread)
            thread.start()

    def stop(self) -> bool:
        """End the threads; returns whether all did within some seconds. The next `run` starts new ones."""
        limit = time.monotonic() + _STOP_SEC
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, limit - time.monotonic()))
            # join() returns a moment before the system's thread has ended.
            while _exists(thread) and time.monotonic() < limit:
                time.sleep(1e-4)
        return not any(map(_exists, threads))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                self._changed.wait_for(lambda: self._jobs or self._stopping, timeout=_IDLE_SEC)
                self._num_idle -= 1
                if not self._jobs:
                    self._threads.discard(threading.current_thread())
                    return
                job = self._jobs.popleft()
            job()
            del job  # it holds memory of its caller's


def _exists(thread: threading.Thread) -> bool:
    return thread.is_alive() or (thread.native_id is not None and os.path.exists(f"/proc/self/task/{thread.native_id}"))
